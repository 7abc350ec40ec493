"HeteroFL and its trimmings: small networks that torch really trains, averages by entry, gradients by finite formulas."
import pytest, torch, torch.nn.functional as F
from dataclasses import replace
from itertools import product
from math import ceil, exp, log
from types import SimpleNamespace
from hypothesis import given, settings, strategies as st
from torch import nn
from fedlit.axes import along, extract, find_axes, masked, masks
from fedlit.method import FedAvg
from fedlit.methods.feddecorr import FedDecorr
from fedlit.methods.heterofl import HeteroFL
from fedlit.methods.submodels import Clip, MaskedCE, OwnLabels, Scaler
from fedlit.models import build, count
from fedlit.round import Batches, Local, aggregate, fed_round, local_phase, start
from federation import Net, gap, train

RATES = (1., .5, .25, .125, .0625)

def keep(axes, client=0, clients=1, round=0, **kw):
    return HeteroFL(**kw).mask(axes=axes, number=torch.tensor(client), clients=clients, round=round)

# ---- which coordinates ----

@pytest.mark.parametrize('r', [1., .99, .75, .5, .3, .25, .125, .0625, .01])
def test_the_first_ceil_of_every_axis(r):
    axes = SimpleNamespace(size={'a': 64, 'b': 10, 'c': 5, 'd': 1, 'e': 100})
    got = {a: v.nonzero()[:, 0].tolist() for a, v in keep(axes, rates=(r,)).items()}
    assert got == {a: list(range(max(1, ceil(n*r - 1e-9)))) for a, n in axes.size.items()}

def test_fixed_rates_are_blocks_of_clients():
    axes = SimpleNamespace(size={'a': 16})
    assert [int(keep(axes, k, 10)['a'].sum()) for k in range(10)] == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1]

def test_dynamic_rates_change_with_the_round_and_repeat():
    axes = SimpleNamespace(size={'a': 16})
    draws = [[int(keep(axes, k, 10, t, assign='dynamic')['a'].sum()) for k in range(10)] for t in range(20)]
    assert len(set(map(tuple, draws))) == 20 and {n for d in draws for n in d} == {16, 8, 4, 2, 1}
    assert draws[7] == [int(keep(axes, k, 10, 7, assign='dynamic')['a'].sum()) for k in range(10)]

class Residual(nn.Module):
    "A stem and a branch that are added, and a layer that reads the sum."
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer, self.last, self.head = (
            nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 6, 1), nn.Linear(6, 4), nn.Linear(4, 3))
    def forward(self, x):
        h = self.stem(x).relu()
        z = self.last((h + self.outer(self.inner(h).relu())).mean((-1, -2)))
        return z, self.head(z)

def test_inputs_are_the_outputs_of_the_layer_before_and_sums_agree():
    net = Residual()
    small = extract(net, (axes := find_axes(net)), keep(axes, rates=(.5,)))
    for name, rows, columns in (('stem', 3, 1), ('inner', 4, 3), ('outer', 3, 4), ('last', 2, 3), ('head', 3, 2)):
        assert torch.equal(small.get_parameter(f'{name}.weight'),
                           net.get_parameter(f'{name}.weight')[:rows, :columns]), name
        assert torch.equal(small.get_parameter(f'{name}.bias'), net.get_parameter(f'{name}.bias')[:rows]), name
    small(torch.zeros(2, 1, 6, 6))

# ---- small networks that are really built, plain torch, an average that counts ----

class Two(nn.Module):
    "Three inputs, two layers, four classes."
    def __init__(self, width=8, inner=5):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, width), nn.Linear(width, inner), nn.Linear(inner, 4)
    def forward(self, x):
        z = F.relu(self.b(F.relu(self.a(x))))
        return z, self.head(z)

K, T, B, LR, MOMENTUM, DECAY = 3, 4, 6, .2, .5, .01
OWNED = [(0, 1), (1, 2), (0, 1)] # labels of the three clients; nobody has class 3

def two():
    torch.manual_seed(5)
    return Two().double()

def data(r=0):
    g = torch.Generator().manual_seed(r)
    pick = torch.randint(0, 2, (K, T, B), generator=g)
    pick[:, 0, :2] = torch.tensor([0, 1]) # every client shows both of its labels
    return dict(x=torch.randn(K, T, B, 3, generator=g, dtype=torch.double),
                y=torch.stack([torch.tensor(OWNED[k])[pick[k]] for k in range(K)]))

def fedlit_run(method, weights, executor='loop', rounds=2):
    state = start(method, net := two(), K)
    for r in range(rounds):
        state = fed_round(method, net, state, [0, 1, 2], data(r), weights,
                          Local(lr=LR, momentum=MOMENTUM, weight_decay=DECAY), executor=executor)
    return state.params

def by_hand(rates, weights, rounds=2, logits=lambda k, v: v, scale=False, own=False, clip=None):
    full = {k: v.detach().clone() for k, v in two().named_parameters()}
    for r in range(rounds):
        d, total, seen = (data(r), {k: torch.zeros_like(v) for k, v in full.items()},
                          {k: torch.zeros_like(v) for k, v in full.items()})
        for c in range(K):
            n, m = ceil(8*rates[c]), ceil(5*rates[c])
            net = Two(n, m).double()
            corner = {'a.weight': (n, 3), 'a.bias': (n,),
                      'b.weight': (m, n), 'b.bias': (m,),
                      'head.weight': (4, m), 'head.bias': (4,)}
            with torch.no_grad():
                for k, v in net.named_parameters(): v.copy_(full[k][tuple(slice(s) for s in corner[k])])
            before = {k: v.detach().clone() for k, v in net.named_parameters()}
            speed = {k: torch.zeros_like(v) for k, v in before.items()}
            for t in range(T):
                net.zero_grad()
                u, w = (8/n, 5/m) if scale else (1, 1) # the scaler, behind each layer that was cut
                h = F.relu(w*net.b(F.relu(u*net.a(d['x'][c, t]))))
                F.cross_entropy(logits(c, net.head(h)), d['y'][c, t]).backward()
                if clip: torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                with torch.no_grad():
                    for k, v in net.named_parameters():
                        speed[k] = MOMENTUM*speed[k] + v.grad + DECAY*v
                        v -= LR*speed[k]
                if own:
                    with torch.no_grad():
                        for k in ('head.weight', 'head.bias'):
                            for row in set(range(4)) - set(OWNED[c]): net.get_parameter(k)[row] = before[k][row]
            for k, v in net.named_parameters():
                for i in product(*map(range, corner[k])):
                    if own and k.startswith('head') and i[0] not in OWNED[c]: continue
                    total[k][i] += weights[c]*v.detach()[i]
                    seen[k][i] += weights[c]
        for k, v in full.items():
            for i in product(*map(range, v.shape)):
                if seen[k][i] > 0: v[i] = total[k][i]/seen[k][i]
    return full

def differ(a, b): return max((a[k] - b[k]).abs().max().item() for k in b)

THREE, UNIFORM, SAMPLES = (1., .5, .25), [1., 1., 1.], [30., 20., 50.]

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'extract'])
@pytest.mark.parametrize('weights', [UNIFORM, SAMPLES], ids=['uniform', 'samples'])
def test_aggregate(weights, executor):
    ours = fedlit_run(HeteroFL(rates=THREE), weights, executor)
    assert differ(ours, by_hand(THREE, weights)) < 1e-5
    assert differ(ours, by_hand(THREE, SAMPLES if weights is UNIFORM else UNIFORM)) > 1e-3
    assert differ(ours, by_hand((1., 1., .25), weights)) > 1e-3

def test_what_nobody_had_stays():
    ours, net = fedlit_run(HeteroFL(rates=(.5, .25)), UNIFORM), two()
    assert differ(ours, by_hand((.5, .5, .25), UNIFORM)) < 1e-5
    for k, (i, j) in {'a.weight': (4, 0), 'b.weight': (3, 4)}.items():
        assert (torch.equal(ours[k][i:], net.get_parameter(k)[i:].detach())
                and torch.equal(ours[k][:, j:][i:], net.get_parameter(k)[:, j:][i:].detach()))
    assert (torch.equal(ours['head.weight'][:, 3:], net.head.weight[:, 3:].detach())
            and (ours['b.weight'][:3, :4] != net.b.weight[:3, :4]).all())

def test_rate_one_is_fedavg():
    assert differ(fedlit_run(HeteroFL(rates=(1.,)), SAMPLES), fedlit_run(FedAvg(), SAMPLES)) < 1e-6

# ---- the trimmings, on the same networks ----

def test_scaler():
    ours = fedlit_run(HeteroFL(rates=THREE) + Scaler(), UNIFORM)
    assert differ(ours, by_hand(THREE, UNIFORM, scale=True)) < 1e-5
    assert differ(ours, by_hand(THREE, UNIFORM)) > 1e-3
    assert differ(ours, fedlit_run(HeteroFL(rates=THREE) + Scaler(), UNIFORM, 'extract')) < 1e-9

def test_scaler_is_for_training_only():
    net = two()
    axes, params = find_axes(net), dict(net.named_parameters())
    share = {'a': .5, 'b': .6}
    used, idle = (Scaler().use(params, axes, share, train=t) for t in (True, False))
    for k, v in params.items():
        assert torch.allclose(used[k], v/{'a': .5, 'b': .6}.get(k[0], 1.)) and torch.equal(idle[k], v)

def zeros(c, v): return torch.stack([v[:, i] if i in OWNED[c] else 0*v[:, i] for i in range(4)], 1)
def holes(c, v): return torch.stack([v[:, i] if i in OWNED[c] else 0*v[:, i] - 1e30 for i in range(4)], 1)

@pytest.mark.parametrize('fill, fills', [('zero', zeros), ('inf', holes)])
def test_masked_ce_in_training(fill, fills):
    ours = fedlit_run(HeteroFL(rates=THREE) + MaskedCE(fill=fill), SAMPLES)
    assert differ(ours, by_hand(THREE, SAMPLES, logits=fills)) < 1e-5
    assert differ(ours, by_hand(THREE, SAMPLES, logits=holes if fill == 'zero' else zeros)) > 1e-3

@pytest.mark.parametrize('fill, rest', [('zero', 1.), ('inf', 0.)])
def test_masked_ce_loss_and_gradient(fill, rest):
    z = [[.3, -1.2, 2., .7, 0.], [1.5, .1, -.4, -2., 3.]]
    own, y = [0, 2, 3], [2, 0]
    v = torch.tensor(z, dtype=torch.double, requires_grad=True)
    loss = F.cross_entropy(MaskedCE(fill=fill).output(logits=v, labels=torch.tensor([c in own for c in range(5)])),
                           torch.tensor(y))
    loss.backward()
    expected = 0.
    for i in range(2):
        Z = sum(exp(z[i][c]) for c in own) + 2*rest
        expected += (log(Z) - z[i][y[i]])/2
        for c in range(5):
            slope = (exp(z[i][c])/Z - (c == y[i]))/2 if c in own else 0.
            assert abs(v.grad[i, c].item() - slope) < 1e-9
    assert abs(loss.item() - expected) < 1e-9

def test_own_labels():
    ours, net = fedlit_run(HeteroFL(rates=THREE) + OwnLabels(), SAMPLES), two()
    assert differ(ours, by_hand(THREE, SAMPLES, own=True)) < 1e-5
    assert differ(ours, by_hand(THREE, SAMPLES)) > 1e-3
    assert (torch.equal(ours['head.weight'][3], net.head.weight[3].detach())
            and ours['head.bias'][3] == net.head.bias[3]) # nobody's class
    rows = OwnLabels().mask(dict(net.named_parameters()), find_axes(net), torch.tensor([True, False, True, False]))
    assert set(rows) == {'head.weight', 'head.bias'}
    assert (rows['head.weight'].tolist() == [[c in (0, 2)]*5 for c in range(4)]
            and rows['head.bias'].tolist() == [True, False, True, False])

@pytest.mark.parametrize('norm', [.05, .3, 100.])
def test_clip(norm):
    ours = fedlit_run(HeteroFL(rates=THREE) + Clip(norm=norm), UNIFORM)
    assert differ(ours, by_hand(THREE, UNIFORM, clip=norm)) < 1e-5
    assert (differ(ours, by_hand(THREE, UNIFORM)) > 1e-4) == (norm < 1)

def test_all_trimmings_together():
    m = HeteroFL(rates=THREE) + Scaler() + MaskedCE() + OwnLabels() + Clip(norm=.5)
    hand = by_hand(THREE, UNIFORM, logits=zeros, scale=True, own=True, clip=.5)
    for executor in ('loop', 'vmap', 'extract'): assert differ(fedlit_run(m, UNIFORM, executor), hand) < 1e-5

# ---- a penalty on features sees those that are there ----

def test_feddecorr_on_live_features():
    def hand(z): # correlations of the columns, squared, off the diagonal, by loops
        n, d = z.shape
        z = (z - z.mean(0))/(z.var(0) + 1e-8).sqrt()
        return sum((z[:, i]@z[:, j])**2/n for i in range(d) for j in range(d) if i != j)/(d*(d-1))
    torch.manual_seed(0)
    net = build('mlp', SimpleNamespace(classes=4, x_train=torch.empty(0, 3)), seed=0, hidden=(8,), features=12,
                representation='linear').double()
    axes, x, y = find_axes(net), torch.randn(10, 3).double(), torch.randint(0, 4, (10,))
    on = keep(axes, rates=(.5,))
    small = extract(net, axes, on).train()
    z = torch.func.functional_call(net, masked(dict(net.named_parameters()), masks(axes, on)), (x,))[0]
    live = along(axes, axes.features, on)
    mine, true = FedDecorr(beta=1.).loss(z, live), hand(small(x)[0])
    assert live.sum() == 6 and abs((mine - true).item()) < 1e-6
    assert abs((FedDecorr(beta=1.).loss(z) - true).item()) > 1e-2 # dead columns counted
    old = {k: v.detach().clone() for k, v in small.named_parameters()}                  # and one step of a round
    features, logits = small(x)
    grads = torch.autograd.grad(F.cross_entropy(logits, y) + 3*hand(features), list(small.parameters()))
    m = HeteroFL(rates=(.5,)) + FedDecorr(beta=3.)
    for executor in ('loop', 'vmap', 'extract'):
        new = fed_round(m, net, start(m, net, 1), [0], dict(x=x[None, None], y=y[None, None]), [1.],
                        Local(lr=.1, momentum=0.), executor=executor).params
        for (k, v), g in zip(old.items(), grads):
            assert torch.allclose(new[k][tuple(map(slice, v.shape))], v - .1*g, atol=1e-6), (executor, k)

# ---- parameters per capacity ----

PUBLISHED = [('preact_resnet18', 10, (11172170, 2796714, 701018, 176178, 44510)),
             ('feddse_resnet18', 10, (11524426, 2884778, 723034, 181682, 45886)),
             ('feddse_resnet34', 200, (22291208, 5602792, 1415768, 361552, 94268)),
             ('cnn4', 10, (1556874, 391370, 98922, 25274, 6594))]

@pytest.mark.parametrize('name, classes, sizes', PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_parameters_per_capacity(name, classes, sizes):
    shape = (1, 28, 28) if name == 'cnn4' else (3, 32, 32)
    net = build(name, SimpleNamespace(classes=classes, x_train=torch.empty(0, *shape)), seed=0)
    axes = find_axes(net)
    small = [extract(net, axes, keep(axes, k, 5)) for k in range(5)]
    assert tuple(map(count, small)) == sizes
    assert small[-1].eval()(torch.zeros(2, *shape))[1].shape == (2, classes)   # and the smallest runs

# ---- every element is accounted for ----

@settings(max_examples=25, deadline=None)
@given(rates=st.lists(st.sampled_from([1., .99, .5, .3, .25, .0625]), min_size=1, max_size=4),
       assign=st.sampled_from(['fixed', 'dynamic']), seed=st.integers(0, 99), clients=st.integers(1, 6),
       present=st.sets(st.integers(0, 5), min_size=1), round=st.integers(0, 5), own=st.booleans())
def test_every_element_is_accounted_for(rates, assign, seed, clients, present, round, own):
    who = sorted({p % clients for p in present})
    m = HeteroFL(rates=tuple(rates), assign=assign, seed=seed)
    net = build('small_cnn', SimpleNamespace(classes=3, x_train=torch.empty(0, 1, 4, 4)), seed=0, channels=(3, 4),
                features=5, norm='batch').double()
    g, n = torch.Generator().manual_seed(seed), len(who)
    batches = dict(x=torch.randn(n, 1, 4, 1, 4, 4, generator=g, dtype=torch.double),
                   y=torch.randint(0, 3, (n, 1, 4), generator=g))
    method, local = m + OwnLabels() if own else m, Local(lr=.5)
    state = start(method, net, clients)
    state = replace(state, round=round)
    out = local_phase(method, net, state, who, Batches(**batches), local)
    new = aggregate(method, state, who, out, torch.rand(n, generator=g) + .1, local)
    width = {'body.0': 3, 'body.4': 4, 'body.9': 5} # which layer makes which axis, typed by hand
    kept = [{a: len([i for i in range(k)
                     if i < max(1, ceil(k*m.rate(torch.tensor(c), clients, round).item() - 1e-9))])
             for a, k in width.items()}
            for c in who]
    side = {'body.0': ('body.0', None), 'body.1': ('body.0',),
            'body.4': ('body.4', 'body.0'), 'body.5': ('body.4',),
            'body.9': ('body.9', 'body.4'), 'head': (None, 'body.9')}
    changed = 0
    for name, old in state.params.items():
        layer, values = name.rsplit('.', 1)[0], out['params'][name]
        for i in product(*map(range, old.shape)):
            has = [k for k in range(n)
                   if all(a is None or i[d] < kept[k][a] for d, a in zip(range(old.dim()), side[layer]))
                   and not (own and layer == 'head' and i[0] not in batches['y'][k].flatten().tolist())]
            if not has:
                assert new.params[name][i] == old[i]
                continue
            theirs = [values[k][i].item() for k in has]
            # weights are in single precision
            assert min(theirs) - 1e-6 <= new.params[name][i].item() <= max(theirs) + 1e-6
            changed += new.params[name][i].item() != old[i].item()
    assert changed

# ---- the laws of the family ----

TRIMMED = HeteroFL() + Scaler() + MaskedCE() + OwnLabels() + Clip()

@pytest.mark.parametrize('m', [HeteroFL(rates=THREE), HeteroFL(assign='dynamic', seed=3), TRIMMED],
                         ids=['three', 'dynamic', 'trimmed'])
def test_executors_agree(m):
    loop = train(m, 'loop', rounds=2)
    assert gap(loop, train(m, 'vmap', rounds=2)) < 1e-9
    assert gap(loop, train(m, 'extract', rounds=2)) < 1e-9

# ---- a user's own network ----

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mix, self.head = nn.Linear(4, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3)
    def forward(self, x):
        z = self.mix(self.enc(x), self.enc(x), self.enc(x))[0]
        return z, self.head(z)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.GRU(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        z = self.memory(x)[0]
        return z, self.head(z)

class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        z = torch.sort(self.enc(x), 1)[0]
        return z, self.head(z)

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        z = self.enc(x)
        if z.sum() > 0: z = -z
        return z, self.head(z)

@pytest.mark.parametrize('kind, message', [(Attention, 'enc is used twice'),
                                           (Recurrent, 'memory is a GRU'),
                                           (Sorted, "calls 'sort'"),
                                           (Branching, 'Branching cannot be traced')])
def test_networks_that_cannot_be_followed(kind, message):
    m, net = HeteroFL(rates=(.5,)), kind()
    x = dict(x=torch.randn(1, 1, 5, 4), y=torch.randint(0, 3, (1, 1, 5)))
    with pytest.raises(ValueError, match=message): fed_round(m, net, start(m, net, 1), [0], x, [1.], Local(lr=.1))

@pytest.mark.parametrize('make', [lambda: HeteroFL(rates=()), lambda: HeteroFL(rates=(0.,)),
                                  lambda: HeteroFL(rates=(1.1,)), lambda: HeteroFL(assign='static'),
                                  lambda: MaskedCE(fill='one'), lambda: Clip(norm=0.)])
def test_bad_hyperparameters_are_named(make):
    with pytest.raises(ValueError, match='but it must be'): make()

def test_the_graph_that_is_watched_is_not_the_network():
    "Or the tensors of whoever looks would stand in the network while another thread copies it."
    net = Net()
    assert not {*map(id, net.modules())} & {*map(id, find_axes(net).graph.modules())}
