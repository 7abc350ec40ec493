"Seconds and memory a round against how many clients exist, as many of them sampled; one process for each count."
import time
import torch
from fedlit.data import Task
from fedlit.parse import method
from fedlit.models import build
from fedlit.partition import iid
from fedlit.local import Local
from fedlit.run import federate
from .child import main, peak_mb

def run(work, data, options):
    n, gen = options['clients'], torch.Generator().manual_seed(work['seed'])
    x, y = torch.rand(work['pool'], 1, 8, 8, generator=gen), torch.randint(10, (work['pool'],), generator=gen)
    # all clients draw from one pool, so that only their number grows
    task = Task('noise', x, y, x[:1], y[:1], classes=10)
    began = time.perf_counter()
    clients = [k % work['pool'] for k in iid(torch.arange(n*work['each']) % 10, n, seed=work['seed'])]
    partition = time.perf_counter() - began
    model, how = (build('mlp', task, seed=0, hidden=(128,), features=64),
                  Local(epochs=work['epochs'], batch_size=work['batch'], lr=.01))
    before_mb, began = peak_mb(), time.perf_counter()
    result = federate(model, task, clients, method(options['method']), work['rounds'], how,
                      participation=work['sampled']/n, seed=work['seed'], device='cpu',
                      evaluate_every=work['rounds'], progress=False)
    wall, seconds = time.perf_counter() - began, result.history['seconds'].tolist()
    return dict(seconds=seconds, partition=partition, outside_rounds=wall - sum(seconds),
                before_mb=before_mb, federate_mb=peak_mb() - before_mb, ended=time.time(),
                executor=result.settings['executor'], threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
