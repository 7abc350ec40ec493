"What FedDecorr, FedProx and MOON cost over FedAvg: all four in one process, taking turns."
import time
import torch
from fedlit.data import Task
from fedlit.methods import FedAvg, FedDecorr, FedProx, MOON
from fedlit.models import build, wrap
from fedlit.round import Local
from fedlit.run import federate
from . import nets
from .child import main

METHODS = FedAvg(), FedDecorr(), FedProx(), MOON()

def noise(work):
    "A task of random pixels with one test image, and one index tensor a client."
    gen = torch.Generator().manual_seed(work['seed'])
    x = torch.rand(work['clients']*work['each'], *work['shape'], generator=gen)
    y = torch.randint(10, (len(x),), generator=gen)
    return Task('noise', x, y, x[:1], y[:1], classes=10), list(torch.arange(len(x)).split(work['each']))

def sweep(methods, turn, go):
    "Seconds of two rounds of each method, the second and the third of a fresh run; `turn` decides who is first. `go(method, rounds)` is a `Run`."
    runs = {m.name: go(m, 3) for m in (*methods[turn % len(methods):], *methods[:turn % len(methods)])}
    return {k: r.history['seconds'].tolist()[1:] for k, r in runs.items()}, {k: r.settings['executor'] for k, r in runs.items()}

def run(work, data, options):
    task, clients = noise(work)
    model = build('mobilenetv2', task, seed=0) if work['net'] == 'mobilenetv2' else wrap(nets.build(work['net']), 'head')
    how = Local(epochs=work['epochs'], batch_size=work['batch'], lr=.01, momentum=.9)
    go = lambda m, rounds: federate(model, task, clients, m, rounds, how, seed=work['seed'], device='cpu', evaluate_every=rounds, progress=False)
    seconds = {m.name: [] for m in METHODS}
    for turn in range(work['sweeps']):
        seen, executors = sweep(METHODS, turn, go)
        for k, s in seen.items(): seconds[k] += s
    return dict(seconds=seconds, executors=executors, ended=time.time(), threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
