"DepthFL and FedDyn against plain loops: losses, aggregates of depths, memories; executors; published parameter counts."
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlit.methods.depthfl import DepthFL, Exits, exits_cnn, exits_mlp, exits_resnet18, mutual, ramp
from fedlit.methods.feddyn import FedDyn
from fedlit.methods.heterofl import HeteroFL
from fedlit.methods.submodels import MaskedCE
from fedlit.models import count
from fedlit.round import Local, fed_round, start
from federation import gap, train

torch.set_num_threads(1)
N, K, T, B = 8, 4, 2, 6
LOCAL = dict(lr=.1, momentum=.9, weight_decay=.01)

def who(r): return [[0, 3, 5, 6], [1, 2, 4, 7]][r]   # with levels (3, 3, 1, 2): depths 3 3 1 2 both times

def make():
    torch.manual_seed(3)
    return exits_mlp((5,), 4, hidden=6, depth=3).double()

def data(r):
    g = torch.Generator().manual_seed(r)
    return dict(x=torch.randn(K, T, B, 5, generator=g, dtype=torch.double),
                y=torch.randint(0, 4, (K, T, B), generator=g))

def go(method, net, rounds=2, executor="loop", weights=(1.,)*K):
    state = start(method, net, N)
    for r in range(rounds):
        state = fed_round(method, net, state, who(r), data(r), torch.tensor(weights), Local(**LOCAL), executor)
    return state

def kl(teacher, pupil): # one at a time, from the definition
    p = torch.exp(teacher)/torch.exp(teacher).sum(1, keepdim=True)
    q = torch.exp(pupil)/torch.exp(pupil).sum(1, keepdim=True)
    return (p.detach()*(p.detach().log() - q.log())).sum(1).mean()

def plain_loss(logits, y, w, distill=True, last=False):
    total = 0.
    for i in range(len(logits)):
        if last and i < len(logits)-1: continue
        total = total + F.cross_entropy(logits[i], y)
        for j in range(len(logits)):
            if distill and not last and j != i: total = total + w/(len(logits)-1)*kl(logits[j], logits[i])
    return total

def plain(levels, rounds=2, T_ramp=2, alpha=None, distill=True, last=False):
    "The federation written out: short networks really built, SGD by hand, a count for every tensor."
    net, g, h = make(), {}, {}
    for r in range(rounds):
        old = {k: v.clone() for k, v in net.state_dict().items()}
        names = [k for k, _ in net.named_parameters()]
        sums, seen = {k: torch.zeros_like(v) for k, v in old.items()}, {k: 0 for k in old}
        for pos, k in enumerate(who(r)):
            depth = levels[k*len(levels)//N]
            mine = copy.deepcopy(net).train()
            mine.stages, mine.exits = mine.stages[:depth], mine.exits[:depth]
            velocity = {}
            for x, y in zip(data(r)["x"][pos], data(r)["y"][pos]):
                logits = []
                for stage, exit in zip(mine.stages, mine.exits):
                    x = stage(x)
                    logits.append(exit(x)[1])
                loss = plain_loss(logits, y, math.exp(-5*(1 - min(r, T_ramp)/T_ramp)**2), distill, last)
                if alpha:
                    for n, p in mine.named_parameters():
                        loss = loss - (p*g.get((k, n), torch.zeros_like(p))).sum() + alpha/2*(p - old[n]).square().sum()
                mine.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for n, p in mine.named_parameters():
                        if p.grad is None: continue # an exit without a loss
                        velocity[n] = LOCAL["momentum"]*velocity.get(n, 0.) + p.grad + LOCAL["weight_decay"]*p
                        p -= LOCAL["lr"]*velocity[n]
            for n, v in mine.state_dict().items():
                # not trained, not sent
                if last and n.startswith("exits.") and not n.startswith(f"exits.{depth-1}."): continue
                sums[n], seen[n] = sums[n] + v, seen[n] + 1
                if alpha and n in names: g[k, n] = g.get((k, n), 0.) - alpha*(v - old[n])
        new = {n: sums[n]/seen[n] if seen[n] else old[n] for n in old}
        if alpha:
            for n in names:
                if not seen[n]: continue
                h[n] = h.get(n, 0.) - alpha*seen[n]*(new[n] - old[n])/N
                new[n] = new[n] - h[n]/alpha
        net.load_state_dict({n: v if v.is_floating_point() else old[n] for n, v in new.items()})
    return net.state_dict(), g, h

def worst(state, plain):
    ours = {**state.params, **state.buffers}
    return max((ours[k] - v).abs().max().item() for k, v in plain.items() if v.is_floating_point())


# --- the loss ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("distill", [True, False])
def test_loss_and_gradient(depth, distill):
    torch.manual_seed(depth)
    o, y = (2*torch.randn(7, 4, 5, dtype=torch.double)).requires_grad_(), torch.randint(0, 5, (7,))
    m = DepthFL(distill=distill, ramp=9)
    z = m.output(o, 4-depth, 4, 4)
    ours = F.cross_entropy(z, y) + m.loss(z)
    plain = plain_loss([o[:, i] for i in range(depth)], y, math.exp(-5*(5/9)**2), distill)
    assert abs((ours - plain).item()) < 1e-10
    assert (torch.autograd.grad(ours, o)[0] - torch.autograd.grad(plain, o)[0]).abs().max() < 1e-10
    if distill and depth > 1: assert abs((plain_loss([o[:, i] for i in range(depth)], y, 0.) - ours).item()) > 1e-2

def test_mutual_is_zero_for_equal_exits_and_for_one():
    logp = torch.randn(3, 1, 5).log_softmax(-1)
    assert mutual(logp.expand(3, 4, 5), torch.ones(4)).abs().max() < 1e-5
    assert mutual(torch.randn(3, 4, 5).log_softmax(-1), torch.tensor([0., 0., 1., 0.])).abs().max() < 1e-5

def test_ramp():
    assert ([ramp(0, 300), ramp(300, 300), ramp(999, 300)] == [math.exp(-5), 1., 1.]
            and abs(ramp(150, 300) - math.exp(-1.25)) < 1e-12)


# --- rounds -----------------------------------------------------------------------------------------------------------

LEVELS = 3, 3, 1, 2

@pytest.mark.parametrize("method, kw", [(DepthFL(LEVELS, ramp=2), {}),
                                        (DepthFL(LEVELS, distill=False, exits="last"), dict(last=True)),
                                        (DepthFL(LEVELS, ramp=2) + FedDyn(.3), dict(alpha=.3))],
                         ids=lambda v: repr(v) if not isinstance(v, dict) else "")
def test_rounds_against_short_networks(method, kw):
    params, g, h = plain(LEVELS, **kw)
    for executor in ("loop", "vmap"):
        state = go(method, make(), executor=executor)
        assert worst(state, params) < 1e-9
        if "alpha" not in kw: continue
        mine = state.client["FedDyn"]["g"], state.server["FedDyn"]["h"]
        for n in mine[0]:
            for k in range(N): assert (mine[0][n][k] - g.get((k, n), 0.)).abs().max() < 1e-9
            assert (mine[1][n] - h.get(n, 0.)).abs().max() < 1e-9

def test_rounds_can_disagree():
    params = plain(LEVELS)[0]
    for m in (DepthFL(LEVELS, distill=False), DepthFL(LEVELS, ramp=3), DepthFL((3, 3, 2, 1), ramp=2),
              DepthFL(LEVELS, ramp=2) + FedDyn(.1)):
        assert worst(go(m, make(), executor="vmap"), params) > 1e-4, m

def test_what_nobody_had_is_kept():
    net, m = make(), DepthFL((1, 2), distill=False) + FedDyn()
    before = start(m, net, 2)
    batch = {k: v[:2] for k, v in data(0).items()}
    after = fed_round(m, net, before, [0, 1], batch, [1., 3.], Local(**LOCAL))
    for k, v in {**before.params, **before.buffers}.items():
        if v.is_floating_point():
            assert torch.equal({**after.params, **after.buffers}[k], v) == (k.split(".")[1] == "2")

def test_weighted_average_over_those_who_have_it():
    net, m = make(), DepthFL((3, 2, 2, 1), distill=False)
    batch, w = data(0), torch.tensor([1., 2., 3., 4.])
    alone = [fed_round(m, net, start(m, net, 4), [k], {n: v[k:k+1] for n, v in batch.items()}, [1.],
                       Local(**LOCAL)).params
             for k in range(K)]
    both = fed_round(m, net, start(m, net, 4), [0, 1, 2, 3], batch, w, Local(**LOCAL)).params
    for k, v in both.items():
        have = {"0": [0, 1, 2, 3], "1": [0, 1, 2], "2": [0]}[k.split(".")[1]]
        assert (v - sum(w[i]*alone[i][k] for i in have)/sum(w[i] for i in have)).abs().max() < 1e-6


# --- FedDyn alone -----------------------------------------------------------------------------------------------------

def test_feddyn_two_rounds_by_hand():
    "One parameter, two clients out of three, plain arithmetic."
    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(self.head.weight)
        def forward(self, x): return x, self.head(x)
    a, target, alpha, lr = [3., 1., .5], [1., -1., 2.], .7, .2
    net, m = Point(), FedDyn(alpha)
    state, w, g, h = start(m, net, 3), 0., [0.]*3, 0.
    for round in ([0, 2], [1, 2], [0, 1]):
        x = torch.tensor([a[k]**.5 for k in round]).double().reshape(2, 1, 1, 1).expand(2, 4, 1, 1)
        y = torch.tensor([a[k]**.5*target[k] for k in round]).double().reshape(2, 1, 1).expand(2, 4, 1)
        state = fed_round(m, net, state, round, dict(x=x, y=y), [1., 1.], Local(lr=lr, momentum=0.),
                          criterion=lambda z, y: (z[:, 0] - y).square().mean()/2)
        ends = []
        for k in round:
            v = w
            for _ in range(4): v -= lr*(a[k]*(v - target[k]) - g[k] + alpha*(v - w))
            g[k] -= alpha*(v - w)
            ends.append(v)
        h -= alpha*sum(v - w for v in ends)/3
        w = sum(ends)/2 - h/alpha
        assert abs(state.params["head.weight"].item() - w) < 1e-6
        assert abs(state.server["FedDyn"]["h"]["head.weight"].item() - h) < 1e-6 and abs(h - sum(g)/3) < 1e-9
        assert (state.client["FedDyn"]["g"]["head.weight"].flatten() - torch.tensor(g)).abs().max() < 1e-6
    assert abs(w) > .1

@pytest.mark.parametrize("m", [FedDyn(), HeteroFL() + FedDyn()], ids=repr)
def test_feddyn_executors(m):
    loop, *rest = (train(m, e, rounds=2) for e in ("loop", "vmap", "extract"))
    assert all(gap(loop, r) < 1e-9 for r in rest)


# --- networks, sums, errors -------------------------------------------------------------------------------------------

def test_published_counts():
    with torch.device("meta"): net = exits_resnet18((3, 32, 32), 100)
    assert [count(net.first(d)) for d in (1, 2, 3, 4)] == [479652, 1347336, 3838316, 12283344]

def test_modes():
    net, x = make(), torch.randn(7, 5, dtype=torch.double)
    assert net.train()(x)[1].shape == (7, 3, 4) and net.eval()(x)[1].shape == (7, 4)
    a, b, c = (logits for _, logits in net.each(x))
    assert (torch.allclose(net(x)[1], (a+b+c)/3) and torch.allclose(net.first(1)(x)[1], a)
            and torch.equal(net(x)[0], net.each(x)[0][0]))
    with pytest.raises(ValueError, match="3 stages and 2 exits"): Exits(net.stages, net.exits[:2])

def test_convolutional_loop_is_vmap_and_odd_sizes_work():
    torch.manual_seed(0)
    net, m, out = (exits_resnet18((1, 7, 7), 3, width=.0625, depths=(1, 1, 1, 1)).double(),
                   DepthFL(ramp=1) + FedDyn(), [])
    g = torch.Generator().manual_seed(0)
    batch = dict(x=torch.randn(4, 2, 5, 1, 7, 7, generator=g, dtype=torch.double),
                 y=torch.randint(0, 3, (4, 2, 5), generator=g))
    for e in ("loop", "vmap"):
        out.append(fed_round(m, net, start(m, net, 4), [0, 1, 2, 3], batch, [1., 2., 3., 4.], Local(**LOCAL), e))
    assert gap(*out) < 1e-9

@pytest.mark.parametrize("fill", ["zero", "inf"])
def test_masked_logits_stay_finite(fill):
    net, ends = make().eval(), []
    batch = dict(data(0), y=data(0)["y"] % 3) # nobody has class 3
    for m, e in ((MaskedCE(fill) + DepthFL(LEVELS, ramp=1), "loop"),
                 (MaskedCE(fill) + DepthFL(LEVELS, ramp=1), "vmap"),
                 (DepthFL(LEVELS, ramp=1), "loop")):
        ends.append(fed_round(m, net, start(m, net, N), who(0), batch, [1.]*K, Local(**LOCAL), e).params)
    far = lambda a, b: max((a[k] - b[k]).abs().max().item() for k in a)
    assert far(*ends[:2]) < 1e-9 and far(*ends[1:]) > 1e-4 and all(v.isfinite().all() for v in ends[0].values())

def test_refusals():
    with pytest.raises(ValueError, match="no tensors named"): DepthFL().mask(dict(w=torch.ones(1)), {}, 0, 4)
    with pytest.raises(ValueError, match="depths up to 3"): DepthFL().mask(dict(make().named_parameters()), {}, 0, 4)
    with pytest.raises(ValueError, match="cannot be added"): HeteroFL() + DepthFL()
    for kw in (dict(levels=()), dict(levels=(0,)), dict(ramp=0), dict(exits="first")):
        with pytest.raises(ValueError, match=next(iter(kw))): DepthFL(**kw)
    with pytest.raises(ValueError, match="alpha=0"): FedDyn(0)

@pytest.mark.parametrize("m", [FedDyn(.3), DepthFL((2, 1), ramp=4) + FedDyn(), DepthFL(exits="last", distill=False)],
                         ids=repr)
def test_repr(m): assert eval(repr(m)) == m

@pytest.mark.parametrize('shape', [(1, 28, 28), (3, 9, 7), (1, 4, 4)])
def test_convolutions_with_exits(shape):
    net = exits_cnn(shape, 10, channels=(4, 6), hidden=5).double()
    x, y = torch.randn(1, 2, 8, *shape, dtype=torch.double), torch.randint(10, (1, 2, 8))
    shallow, deep = (fed_round(DepthFL(levels=(d,)), net, start(DepthFL(levels=(d,)), net, 1), [0],
                               dict(x=x, y=y), [1.], Local(lr=.1))
                     for d in (2, 4))
    moved = lambda state: {k.split('.')[1] for k, v in net.named_parameters() if not torch.equal(v, state.params[k])}
    assert moved(shallow) == {'0', '1'} and moved(deep) == {'0', '1', '2', '3'}
    assert net.eval()(x[0, 0])[1].shape == (8, 10)

def test_convolutions_with_exits_are_one_in_all_executors():
    net = exits_cnn((1, 8, 8), 4, channels=(3, 4), hidden=5).double()
    x, y = torch.randn(4, 2, 6, 1, 8, 8, dtype=torch.double), torch.randint(4, (4, 2, 6))
    ends = [fed_round(DepthFL(), net, start(DepthFL(), net, 4), [0, 1, 2, 3], dict(x=x, y=y), [1.]*4, Local(lr=.1), e)
            for e in ('loop', 'vmap')]
    assert max((v - ends[1].params[k]).abs().max() for k, v in ends[0].params.items()) < 1e-9
