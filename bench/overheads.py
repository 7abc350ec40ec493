"What FedDecorr, FedProx and MOON cost over FedAvg: all four in one process, taking turns."
import tempfile, time
import torch
from pathlib import Path
from fedlit.data import Task
from fedlit.methods import FedAvg, FedDecorr, FedProx, MOON
from fedlit.models import build, wrap
from fedlit.round import Local
from fedlit.run import federate
from . import nets
from .child import main

# the CPU analogue of W3: 10 clients, all in every round, 600 images of W2's shape each. `sweeps` timed rounds a method
SETTINGS = dict(cnn=dict(net='cnn', shape=[1, 28, 28], clients=10, each=600, epochs=2, batch=32, sweeps=5, seed=0),
                mobilenetv2=dict(net='mobilenetv2', shape=[3, 32, 32], clients=10, each=128, epochs=1, batch=64, sweeps=5, seed=0),
                tiny=dict(net='cnn', shape=[1, 28, 28], clients=2, each=16, epochs=1, batch=8, sweeps=2, seed=0))
METHODS = FedAvg(), FedDecorr(), FedProx(), MOON()

def noise(work):
    "A task of random pixels with one test image, and one index tensor a client."
    gen = torch.Generator().manual_seed(work['seed'])
    x = torch.rand(work['clients']*work['each'], *work['shape'], generator=gen)
    y = torch.randint(10, (len(x),), generator=gen)
    return Task('noise', x, y, x[:1], y[:1], classes=10), list(torch.arange(len(x)).split(work['each']))

def turns(methods, sweeps, go):
    "Seconds of `sweeps` rounds of each method. `go(method, rounds)` runs it on to that round and returns the history's seconds."
    seconds, executors = {m.name: [] for m in methods}, {}
    for s in range(sweeps):
        for m in (*methods[s % len(methods):], *methods[:s % len(methods)]): # everybody is first in turn
            run = go(m, 2*(s + 1)) # a round to warm up, and one that counts: from the second on every client has a past
            seconds[m.name].append(run.history['seconds'].iloc[-1])
            executors[m.name] = run.settings['executor']
    return seconds, executors

def run(work, data, options):
    task, clients = noise(work)
    model = build('mobilenetv2', task, seed=0) if work['net'] == 'mobilenetv2' else wrap(nets.build(work['net']), 'head')
    how = Local(epochs=work['epochs'], batch_size=work['batch'], lr=.01, momentum=.9)
    with tempfile.TemporaryDirectory() as folder:
        go = lambda m, rounds: federate(model, task, clients, m, rounds, how, seed=work['seed'], device='cpu', progress=False,
                                        evaluate_every=10**9, checkpoint=Path(folder)/f'{m.name}.safetensors')
        seconds, executors = turns(METHODS, work['sweeps'], go)
    return dict(seconds=seconds, executors=executors, ended=time.time(), threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
