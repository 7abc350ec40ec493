"Sub-models beside the small network trained alone, ragged clients beside even ones: runs that take turns by the round."
import statistics, time
import torch
from fedlit.engine.masks import MaskedCohort
from fedlit.methods import FedAvg, FedDSE, FedGSE, HeteroFL
from fedlit.models import build, wrap
from fedlit.local import Local
from fedlit.ground.memory import hold_memory
from fedlit.run import federating
from fedlit.scale.costs import narrow
from . import nets
from .child import main
from .overheads import noise, turns_of

CHOOSING = [0.] # seconds for which clients were given their parts of the network

def watch(choose):
    "`MaskedCohort.per_client_masks`, timed."
    def time_step(self, step):
        began = time.perf_counter()
        try: return choose(self, step)
        finally: CHOOSING[0] += time.perf_counter() - began
    return time_step

def in_turn(running, work):
    "Seconds of the rounds after the warm-up, and those of them that went into choosing parts."
    last, chose = {}, {k: [] for k in running}
    for k in turns_of(list(running), work['rounds']):
        CHOOSING[0] = 0.
        last[k] = next(running[k])
        chose[k].append(CHOOSING[0])
    warm = work['warmup']
    return ({k: r.history['seconds'].tolist()[warm:] for k, r in last.items()},
            {k: v[warm:] for k, v in chose.items()}, {k: r.settings['executor'] for k, r in last.items()})

def row(name, executor, seconds, chose, base):
    "Medians: seconds a round, those of choosing, and ratios to `base` of the same turn, with choosing and without."
    less = [s - c for s, c in zip(seconds, chose)]
    ratio = lambda v: statistics.median(a/b for a, b in zip(v, base))
    return dict(name=name, executor=executor, seconds=seconds, choosing=statistics.median(chose),
                ratio=ratio(seconds), without=ratio(less))

def submodels(work, go):
    task, clients = noise(work, [work['each']]*work['clients'])
    public, big = torch.rand(work['public'], *work['shape']), wrap(nets.build(work['net']), 'head')
    one = (work['rate'],)
    runs = {'the small network alone': go(narrow(big, work['rate']), task, clients, FedAvg(), executor='loop')}
    enough = FedDSE(rates=one, samples=128) # as many as the thesis finds to be enough, section 3.4.4
    for name, m in dict(HeteroFL=HeteroFL(rates=one), FedDSE=FedDSE(rates=one), FedGSE=FedGSE(rates=one),
                        **{'FedDSE, 128 samples': enough}).items():
        runs[name] = go(big, task, clients, m, executor='extract', proxy=public)
    return runs

def ragged(work, go):
    runs = {}
    for norm in ('batch', 'none'):
        for how in ('even', 'ragged'):
            task, clients = noise(work, work[how])
            net = build('mlp', task, seed=0, hidden=(128,), features=64, norm=norm)
            runs[f"{how}{', BatchNorm' if norm == 'batch' else ''}"] = go(net, task, clients, FedAvg(), executor='vmap')
    return runs

BASES = {'ragged, BatchNorm': 'even, BatchNorm', 'ragged': 'even'} # all others: the first

def run(work, data, options):
    hold_memory()
    MaskedCohort.per_client_masks = watch(MaskedCohort.per_client_masks)
    how = Local(epochs=work['epochs'], batch_size=work['batch'], lr=.01, momentum=.9)
    go = lambda net, task, clients, method, **kw: federating(
        net, task, clients, method, work['rounds'], how, seed=work['seed'], device='cpu',
        evaluate_every=work['rounds'], progress=False, **kw)
    seconds, chose, executors = in_turn(dict(submodels=submodels, ragged=ragged)[options['what']](work, go), work)
    first = next(iter(seconds))
    rows = [row(k, executors[k], s, chose[k], seconds[BASES.get(k, k if options['what'] == 'ragged' else first)])
            for k, s in seconds.items()]
    return dict(rows=rows, ended=time.time(), threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
