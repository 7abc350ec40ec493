"What a client costs in a round, in bytes and seconds: `python -m bench.capacity --out results/capacity`."
import json
import numpy as np, pandas as pd, torch
from dataclasses import replace
from pathlib import Path
from scipy.optimize import nnls
from types import SimpleNamespace
from fedlit.batches import Batches
from fedlit.cohort import Broadcast
from fedlit.data import Task
from fedlit.ground.tape import Tapes
from fedlit.local import Local
from fedlit.method import FedAvg
from fedlit.methods import FedBN, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.round import local_phase
from fedlit.run import federate
from fedlit.scale.capacity import _round, traffic
from fedlit.scale.costs import RATES, narrow, take_turns
from fedlit.state import start
from .costs import measure_once, parser, this_machine

def _fit(a, t):
    "Coefficients >= 0 of the columns of `a` (n, m) that give `t` (n,) with the least squared relative error."
    return nnls(a/t[:, None], np.ones(len(t)))[0]

def measure(
    jobs,       # dict name -> (Method, network that returns (features, logits)); the networks are not changed
    shape,      # of one sample
    classes,    # int
    batch_sizes=(8, 32), # samples a step
    steps=(1, 4), # of a phase
    repeats=5,  # turns; the least time counts
) -> pd.DataFrame: # a row a job: bytes as `traffic`; seconds fixed, step, sample, merge; `misfit`, worst relative error
    "What a client of each method costs in a round, in bytes and in seconds of this machine's processor, on one thread."
    a = np.array([[1, t, t*b] for t in steps for b in batch_sizes], float)
    phases = {(name, *at): _phase(*job, shape, classes, *at)
              for name, job in jobs.items() for at in a[:, 1:].astype(int).tolist()}
    merges = {name: _round(*job, shape, classes, 4, None)[2] for name, job in jobs.items()}
    best = {k: v[:, 1].min() for k, v in take_turns({**phases, **merges}, repeats).items()}
    def row(name, job):
        seconds = np.array([best[(name, *at)] for at in a[:, 1:].astype(int).tolist()])
        x = _fit(a, seconds)
        return {**traffic(*job, shape, classes, 1).loc[0], **dict(zip(('fixed', 'step', 'sample'), x)),
                'merge': best[name]/4, 'misfit': abs(a@x/seconds - 1).max()}
    return pd.DataFrame({name: row(name, job) for name, job in jobs.items()}).T

def _phase(method, model, shape, classes, steps, images):
    "A function of nothing that runs the local phase of one client, with steps played from a tape."
    state, tapes, B = replace(start(method, model, 1), round=1), Tapes(), images//steps
    batches = Batches(torch.randn(1, steps, B, *shape), torch.zeros(1, steps, B, dtype=torch.long))
    return lambda: local_phase(Broadcast(method, model, state, Local(batch_size=B, lr=1e-3)), [0], batches, tapes=tapes)

def contenders(
    model, # the whole network
):         # dict name -> (Method, network), for `measure`
    "What the command measures: four methods on the whole network, and the small networks of HeteroFL's weaker clients."
    return {**{m.name: (m, model) for m in (FedAvg(), SCAFFOLD(), MOON(), FedBN())},
            **{f'HeteroFL {r:g}': (FedAvg(), narrow(model, r)) for r in RATES[1:]}}

NETWORKS = { # name of the file -> network of fedlit.models, its options, shape of a sample, batch sizes
    'mlp':         ('mlp', dict(hidden=(64,), features=64, norm='batch'), (1, 8, 8), (8, 32)),
    'cnn4':        ('cnn4', {}, (1, 28, 28), (4, 16)),
    'mobilenetv2': ('mobilenetv2', {}, (3, 32, 32), (4, 16))}

def network(
    name,       # one of NETWORKS
    classes=10, # int
):              # the network, the shape of a sample
    "A network that the command measures."
    kind, options, shape, _ = NETWORKS[name]
    return build(kind, SimpleNamespace(classes=classes, x_train=torch.empty(0, *shape)), seed=0, **options), shape

def federations(counts=(10, 100, 1000), sampled=10, each=32, executors=('loop', 'vmap'), rounds=(4, 14), repeats=5):
    "Seconds of the processor that a round of `federate` with FedAvg takes."
    (model, shape), g, local = network('mlp'), torch.Generator().manual_seed(0), Local()
    x, y = torch.rand(2000, *shape, generator=g), torch.randint(10, (2000,), generator=g)
    task = Task('noise', x, y, x[:1], y[:1], classes=10)
    parts = {n: list(torch.randint(2000, (n, each), generator=g)) for n in counts}
    def job(n, e, r):
        return lambda: federate(model, task, parts[n], FedAvg(), r, local, sampled/n, executor=e, device='cpu',
                                evaluate_every=r, progress=False)
    seconds = take_turns({(n, e, r): job(n, e, r) for n in counts for e in executors for r in rounds},
                         repeats)
    least = lambda n, e, r: seconds[n, e, r][:, 1].min()
    each_round = lambda n, e: (least(n, e, rounds[1]) - least(n, e, rounds[0]))/(rounds[1] - rounds[0])
    return [dict(clients=n, executor=e, sampled=sampled, each=each, epochs=local.epochs, batch_size=local.batch_size,
                 seconds=each_round(n, e))
            for n in counts for e in executors]

def _settings(name, repeats):
    kind, options, shape, batch_sizes = NETWORKS[name]
    return dict(network=kind, options=json.loads(json.dumps(options)), shape=list(shape),
                batch_sizes=list(batch_sizes), repeats=repeats)

def _measure(name, repeats):
    model, shape = network(name)
    rows = measure(contenders(model), shape, 10, NETWORKS[name][3], repeats=repeats)
    return dict(rows=rows.rename_axis('method').reset_index().to_dict('records'),
                federations=federations() if name == 'mlp' else None, machine=this_machine())

def main(args=None):
    p = parser('capacity', 'What a client costs in a round: bytes, and seconds on this machine.', NETWORKS)
    a = p.parse_args(args)
    torch.set_num_threads(1)
    for name in a.networks:
        measure_once(Path(a.out)/f'{name}.json', _settings(name, a.repeats), lambda n=name: _measure(n, a.repeats))

if __name__ == '__main__': main()
