"FedAvg as one writes it in an afternoon: torch.optim.SGD, a loop over clients, batches sliced by a permutation."
import time
import torch, torch.nn.functional as F
from .child import Clock, cohort, main
from .nets import arrays, build

def shuffle(work, data, round, k):
    "The batches (index tensors into the training set) that client `k` takes in a round, step by step."
    rows = torch.as_tensor(data.parts[k])
    for _ in range(work['epochs']): yield from rows[torch.randperm(len(rows))].split(work['batch'])

def train(model, work, batches):
    "SGD over (images, labels); returns how many samples were visited."
    optimiser, count = torch.optim.SGD(model.parameters(), lr=work['lr'], momentum=work['momentum']), 0
    for x, y in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        count += len(y)
    return count

def fedavg(work, data, batches, choose=cohort):
    "FedAvg, weighted by samples. `batches(round, k)` yields what client k trains on."
    torch.manual_seed(work['seed'])
    model, clock, samples = build(work['net'], data.start), Clock(), 0
    for r in range(work['rounds']):
        who, sent, total, samples = choose(work, r), {k: v.clone() for k, v in model.state_dict().items()}, None, 0
        size = sum(len(data.parts[k]) for k in who)
        for k in who:
            model.load_state_dict(sent)
            samples += train(model, work, batches(r, k))
            share = {n: v*(len(data.parts[k])/size) for n, v in model.state_dict().items()}
            total = share if total is None else {n: total[n] + v for n, v in share.items()}
        model.load_state_dict(total)
        clock.lap()
    return dict(seconds=clock.seconds, ended=time.time(), samples=samples, weights=arrays(model),
                threads=torch.get_num_threads())

def run(work, data, options, order=shuffle, choose=cohort):
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    return fedavg(work, data, lambda r, k: ((x[i], y[i]) for i in order(work, data, r, k)), choose)

if __name__ == '__main__': main(run)
