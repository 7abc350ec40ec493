"HeteroFL: which coordinates a client has, averages by entry, parameters per capacity, every element accounted for."
import pytest, torch
from dataclasses import replace
from itertools import product
from math import ceil
from types import SimpleNamespace
from hypothesis import given, settings, strategies as st
from torch import nn
from fedlit.ground.axes import extract, find_axes
from fedlit.methods import HeteroFL, OwnLabels
from fedlit.models import build
from fedlit.batches import Batches
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.server import aggregate
from fedlit.state import start
from federation import Net
from oracle import BY_DATA, UNIFORM, differ, nested, trained, written_out

THREE = (1., .5, .25)

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

# ---- averages, against small networks that plain torch trains ----

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'extract'])
@pytest.mark.parametrize('weights', [UNIFORM, BY_DATA], ids=['uniform', 'by data'])
def test_aggregate(weights, executor):
    ours = trained(HeteroFL(rates=THREE), weights, executor=executor)
    assert differ(ours, written_out(nested(THREE), weights)) < 1e-5
    assert differ(ours, written_out(nested(THREE), BY_DATA if weights is UNIFORM else UNIFORM)) > 1e-3
    assert differ(ours, written_out(nested((1., 1., .25)), weights)) > 1e-3

# ---- capacities: how many parameters they have is asserted by the page ----

@pytest.mark.parametrize('name, classes', [('preact_resnet18', 10), ('feddse_resnet18', 10), ('feddse_resnet34', 200),
                                           ('cnn4', 10)])
def test_the_smallest_capacity_runs(name, classes):
    shape = (1, 28, 28) if name == 'cnn4' else (3, 32, 32)
    net = build(name, SimpleNamespace(classes=classes, x_train=torch.empty(0, *shape)), seed=0)
    axes = find_axes(net)
    small = extract(net, axes, keep(axes, 4, 5))
    assert small.eval()(torch.zeros(2, *shape))[1].shape == (2, classes)

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
    sent = Broadcast(method, net, state, local)
    out = local_phase(sent, who, Batches(**batches))
    new = aggregate(sent, who, out, torch.rand(n, generator=g) + .1)
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

# ---- networks of one's own ----

class Encoded(nn.Module):
    "A head on what `mix` makes of a layer and the input."
    def __init__(self, layer, mix):
        super().__init__()
        self.layer, self.mix, self.head = layer, mix, nn.Linear(8, 3)
    def forward(self, x):
        z = self.mix(self.layer, x)
        return z, self.head(z)

def branching(layer, x):
    z = layer(x)
    return -z if z.sum() > 0 else z

@pytest.mark.parametrize('layer, mix, message', [
    (nn.Linear(4, 8), lambda layer, x: layer(x)*layer(x).softmax(1), 'layer is used twice'),
    (nn.GRU(4, 8), lambda layer, x: layer(x)[0], 'layer is a GRU'),
    (nn.Linear(4, 8), lambda layer, x: torch.sort(layer(x), 1)[0], "calls 'sort'"),
    (nn.Linear(4, 8), branching, 'Encoded cannot be traced')], ids='twice recurrent sorted branching'.split())
def test_networks_that_cannot_be_followed(layer, mix, message):
    m, net = HeteroFL(rates=(.5,)), Encoded(layer, mix)
    x = dict(x=torch.randn(1, 1, 5, 4), y=torch.randint(0, 3, (1, 1, 5)))
    with pytest.raises(ValueError, match=message): fed_round(Broadcast(m, net, start(m, net, 1), Local(lr=.1)), [0], x,
                                                             [1.])

def test_the_graph_that_is_watched_is_not_the_network():
    "Or the tensors of whoever looks would stand in the network while another thread copies it."
    net = Net()
    assert not {*map(id, net.modules())} & {*map(id, find_axes(net).graph.modules())}
