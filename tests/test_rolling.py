"FedRolex, FederatedDropout and FjORD beside small cases that are computed with plain loops."
import torch, torch.nn.functional as F
import pytest
from math import ceil
from types import SimpleNamespace
from torch import nn
from fedlit.method import FedAvg
from fedlit.methods.federateddropout import FederatedDropout
from fedlit.methods.fedrolex import FedRolex
from fedlit.methods.fjord import FjORD
from fedlit.round import Local, fed_round, start
from federation import gap, train

class Tiny(nn.Module):
    "Three inputs, hidden layers of five and four, two classes."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
    def forward(self, x):
        z = F.relu(self.b(F.relu(self.a(x))))
        return z, self.head(z)

K, T, B, HIDDEN = 3, 4, 6, (5, 4)
WEIGHTS, LR, MOMENTUM, DECAY = [3., 2., 5.], .2, .5, .01

def tiny():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Tiny().double()

def data(r):
    g = torch.Generator().manual_seed(r)
    return dict(x=torch.randn(K, T, B, 3, generator=g, dtype=torch.double),
                y=torch.randint(0, 2, (K, T, B), generator=g))

def fedlit_run(method, rounds, executor='loop'):
    net = tiny()
    state = start(method, net, K)
    for r in range(rounds):
        state = fed_round(method, net, state, [0, 1, 2], data(r), WEIGHTS,
                          Local(lr=LR, momentum=MOMENTUM, weight_decay=DECAY), executor=executor)
    return state.params

def run_small(p, x, k=None):
    "The forward pass on small tensors, or on their first k[0] and k[1] channels."
    i, j = k or (len(p['a.bias']), len(p['b.bias']))
    h = F.relu(x@p['a.weight'][:i].T + p['a.bias'][:i])
    z = F.relu(h@p['b.weight'][:j, :i].T + p['b.bias'][:j])
    return z@p['head.weight'][:, :j].T + p['head.bias']

def where(i, j):
    "Which rows and columns of each tensor a client has that keeps channels i and j."
    every = lambda n: list(range(n))
    return {'a.weight':    (i, every(3)), 'a.bias':    (i,),
            'b.weight':    (j, i),        'b.bias':    (j,),
            'head.weight': (every(2), j), 'head.bias': (every(2),)}

def by_hand(keep, rounds, objective=lambda r, k, t, p, x, y: F.cross_entropy(run_small(p, x), y)):
    "`keep(round, client)` -> kept channels of both layers. Small tensors, SGD written out, an average entry by entry."
    full = {k: v.detach().clone() for k, v in tiny().named_parameters()}
    for r in range(rounds):
        d, sums = data(r), {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in full.items()}
        for c in range(K):
            at = where(*keep(r, c))
            small = {k: (full[k][at[k][0]] if len(at[k]) == 1 else full[k][at[k][0]][:, at[k][1]])
                     .clone().requires_grad_() for k in full}
            speed = {k: torch.zeros_like(v) for k, v in small.items()}
            for t in range(T):
                grads = torch.autograd.grad(objective(r, c, t, small, d['x'][c, t], d['y'][c, t]), small.values())
                for (k, v), g in zip(list(small.items()), grads):
                    speed[k] = MOMENTUM*speed[k] + g + DECAY*v.detach()
                    small[k] = (v.detach() - LR*speed[k]).requires_grad_()
            for k, (total, weight) in sums.items():
                if len(at[k]) == 1:
                    for n, i in enumerate(at[k][0]):
                        total[i] += WEIGHTS[c]*small[k][n].detach()
                        weight[i] += WEIGHTS[c]
                else:
                    for n, i in enumerate(at[k][0]):
                        for m, j in enumerate(at[k][1]):
                            total[i, j] += WEIGHTS[c]*small[k][n, m].detach()
                            weight[i, j] += WEIGHTS[c]
        full = {k: torch.where(weight > 0, total/weight.clamp(min=1e-9), full[k])
                for k, (total, weight) in sums.items()}
    return full

def differ(a, b): return max((a[k] - b[k]).abs().max().item() for k in b)

# ---- FedRolex ----

def window(n, r, t, direction):
    return sorted({(i + (t if direction == 'forward' else -t)) % n for i in range(ceil(n*r - 1e-9))})

@pytest.mark.parametrize('direction', ['backward', 'forward'])
def test_windows(direction):
    axes = SimpleNamespace(size={'a': 5, 'b': 4, 'c': 16})
    for t in range(35):
        for c, r in enumerate((1., .5, .25)):
            mask = FedRolex(rates=(1., .5, .25), direction=direction).mask(
                axes=axes, number=torch.tensor(c), clients=3, round=t)
            assert ({a: v.nonzero()[:, 0].tolist() for a, v in mask.items()}
                    == {a: window(n, r, t, direction) for a, n in axes.size.items()})

def test_first_windows_by_eye():
    axes, m = SimpleNamespace(size={'a': 5}), lambda **kw: FedRolex(rates=(.5,), **kw)
    at = lambda t, **kw: (m(**kw).mask(axes=axes, number=torch.tensor(0), clients=1, round=t)['a']
                          .nonzero()[:, 0].tolist())
    assert [at(t) for t in range(6)] == [[0, 1, 2], [0, 1, 4], [0, 3, 4], [2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert [at(t, direction='forward') for t in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]

@pytest.mark.parametrize('direction', ['backward', 'forward'])
@pytest.mark.parametrize('rates', [(1., .5, .25), (.5, .25)])
def test_fedrolex_by_hand(direction, rates):
    keep = lambda r, c: [window(n, rates[c*len(rates)//K], r, direction) for n in HIDDEN]
    ours = fedlit_run(FedRolex(rates=rates, direction=direction), 3)
    assert differ(ours, by_hand(keep, 3)) < 1e-5
    assert differ(ours, fedlit_run(FedRolex(
        rates=rates, direction='forward' if direction == 'backward' else 'backward'), 3)) > 1e-3

def test_entries_outside_all_windows_stay():
    net, ours = tiny(), fedlit_run(FedRolex(rates=(.25,)), 1) # two channels of five, one of four, once
    assert (torch.equal(ours['a.weight'][2:], net.a.weight[2:])
            and not torch.equal(ours['a.weight'][:2], net.a.weight[:2]))
    assert (torch.equal(ours['b.weight'][:1, 2:], net.b.weight[:1, 2:])
            and not torch.equal(ours['b.weight'][:1, :2], net.b.weight[:1, :2]))

# ---- Federated Dropout ----

def kept(m, round, client, sizes, clients=3):
    return m.mask(axes=SimpleNamespace(size=sizes), number=torch.tensor(client), clients=clients, round=round)

def test_draws_have_the_size_they_should():
    sizes = {'a': 5, 'b': 4, 'c': 17, 'd': 1}
    for rate in (1., .9, .5, .3, .25, .01):
        for t in range(6):
            for c in range(3):
                mask = kept(FederatedDropout(rates=(rate,)), t, c, sizes)
                assert {a: int(v.sum()) for a, v in mask.items()} == {a: ceil(n*rate - 1e-9) for a, n in sizes.items()}

def test_draws_differ_and_repeat():
    m, sizes = FederatedDropout(rates=(.5,)), {'a': 64, 'b': 64}
    draws = {(t, c, a, s): tuple(v.tolist())
             for t in range(4) for c in range(4) for s in (0, 1)
             for a, v in kept(FederatedDropout(rates=(.5,), seed=s), t, c, sizes, 4).items()}
    assert len(set(draws.values())) == len(draws) == 64
    assert tuple(kept(m, 2, 3, sizes, 4)['b'].tolist()) == draws[2, 3, 'b', 0]

def test_every_channel_is_as_likely():
    counts = sum(kept(FederatedDropout(rates=(.25,)), t, c, {'a': 20})['a'].double()
                 for t in range(200) for c in range(3))
    assert (counts/600 - .25).abs().max() < .07 # four standard deviations of 600 draws

def test_federated_dropout_by_hand():
    m = FederatedDropout(rates=(1., .5, .25))
    keep = lambda r, c: [v.nonzero()[:, 0].tolist() for v in kept(m, r, c, dict(a=5, b=4)).values()]
    ours = fedlit_run(m, 3)
    assert differ(ours, by_hand(keep, 3)) < 1e-5
    assert differ(ours, by_hand(lambda r, c: keep(0, c), 3)) > 1e-3 # the same draw in every round would be seen

# ---- FjORD ----

def test_widths_are_those_of_the_tier():
    m = FjORD()
    for c, tier in enumerate((1., .8, .6, .4, .2)):
        drawn = [m.width(torch.tensor(c), 5, t//20, t%20).item() for t in range(200)]
        fit = [p for p in (.2, .4, .6, .8, 1.) if p <= tier]
        assert set(drawn) == set(fit)
        assert max(abs(drawn.count(p)/200 - 1/len(fit)) for p in fit) < .13
    # every round draws anew
    assert len({tuple(m.width(torch.tensor(0), 5, r, t).item() for t in range(30)) for r in range(10)}) == 10

@pytest.mark.parametrize('distill', [True, False])
def test_fjord_by_hand(distill):
    m = FjORD(rates=(1., .6, .2), widths=(.2, .6, 1.), distill=distill)
    keep = lambda r, c: [list(range(ceil(n*m.rates[c] - 1e-9))) for n in HIDDEN]
    used = set()
    def objective(r, c, t, p, x, y):
        width = m.width(torch.tensor(c), K, r, t).item()
        used.add((c, width))
        narrow, wide = run_small(p, x, [ceil(n*width - 1e-9) for n in HIDDEN]), run_small(p, x)
        if not distill: return F.cross_entropy(narrow, y)
        return F.cross_entropy(wide, y) - (wide.detach().softmax(1)*narrow.log_softmax(1)).sum(1).mean()
    theirs = by_hand(keep, 3, objective)
    assert len(used) == 6 # three widths, two, and one were drawn
    for executor in ('loop', 'extract'): assert differ(fedlit_run(m, 3, executor), theirs) < 1e-5
    assert differ(by_hand(keep, 3), theirs) > 1e-3 # HeteroFL would be seen

def test_fjord_without_choice_is_fedavg():
    one = train(FjORD(rates=(1.,), widths=(1.,), distill=False), rounds=2)
    avg, all_widths = train(FedAvg(), rounds=2), train(FjORD(rates=(1.,), distill=False), rounds=2)
    assert max((one.params[k] - v).abs().max().item() for k, v in avg.params.items()) < 1e-9
    # single-precision weights
    assert max((one.buffers[k] - v).abs().max().item() for k, v in avg.buffers.items()) < 1e-7
    assert max((all_widths.params[k] - v).abs().max().item() for k, v in avg.params.items()) > 1e-3

# ---- all ----

ALL = [FedRolex(rates=(1., .5, .25)), FedRolex(assign='dynamic', direction='forward'),
       FederatedDropout(rates=(1., .5, .25)), FederatedDropout(assign='dynamic'),
       FjORD(), FjORD(rates=(.5, .3), assign='dynamic', distill=False)]

@pytest.mark.parametrize('m', ALL, ids=repr)
def test_executors_agree(m):
    loop = train(m, 'loop', rounds=2)
    assert gap(loop, train(m, 'vmap', rounds=2)) < 1e-9
    assert gap(loop, train(m, 'extract', rounds=2)) < 1e-9

@pytest.mark.parametrize('m', [FedRolex(rates=(1.,)), FederatedDropout(rates=(1.,))], ids=repr)
def test_rate_one_is_fedavg(m):
    one, avg = train(m, rounds=2), train(FedAvg(), rounds=2)
    assert max((one.params[k] - v).abs().max().item() for k, v in avg.params.items()) < 1e-9

@pytest.mark.parametrize('make', [
    lambda: FedRolex(direction='left'), lambda: FedRolex(rates=()), lambda: FederatedDropout(rates=(2.,)),
    lambda: FjORD(widths=(0.,)), lambda: FjORD(rates=(1.5,))])
def test_bad_hyperparameters_are_named(make):
    with pytest.raises(ValueError, match='but it must be'): make()
