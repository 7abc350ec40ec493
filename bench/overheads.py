"What FedDecorr, FedProx and MOON cost over FedAvg: federations in one process that take turns, a round each."
import statistics, time
import torch
from fedlit.data import Task
from fedlit.methods import FedAvg, FedDecorr, FedProx, MOON
from fedlit.models import build, wrap
from fedlit.local import Local
from fedlit.ground.memory import hold_memory
from fedlit.run import federating
from . import nets
from .child import main

# the second shows how far two measurements of one thing differ
METHODS = {'FedAvg': FedAvg(), 'FedAvg again': FedAvg(), 'FedDecorr': FedDecorr(), 'FedProx': FedProx(), 'MOON': MOON()}

def noise(work, sizes):
    "A task of random pixels with one test image, and one index tensor for each client, of so many samples."
    gen = torch.Generator().manual_seed(work['seed'])
    x = torch.rand(sum(sizes), *work['shape'], generator=gen)
    y = torch.randint(10, (len(x),), generator=gen)
    return Task('noise', x, y, x[:1], y[:1], classes=10), list(torch.arange(len(x)).split(sizes))

def turns_of(names, rounds):
    "Who trains next: everybody a round at a time, and everybody is first once in a while."
    for t in range(rounds): yield from names[t % len(names):] + names[:t % len(names)]

def turns(work, go, held=lambda: None):
    """Seconds and ratios of the rounds after the warm-up. `go(method, rounds)` yields a `Run` after every round.

    `held()` says how many MB are in use before a round; what the round adds is its peak less that."""
    running, last, extra = {k: go(m, work['rounds']) for k, m in METHODS.items()}, {}, {}
    for k in turns_of(list(METHODS), work['rounds']):
        before = held()
        last[k] = next(running[k])
        extra[k] = None if before is None else last[k].history['peak_mb'].iloc[-1] - before
    seconds = {k: r.history['seconds'].tolist()[work['warmup']:] for k, r in last.items()}
    ratios = {k: [b/a for a, b in zip(seconds['FedAvg'], s)] for k, s in seconds.items()}
    return dict(seconds=seconds, ratios=ratios, medians={k: statistics.median(r) for k, r in ratios.items()},
                executors={k: r.settings['executor'] for k, r in last.items()}, added_mb=extra)

def run(work, data, options):
    hold_memory()
    task, clients = noise(work, [work['each']]*work['clients'])
    model = (build('mobilenetv2', task, seed=0) if work['net'] == 'mobilenetv2'
             else wrap(nets.build(work['net']), 'head'))
    how = Local(epochs=work['epochs'], batch_size=work['batch'], lr=.01, momentum=.9)
    go = lambda m, rounds: federating(model, task, clients, m, rounds, how, seed=work['seed'], device='cpu',
                                      evaluate_every=rounds, progress=False)
    return dict(turns(work, go), ended=time.time(), threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
