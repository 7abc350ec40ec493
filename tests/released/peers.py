"""What the released code of eleven projects made of small federations, and what fedlit makes of them.

`vectors.json.xz` has their inputs and their numbers; the script that reads them is ours. To make that file of a folder
of JSON files, one for each comparison, with `peer`, `problem` and `expect_rounds`, or with `peer`, `args` and `want`:
`PYTHONPATH=tests python -m released.peers FOLDER`."""
import functools, json, lzma, sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from torch import nn
from fedlit.cohort import Broadcast
from fedlit.local import Adam, Decay, Local, Milestones, SGD
from fedlit.methods import (
    APFL, CoordinateMedian, DP, DPSGD, Ditto, FedALA, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedDyn, FedNova, FedPer,
    FedProto, FedProx, FedRep, FedRoD, FedYogi, Krum, LGFedAvg, MOON, NormClipping, PerFedAvg, SCAFFOLD, TopK,
    TrimmedMean, pFedMe)
from fedlit.methods.compression import quantise
from fedlit.methods.privacy import epsilon_of
from fedlit.participation import PowerOfChoice
from fedlit.round import fed_round
from fedlit.server import network_for
from fedlit.state import start
from . import readings as r

FILE = Path(__file__).with_name('vectors.json.xz')

# ---- the file ----

def pack(folder, file=FILE):
    "Problems are written once, and what we say about the vectors is left out."
    problems, vectors = [], {}
    for f in sorted(Path(folder).glob('*.json')):
        given = json.loads(f.read_text(encoding='utf-8'))
        v = {k: given[k] for k in ('peer', 'who', 'epochs', 'weighting', 'args', 'want', 'prv') if k in given}
        if 'problem' in given:
            if given['problem'] not in problems: problems.append(given['problem'])
            v.update(problem=problems.index(given['problem']), rounds=given['expect_rounds'])
        vectors[f.stem] = v
    text = json.dumps(dict(problems=problems, vectors=vectors), separators=(',', ':'))
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

@functools.cache
def vectors(file=FILE):
    "Name -> what is given, and what a project's code made of it."
    found = json.loads(lzma.decompress(file.read_bytes()))
    return {name: {**v, 'problem': found['problems'][v['problem']]} if 'problem' in v else v
            for name, v in found['vectors'].items()}

# ---- what is compared, in the order of fedlit's pages ----

Case = namedtuple('Case', 'method local reading why', defaults=(None, ''))
# `reading`: the method as the project has it, where that is another; `why`: what it does and the paper does not

def sgd(**kw): return Local(**{**dict(lr=.1, momentum=0., batch_size=8, epochs=1), **kw})
LOCAL, MOMENTUM = sgd(), sgd(lr=.05, momentum=.9)
ADAPTIVE = dict(lr=.05, beta1=.9, tau=.01)
ENVELOPE = pFedMe(lam=3., steps=4, lr=.05, beta=.9)
MIXED = dict(eta=5., share=1., batch=24, most=10**6)

CASES = dict(
    pfllib_fedavg=Case(FedAvg(), LOCAL),
    fluke_fedavg=Case(FedAvg(), LOCAL),
    flower_fedavg=Case(FedAvg(), LOCAL),
    fluke_step=Case(FedAvg(), sgd(lr=Decay(.1, .5, 2))),
    fluke_multistep=Case(FedAvg(), sgd(lr=Milestones(.1, (1, 3)))),
    pfllib_decay_part=Case(FedAvg(), sgd(lr=Decay(.1, .8)), r.OwnClock(gamma=.8),
        "PFLlib's rate decays with the rounds that a client has taken part in, fedlit's with those of the federation."),
    fluke_adam_fresh=Case(FedAvg(), sgd(lr=.01, momentum=.9, optimizer=Adam())),
    pfllib_fedprox=Case(FedProx(mu=.5), LOCAL),
    pfllib_moon=Case(MOON(mu=1., tau=.5), LOCAL),
    pfllib_scaffold=Case(SCAFFOLD(form='paper'), LOCAL),
    fluke_scaffold=Case(SCAFFOLD(form='paper'), LOCAL),
    niid_scaffold=Case(SCAFFOLD(form='paper'), LOCAL),
    niid_scaffold_momentum=Case(SCAFFOLD(form='paper'), MOMENTUM, r.OutsideMomentum(form='paper'),
        "NIID-Bench corrects after the step, so momentum does not add the correction up; the paper has no momentum."),
    feddyn_released=Case(FedDyn(alpha=.3), LOCAL),
    feddyn_released_sizes=Case(FedDyn(alpha=.3), LOCAL, r.SpringBySize(alpha=.3, sizes=()),
        "The authors' code divides a client's alpha by its share of the samples; the paper has one alpha for all."),
    pfllib_feddyn=Case(FedDyn(alpha=.3), LOCAL, r.UnsquaredSpring(alpha=.3),
        "PFLlib's spring is half of alpha times the distance, the paper's half of alpha times its square."),
    pfllib_feddyn_squared=Case(FedDyn(alpha=.3), LOCAL),
    flower_fedavgm=Case(FedAvgM(momentum=.9, form='paper'), LOCAL),
    fednova_released=Case(FedNova(), LOCAL),
    niid_fednova=Case(FedNova(), LOCAL),
    fednova_released_prox=Case(FedProx(mu=.5) + FedNova(mu=.5), LOCAL, FedProx(mu=.5) + r.MeanSteps(mu=.5),
        "With a proximal term the authors' server steps by the mean number of steps, not by the mean length."),
    fednova_released_prox_eq9=Case(FedProx(mu=.5) + FedNova(mu=.5), LOCAL),
    fednova_released_nesterov=Case(FedNova(), sgd(lr=.05, momentum=.9, optimizer=SGD(nesterov=True)), r.PlainLength(),
        "The authors' optimiser measures Nesterov's steps by the length of plain momentum's, which are shorter."),
    fluke_fednova=Case(FedNova(), LOCAL, r.ScaledNetworks(),
        "fluke applies weights that do not sum to one to networks instead of updates, and so scales the network."),
    fluke_fednova_momentum=Case(FedNova(), MOMENTUM, r.ScaledNetworks(),
        "fluke applies weights that do not sum to one to networks instead of updates, and so scales the network."),
    fluke_fednova_rest=Case(FedNova(), LOCAL),
    flower_fedadagrad_v0=Case(FedAdagrad(lr=.1, tau=.01), LOCAL, r.ZeroAdagrad(lr=.1, tau=.01),
        "Flower's v begins at zero, where the paper wants tau squared or more."),
    flower_fedadam_v0=Case(FedAdam(**ADAPTIVE), LOCAL, r.CorrectedZeroAdam(**ADAPTIVE),
        "Flower's v begins at zero, and Flower corrects Adam's bias, with an exponent of t+1; the paper does not."),
    flower_fedadam_tau2=Case(FedAdam(**ADAPTIVE), LOCAL, r.CorrectedAdam(**ADAPTIVE),
        "Flower corrects Adam's bias, with an exponent of t+1; the paper does not."),
    flower_fedyogi_v0=Case(FedYogi(**ADAPTIVE), LOCAL, r.ZeroYogi(**ADAPTIVE),
        "Flower's v begins at zero, where the paper wants tau squared or more."),
    **{f'fluke_{name.lower()}_{start}': Case(method(**ADAPTIVE), LOCAL, reading(**ADAPTIVE),
        "fluke multiplies the mean by the rate of the server's optimiser, which then multiplies by it again"
        + (", and v begins at zero." if start == 'v0' else "."))
       for name, method, *both in (('FedAdagrad', FedAdagrad, r.ShortZeroAdagrad, r.ShortAdagrad),
                                   ('FedAdam', FedAdam, r.ShortZeroAdam, r.ShortAdam),
                                   ('FedYogi', FedYogi, r.ShortZeroYogi, r.ShortYogi))
       for start, reading in zip(('v0', 'tau2'), both)},
    flower_median=Case(CoordinateMedian(), LOCAL),
    flower_trimmed=Case(TrimmedMean(trim=.2), LOCAL),
    flower_clip=Case(NormClipping(norm=.15), LOCAL),
    flower_krum=Case(Krum(attackers=2), LOCAL),
    flower_multikrum=Case(Krum(attackers=2, best=3), LOCAL, r.BySamples(attackers=2, best=3),
        "Flower weighs the chosen clients by their samples, the paper equally."),
    pfllib_fedper=Case(FedPer(), LOCAL),
    pfllib_fedrep=Case(FedRep(), sgd(epochs=2)),
    pfllib_lg_fedavg=Case(LGFedAvg(), LOCAL),
    pfllib_ditto=Case(Ditto(lam=.7), LOCAL),
    fluke_ditto=Case(Ditto(lam=.7), LOCAL),
    paper_apfl=Case(APFL(alpha=.3), LOCAL),
    pfllib_apfl=Case(APFL(alpha=.5), LOCAL, r.TrainedAlone(alpha=.5),
        "PFLlib trains a client's network at itself, not at the mixture, mixes it once a round, and decays alpha."),
    flbench_apfl=Case(APFL(alpha=.3), LOCAL, r.TwoSteps(alpha=.3),
        "FL-bench mixes outputs, decays alpha, and steps the common network twice with one gradient."),
    pfedme_released=Case(ENVELOPE, LOCAL, ENVELOPE + r.InnerDecay(),
        "The authors' inner steps have a weight decay of .001, the paper's none."),
    pfedme_released_mu0=Case(ENVELOPE, LOCAL),
    pfllib_pfedme=Case(ENVELOPE, LOCAL, ENVELOPE + r.InnerDecay(),
        "PFLlib's inner steps have a weight decay of .001, the paper's none."),
    pfllib_pfedme_mu0=Case(ENVELOPE, LOCAL),
    pfllib_perfedavg=Case(PerFedAvg(alpha=.1), sgd(epochs=2)),
    flbench_perfedavg_fo=Case(PerFedAvg(alpha=.07, form='fo'), LOCAL),
    pfllib_fedproto=Case(FedProto(lam=2.), LOCAL, r.WhileTraining(lam=2.),
        "PFLlib, as the authors do, takes prototypes from features met while training, not from the trained network."),
    pfllib_fedproto_collect_all=Case(FedProto(lam=2.), LOCAL),
    pfllib_fedproto_collect_missing=Case(FedProto(lam=2.), LOCAL),
    pfllib_fedproto_lost_part=Case(FedProto(lam=2.), LOCAL, r.Forgetful(lam=2.),
        "PFLlib forgets a class that no client of the last round had, fedlit keeps its last prototype."),
    pfllib_fedrod=Case(FedRoD(), LOCAL, r.CopiedHead(),
        "PFLlib's personal head begins as a copy of the generic one, fedlit's at zero."),
    pfllib_fedrod_zero_all=Case(FedRoD(), LOCAL),
    pfllib_fedrod_zero_missing=Case(FedRoD(), LOCAL),
    pfllib_fedala_1=Case(FedALA(layers=1, **MIXED), LOCAL),
    pfllib_fedala_2=Case(FedALA(layers=2, **MIXED), LOCAL),
    pfllib_fedala_part=Case(FedALA(layers=1, **MIXED), LOCAL, r.EveryoneMixes(layers=1, **MIXED),
        "PFLlib mixes at every client whenever the network is sent, and not only at those that train."),
    flower_clip_dp=Case(DP(clip=.15, noise=0.), LOCAL, NormClipping(norm=.15),
        "Flower weighs clipped updates by samples, fedlit equally, as the noise assumes in both."),
    opacus_dpsgd=Case(DPSGD(clip=.6, noise=0.), LOCAL),
    fedml_topk=Case(TopK(share=.25, feedback=False), LOCAL))

# ---- what fedlit makes of it ----

class Net(nn.Module):
    "Six inputs, eight features, four classes, in double precision."
    def __init__(self, init):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double().load_state_dict({k: tensor(v) for k, v in init.items()})
    def forward(self, x):
        z = self.fc(x).tanh()
        return z, self.head(z)

def tensor(v): return torch.tensor(v, dtype=torch.double)

def of_part(memories, name): return next(v[name] for v in memories.values() if name in v)

def looked_at(kind, method, net, state, data):
    "What fedlit has of the numbers that a project's code reports under `kind`."
    everyone, names = range(state.clients), [n for n, _ in net.named_parameters()]
    of_each = lambda table: {str(k): {n: v[k] for n, v in table.items()} for k in everyone}
    where, _, name = kind.partition(':')
    if where == 'global': return state.params
    if where == 'own': return {str(k): network_for(method, state, k, data(k), net)[0] for k in everyone}
    if where == 'home': return of_each({n: state.personal[n] for n in names})
    if where == 'number': return {str(k): state.personal[name][k] for k in everyone}
    return of_part(state.server, 'c') if where == 'server' else of_each(of_part(state.client, 'c'))

def play(vector, method, local, executor='loop'):
    "For every round, kind -> what fedlit has after it."
    given, passes = vector['problem'], vector.get('epochs', 1)
    x, y = tensor(given['x']).repeat(1, 1, passes, 1, 1), torch.tensor(given['y']).repeat(1, 1, passes, 1)
    clients, all_clients = y.shape[1], [*range(y.shape[1])]
    live = torch.tensor(given['live'], dtype=torch.bool) if 'live' in given else torch.ones(y.shape[1:3]).bool()
    weights = torch.ones(clients) if vector.get('weighting') == 'uniform' else tensor(given['sizes'])
    net, seen = Net(given['init']), []
    state = start(method, net, clients, local=local)
    for t, expected in enumerate(vector['rounds']):
        who = all_clients if isinstance(method, r.EveryoneMixes) else vector.get('who', [all_clients]*len(y))[t]
        batches = dict(x=x[t, who], y=y[t, who], counts=live[who])
        state = fed_round(Broadcast(method, net, state, local), who, batches, weights[who].double(), executor)
        data = lambda k: (x[t, k].flatten(0, 1), y[t, k].flatten())
        seen.append({kind: looked_at(kind, method, net, state, data) for kind in expected})
    return seen

def flat(tree, like):
    "All numbers of `tree` in the order of `like`, which may lack some of its names."
    if isinstance(like, dict): return torch.cat([flat(tree[k], v) for k, v in like.items()])
    return torch.as_tensor(tree, dtype=torch.double).flatten()

def furthest(vector, method, local, executor='loop'):
    "Kind -> the largest difference over rounds, relative to how far the project's numbers have moved."
    seen, out = play(vector, method, local, executor), {}
    init = flat(vector['problem']['init'], vector['problem']['init'])
    for kind in vector['rounds'][0]:
        for got, expected in zip(seen, vector['rounds']):
            want = flat(expected[kind], expected[kind])
            begun = (torch.zeros(1) if kind.startswith(('server', 'client')) else
                     tensor([method.alpha]) if kind.startswith('number') else init)
            moved = (want - begun.repeat(len(want)//len(begun))).abs().max().item()
            far = (flat(got[kind], expected[kind]) - want).abs().max().item()/moved
            out[kind] = max(out.get(kind, 0.), far)
    return out

def reading(name):
    "The method as the project has it."
    case, v = CASES[name], vectors()[name]
    if isinstance(case.reading, r.SpringBySize): return replace(case.reading, sizes=tuple(v['problem']['sizes']))
    if isinstance(case.reading, r.EveryoneMixes): return replace(case.reading, who=tuple(map(tuple, v['who'])))
    return case.reading

# ---- numbers that are no federation ----

def quantized(v, u, levels):
    "FedML draws a number and rounds up below the fraction; fedlit adds a number to the fraction and rounds down."
    lot, drawn = torch.where(tensor(v) < 0, tensor(u), 1 - tensor(u)), torch.rand_like
    torch.rand_like = lambda _: lot
    try: return quantise(tensor(v), levels).tolist()
    finally: torch.rand_like = drawn

def chosen(n, share, losses, sizes):
    draw = PowerOfChoice(share=share, candidates=n).draw
    return sorted(draw(n, sizes, np.random.default_rng(0), lambda who: [losses[k] for k in who]).tolist())

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(100, 200)
    def forward(self, x): return x, self.head(x)

def deviation(method, B, K):
    "Of the noise that `method` adds to the server's network in a round of one step, at a rate of 1."
    torch.manual_seed(0)
    net, local = Wide(), sgd(lr=1.)
    data = dict(x=torch.randn(K, 1, B, 100), y=torch.zeros(K, 1, B, dtype=torch.long))
    ends = [fed_round(Broadcast(m, net, start(m, net, K), local), [*range(K)], data, [1.]*K)
            for m in (method, replace(method, noise=0.))]
    with_noise, without = (torch.cat([v.flatten() for v in e.params.values()]) for e in ends)
    return (with_noise - without).std().item()

Value = namedtuple('Value', 'method of off why', defaults=(0., ''))
# `off`: how much of it may differ, and `why`

VALUES = dict(
    fedml_qsgd=Value('Quantize', quantized, 1e-15),
    flgo_powerofchoice=Value('PowerOfChoice', chosen),
    noise_dp=Value('DP', lambda clip, z, B, K: deviation(DP(clip=clip, noise=z), B, K), .05,
        "The deviation of drawn numbers, against the formula."),
    noise_dpsgd=Value('DPSGD', lambda clip, z, B, K: deviation(DPSGD(clip=clip, noise=z), B, K), .05,
        "The deviation of drawn numbers, against the formula."),
    opacus_epsilon_poisson=Value('epsilon, a share of clients drawn',
        lambda z, T, n, m: epsilon_of(z, T, 1e-5, clients=n, drawn=m, sampling='poisson'), .02,
        "Both bound it by Renyi divergences, at different orders."),
    gaussian_epsilon_full=Value('epsilon, all clients', lambda z, T: epsilon_of(z, T, 1e-5), .12,
        "fedlit's bound by Renyi divergences lies above the exact value."))

def off(name):
    "The largest difference of a value from the project's, relative to that."
    v = vectors()[name]
    pairs = [(tensor(VALUES[name].of(**a)).flatten(), tensor(w).flatten()) for a, w in zip(v['args'], v['want'])]
    return max(((got - want).abs().max()/want.abs().max()).item() for got, want in pairs)

if __name__ == '__main__': pack(sys.argv[1])
