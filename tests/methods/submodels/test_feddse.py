"FedDSE: scores and masks against plain modules, draws against their odds, executors and threads with one answer."
import pytest, torch, torch.nn.functional as F
from functools import partial
from fedlit.ground.axes import find_axes, watch
from fedlit.methods import FedDSE, OldCounts
from fedlit.methods.feddse import activity
from fedlit.batches import Batches
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.state import start
from federation import CLIENTS, COUNTS, K, SIZES, Net, batches, difference, model, train, draw_cohort
from scores import TwoLayers, by_batch, highest, kept, network

@pytest.mark.parametrize('score', ['mean', 'sum'])
def test_activity(score):
    add = (lambda v, d: v.mean(d)) if score == 'mean' else (lambda v, d: v.sum(d))
    net, x, _, p, b = network(TwoLayers)
    axes = find_axes(net)
    mine = activity(axes, partial(watch, axes), p, b, x, score)
    h = F.relu(x @ net.a.weight.T + net.a.bias)
    assert torch.allclose(mine['a'], add(h, 0), atol=1e-9)
    assert torch.allclose(mine['b'], add((h @ net.b.weight.T + net.b.bias).abs(), 0), atol=1e-9)
    net, x, _, p, b = network(Net)
    axes = find_axes(net)
    mine = activity(axes, partial(watch, axes), p, b, x, score)
    u = F.relu(by_batch(F.conv2d(x, net.c1.weight, net.c1.bias, padding=1), net.n1))
    v = F.relu(by_batch(F.conv2d(u, net.c2.weight, net.c2.bias, padding=1), net.n2))
    assert (torch.allclose(mine['c1'], add(u, (0, 2, 3)), atol=1e-8)
            and torch.allclose(mine['c2'], add(v, (0, 2, 3)), atol=1e-8))

def test_feddse_masks():
    method, net = FedDSE(rates=(.5,)), model()
    data = dict(batches(0), x=batches(0)['x'].double())
    out = local_phase(Broadcast(method, net, start(method, net, CLIENTS), Local(epochs=1)), draw_cohort(0),
                      Batches(**data))
    for k in range(K):
        x = torch.cat([data['x'][k, t, :n] for t, n in enumerate(COUNTS[k].tolist())])
        u = F.relu(by_batch(net.c1(x), net.n1))
        v = F.relu(by_batch(net.c2(u), net.n2))
        z = net.fc(v.mean((-1, -2)))
        for name, s in (('c1.bias', u.mean((0, 2, 3))), ('c2.bias', v.mean((0, 2, 3))), ('fc.bias', z.abs().mean(0))):
            assert set(kept(out, k)[name].nonzero()[:, 0].tolist()) == highest(s, len(s)//2)

def test_temperature():
    h = torch.tensor([0., 1., 3.]).double()
    odds = lambda m: (torch.vmap(lambda r: m.preference(h, r, 0, 0))(torch.arange(4000))
                      .argmax(1).bincount(minlength=3)/4000)
    assert torch.allclose(odds(FedDSE(temperature=2.)), (h/2).softmax(0).float(), atol=.03)
    assert torch.allclose(odds(FedDSE(mode='probs')), torch.tensor([0., .25, .75]), atol=.03)
    assert torch.equal(FedDSE().preference(h, 1, 2, 3), h)

# ---- executors ----

RATES = (1., .5, .25)

@pytest.mark.parametrize('method, other', [
    (FedDSE(RATES), FedDSE(RATES, temperature=.5)),
    (FedDSE(RATES, temperature=1., samples=5), FedDSE(RATES, temperature=.5, samples=5)),
    (FedDSE(RATES, mode='probs', score='sum') + OldCounts(),
     FedDSE(RATES, temperature=.5, mode='softmax', score='sum') + OldCounts())], ids=repr)
def test_executors_agree(method, other):
    "And the answer depends on what is asked: `other` differs in one setting, and in the result."
    loop = train(method, 'loop', rounds=2)
    for executor in ('vmap', 'extract'): assert difference(loop, train(method, executor, rounds=2)) < 1e-9
    assert difference(loop, train(other, rounds=2)) > 1e-6

@pytest.mark.parametrize('executor', ['threads', 'extract'])
def test_clients_in_threads_look_one_at_a_time(executor):
    "The graph that is watched has the network's own modules, and several threads would leave their tensors in it."
    m = FedDSE(rates=(1., .5))
    net, alone = model(), train(m)
    torch.set_num_threads(2)
    for _ in range(3):
        state = start(m, net, CLIENTS)
        for r in range(3):
            state = fed_round(Broadcast(m, net, state, Local(lr=.1, momentum=.9, weight_decay=.01)), draw_cohort(r),
                              dict(batches(r), x=batches(r)['x'].double()), SIZES, executor=executor)
        assert (difference(state, alone) < 1e-9
                and all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in net.parameters()))

# ---- the released average ----

def test_old_counts():
    "Two clients that hold overlapping parts: (old + sum of holders)/(1 + holders), elementwise."
    method, net = FedDSE(rates=(.5,)), model()
    data, state = Batches(**dict(batches(0), x=batches(0)['x'].double())), start(method, net, CLIENTS)
    local = Local(lr=.1)
    out = local_phase(Broadcast(method, net, state, local), draw_cohort(0), data)
    both = method + OldCounts()
    new = fed_round(Broadcast(both, net, start(both, net, CLIENTS), local), draw_cohort(0),
                    data, torch.ones(K))
    for n, old in state.params.items():
        m = out['mask'][n].double() if n in out['mask'] else torch.ones(K).double()
        m = m.reshape(*m.shape, *(1,)*(old.dim() + 1 - m.dim())).expand(K, *old.shape)
        assert torch.allclose(new.params[n], (old + (m*out['params'][n]).sum(0))/(1 + m.sum(0)), atol=1e-7)
