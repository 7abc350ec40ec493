"FedGSE: scores against plain autograd, the public samples that resemble a client's, a second round chosen by hand."
import pytest, torch, torch.nn.functional as F
from functools import partial
from torch import nn
from fedlit.ground.axes import find_axes, watch
from fedlit.methods import FedGSE
from fedlit.methods.fedgse import sensitivity, similar_data
from fedlit.methods.submodels import uniform
from fedlit.batches import Batches
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.state import start
from federation import CLIENTS, SIZES, Net, batches, difference, model, train, draw_cohort
from scores import TwoLayers, highest, kept, network

# ---- scores ----

def grabbed(net, layers, x):
    "What the layers put out, by plain hooks, on the graph."
    got, hooks = {}, []
    for n in layers:
        hooks.append(net.get_submodule(n).register_forward_hook(lambda m, i, o, n=n: got.__setitem__(n, o)))
    net.eval()
    logits = net(x)[1]
    for h in hooks: h.remove()
    return got, logits

def gradients(net, x, y, layers):
    "d loss / d (what a layer puts out), per sample, by plain autograd."
    got, logits = grabbed(net, layers, x)
    return dict(zip(layers, torch.autograd.grad(F.cross_entropy(logits, y, reduction='sum'),
                                                [got[n] for n in layers]))), got

@pytest.mark.parametrize('kind', [TwoLayers, Net])
def test_released_score(kind):
    net, x, y, p, b = network(kind)
    layers = ['a', 'b'] if kind is TwoLayers else ['c1', 'c2', 'fc']
    axes = find_axes(net)
    mine = sensitivity(axes, partial(watch, axes), p, b, x, y, form='released')
    for n, g in gradients(net, x, y, layers)[0].items():
        assert torch.allclose(mine[n], g.abs().transpose(0, 1).flatten(1).sum(1), rtol=1e-5, atol=1e-9)

def test_equation_4_3():
    class Seen(Net): # the same network with modules behind which hooks can look
        def __init__(self):
            super().__init__(norm=True)
            self.r1, self.r2 = nn.ReLU(), nn.ReLU()
        def forward(self, x):
            x = self.r2(self.n2(self.c2(self.r1(self.n1(self.c1(x))))))
            z = self.fc(x.mean((-1, -2)))
            return z, self.head(z)
    net, x, y, p, b = network(Net)
    twin = Seen().double()
    twin.load_state_dict(net.state_dict())
    grads, _ = gradients(twin, x, y, ['r1', 'r2', 'fc'])
    axes = find_axes(net)
    mine = sensitivity(axes, partial(watch, axes), p, b, x, y)
    for n, a in (('r1', 'c1'), ('r2', 'c2'), ('fc', 'fc')):
        assert torch.allclose(mine[a], grads[n].sum(0).abs().reshape(len(mine[a]), -1).sum(1), rtol=1e-5, atol=1e-9)
        # the magnitude after the sum over positions: not this
        late = grads[n].sum(0).reshape(len(mine[a]), -1).sum(1).abs()
        early = grads[n].abs().sum(0).reshape(len(mine[a]), -1).sum(1) # nor each sample's
        if n == 'r1': assert not torch.allclose(mine[a], late, rtol=1e-2) # behind the mean over positions all agree
        assert not torch.allclose(mine[a], early, rtol=1e-2)
    half = sensitivity(axes, partial(watch, axes), p, b, x, y, weight=torch.arange(9) < 4)
    alone = sensitivity(axes, partial(watch, axes), p, b, x[:4], y[:4])
    for a in alone: assert torch.allclose(half[a], alone[a], rtol=1e-8)

# ---- public samples ----

def test_similar_data():
    g = torch.Generator().manual_seed(0)
    label, y, u = (torch.randint(0, 3, (50,), generator=g), torch.randint(0, 3, (50,), generator=g),
                   torch.rand(50, generator=g))
    right = [i for i in u.argsort().tolist() if label[i] == y[i]]
    assert 5 < len(right) < 40
    i, target, real = similar_data(label, y, 'SPL', 5, u)
    assert i.tolist() == right[:5] and target.tolist() == [int(y[j]) for j in right[:5]] and real.all()
    i, target, real = similar_data(label, y, 'SPL', 40, u)
    assert int(real.sum()) == len(right) and i[:len(right)].tolist() == right and not real[len(right):].any()
    i, target, real = similar_data(label, None, 'CSL', 40, u)
    assert i.tolist() == u.argsort()[:40].tolist() and torch.equal(target, label[i]) and real.all()

g = torch.Generator().manual_seed(5)
PUBLIC = torch.randn(30, 1, 6, 6, generator=g).double(), torch.randint(0, 3, (30,), generator=g)

@pytest.mark.parametrize('similar', ['CSL', 'SPL'])
def test_fedgse_by_hand(similar):
    "The second round's choice, from the labels that the first round's sub-model gave, by plain means."
    method, net, clients = FedGSE(rates=(.5,), similar=similar, samples=12, pool=30), model(), [0, 1, 2, 3]
    state = start(method, net, CLIENTS)
    data = Batches(**dict(batches(0), x=batches(0)['x'].double()))
    local = Local(lr=.1)
    out = local_phase(Broadcast(method, net, state, local, proxy=PUBLIC), clients, data)
    k = 2
    last = model() # the small network as a full one with zeros
    last.load_state_dict({n: v[k] for n, v in {**out['params'], **out['buffers']}.items()})
    on = kept(out, k)
    with torch.no_grad():
        for n, m in dict(c1=on['c1.bias'], c2=on['c2.bias'], fc=on['fc.bias']).items():
            layer = getattr(last, n)
            layer.weight[~m] = 0
            layer.bias[~m] = 0
        for n, m in dict(n1=on['c1.bias'], n2=on['c2.bias']).items():
            getattr(last, n).weight[~m] = 0
            getattr(last, n).bias[~m] = 0
        said = last.eval()(PUBLIC[0])[1].argmax(1)
    assert torch.equal(out['client']['FedGSE']['label'][k], said)
    state = fed_round(Broadcast(method, net, state, local, proxy=PUBLIC), clients, data, SIZES[:4])
    again = local_phase(Broadcast(method, net, state, local, proxy=PUBLIC), clients, data)
    order = uniform(30, 0, 1, k, 1)
    use = [j for j in order.argsort().tolist() if similar == 'CSL' or said[j] == PUBLIC[1][j]][:12]
    target = said[use] # for SPL the same as the true label
    now = model()
    now.load_state_dict({**state.params, **state.buffers})
    taps = [torch.zeros(s).double().requires_grad_() for s in ((4, 6, 6), (8, 6, 6), (6,))]
    now.eval()
    u = F.relu(now.n1(now.c1(PUBLIC[0][use]))) + taps[0]
    v = F.relu(now.n2(now.c2(u))) + taps[1]
    z = now.fc(v.mean((-1, -2))) + taps[2]
    grads = torch.autograd.grad(F.cross_entropy(now.head(z), target, reduction='sum'), taps)
    for name, s in zip(('c1.bias', 'c2.bias', 'fc.bias'), grads):
        s = s.abs().reshape(len(s), -1).sum(1)
        assert set(kept(again, k)[name].nonzero()[:, 0].tolist()) == highest(s, len(s)//2)

def test_new_clients_and_bad_input():
    state = train(FedGSE(rates=(.5,), pool=40), rounds=1, proxy=PUBLIC)
    labels = state.client['FedGSE']['label']
    assert (labels[draw_cohort(0)][:, :30] >= 0).all() and (labels[:, 30:] == -1).all()
    assert (labels[[k for k in range(CLIENTS) if k not in draw_cohort(0)]] == -1).all()
    train(FedGSE(rates=(.5,), pool=40), rounds=1, proxy=PUBLIC[0]) # CSL needs no labels
    with pytest.raises(ValueError, match='needs public samples'):
        train(FedGSE(similar='SPL'), rounds=1, proxy=PUBLIC[0])
    with pytest.raises(ValueError, match='needs public samples'):
        train(FedGSE(), rounds=1, proxy=None)

# ---- executors ----

RATES = (1., .5, .25)

@pytest.mark.parametrize('method, other', [
    (FedGSE(RATES, samples=12, pool=40), FedGSE(RATES, samples=12, pool=40, form='released')),
    (FedGSE(RATES, similar='SPL', form='released', samples=12, pool=20),
     FedGSE(RATES, similar='SPL', form='paper', samples=12, pool=20))], ids=repr)
def test_executors_agree(method, other):
    "And the answer depends on what is asked: `other` differs in one setting, and in the result."
    loop = train(method, 'loop', rounds=2, proxy=PUBLIC)
    for executor in ('vmap', 'extract'): assert difference(loop, train(method, executor, rounds=2, proxy=PUBLIC)) < 1e-9
    assert difference(loop, train(other, rounds=2, proxy=PUBLIC)) > 1e-6
