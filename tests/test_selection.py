"FedDSE and FedGSE: scores and masks against plain hooks and autograd, public samples, and executors with one answer."
import pytest, torch, torch.nn.functional as F
from dataclasses import replace
from functools import partial
from torch import nn
from fedlit.axes import find_axes, watch
from fedlit.methods.feddse import FedDSE, OldCounts, activity
from fedlit.methods.fedgse import FedGSE, sensitivity, similar_data
from fedlit.methods.submodels import uniform
from fedlit.round import Batches, Local, fed_round, local_phase, start
from federation import CLIENTS, COUNTS, SIZES, K, Net, batches, gap, model, train, who

class MLP(nn.Module):
    "Two hidden layers, the second without a ReLU."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(4, 3)
    def forward(self, x):
        z = self.b(F.relu(self.a(x)))
        return z, self.head(z)

def made(kind):
    torch.manual_seed(3)
    net = (kind() if kind is MLP else Net(norm=True)).double().eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(.5, 2)
            m.weight.data.uniform_(.5, 2)
            m.bias.data.normal_()
    x = torch.randn(9, *((5,) if kind is MLP else (1, 6, 6))).double()
    return net, x, torch.randint(0, 3, (9,)), dict(net.named_parameters()), dict(net.named_buffers())

def grabbed(net, layers, x):
    "What the layers put out, by plain hooks, on the graph."
    got, hooks = {}, []
    for n in layers:
        hooks.append(net.get_submodule(n).register_forward_hook(lambda m, i, o, n=n: got.__setitem__(n, o)))
    net.eval()
    logits = net(x)[1]
    for h in hooks: h.remove()
    return got, logits

@pytest.mark.parametrize('score', ['mean', 'sum'])
def test_activity(score):
    add = (lambda v, d: v.mean(d)) if score == 'mean' else (lambda v, d: v.sum(d))
    net, x, _, p, b = made(MLP)
    axes = find_axes(net)
    mine = activity(axes, partial(watch, axes), p, b, x, score)
    h = F.relu(x @ net.a.weight.T + net.a.bias)
    assert torch.allclose(mine['a'], add(h, 0), atol=1e-9)
    assert torch.allclose(mine['b'], add((h @ net.b.weight.T + net.b.bias).abs(), 0), atol=1e-9)
    net, x, _, p, b = made(Net)
    axes = find_axes(net)
    mine = activity(axes, partial(watch, axes), p, b, x, score)
    def normed(v, n): return F.batch_norm(v, None, None, n.weight, n.bias, training=True)
    u = F.relu(normed(F.conv2d(x, net.c1.weight, net.c1.bias, padding=1), net.n1))
    v = F.relu(normed(F.conv2d(u, net.c2.weight, net.c2.bias, padding=1), net.n2))
    assert (torch.allclose(mine['c1'], add(u, (0, 2, 3)), atol=1e-8)
            and torch.allclose(mine['c2'], add(v, (0, 2, 3)), atol=1e-8))

def gradients(net, x, y, layers, after=None):
    "d loss / d (what a layer puts out), per sample, by plain autograd; `after` looks behind a function of it."
    got, logits = grabbed(net, layers, x)
    return dict(zip(layers, torch.autograd.grad(F.cross_entropy(logits, y, reduction='sum'),
                                                [got[n] for n in layers]))), got

@pytest.mark.parametrize('kind', [MLP, Net])
def test_released_score(kind):
    net, x, y, p, b = made(kind)
    layers = ['a', 'b'] if kind is MLP else ['c1', 'c2', 'fc']
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
    net, x, y, p, b = made(Net)
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

def kept(out, k): # which coordinates the client at position k had
    return {n: out['mask'][n][k].flatten().bool() for n in ('c1.bias', 'c2.bias', 'fc.bias')}

def highest(scores, n): return set(scores.argsort(descending=True)[:n].tolist())

def test_feddse_masks():
    method, net = FedDSE(rates=(.5,)), model()
    data = dict(batches(0), x=batches(0)['x'].double())
    out = local_phase(method, net, start(method, net, CLIENTS), who(0), Batches(**data), Local(epochs=1))
    def normed(v, n): return F.batch_norm(v, None, None, n.weight, n.bias, training=True)
    for k in range(K):
        x = torch.cat([data['x'][k, t, :n] for t, n in enumerate(COUNTS[k].tolist())])
        u = F.relu(normed(net.c1(x), net.n1))
        v = F.relu(normed(net.c2(u), net.n2))
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
    with pytest.raises(ValueError, match='temperature=-1'): FedDSE(temperature=-1.)

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
    out = local_phase(method, net, state, clients, data, local, proxy=PUBLIC)
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
    state = fed_round(method, net, state, clients, data, SIZES[:4], local, proxy=PUBLIC)
    again = local_phase(method, net, state, clients, data, local, proxy=PUBLIC)
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
    assert (labels[who(0)][:, :30] >= 0).all() and (labels[:, 30:] == -1).all()
    assert (labels[[k for k in range(CLIENTS) if k not in who(0)]] == -1).all()
    train(FedGSE(rates=(.5,), pool=40), rounds=1, proxy=PUBLIC[0]) # CSL needs no labels
    with pytest.raises(ValueError, match='needs public samples'):
        train(FedGSE(similar='SPL'), rounds=1, proxy=PUBLIC[0])
    with pytest.raises(ValueError, match='needs public samples'):
        train(FedGSE(), rounds=1, proxy=None)

RATES = (1., .5, .25)
METHODS = [FedDSE(RATES),
           FedDSE(RATES, temperature=1., samples=5),
           FedDSE(RATES, mode='probs', score='sum') + OldCounts(),
           FedGSE(RATES, samples=12, pool=40),
           FedGSE(RATES, similar='SPL', form='released', samples=12, pool=20)]

@pytest.mark.parametrize('method', METHODS, ids=repr)
def test_executors_agree(method):
    loop = train(method, 'loop', rounds=2, proxy=PUBLIC)
    for executor in ('vmap', 'extract'): assert gap(loop, train(method, executor, rounds=2, proxy=PUBLIC)) < 1e-9
    part = method.parts[0]
    other = (replace(part, form='paper' if part.form == 'released' else 'released') if isinstance(part, FedGSE)
             else replace(part, temperature=.5, mode='softmax'))
    assert gap(loop, train(other + OldCounts() if len(method.parts) > 1 else other, rounds=2, proxy=PUBLIC)) > 1e-6

def test_old_counts():
    "Two clients that hold overlapping parts: (old + sum of holders)/(1 + holders), elementwise."
    method, net = FedDSE(rates=(.5,)), model()
    data, state = Batches(**dict(batches(0), x=batches(0)['x'].double())), start(method, net, CLIENTS)
    local = Local(lr=.1)
    out = local_phase(method, net, state, who(0), data, local)
    new = fed_round(method + OldCounts(), net, start(method + OldCounts(), net, CLIENTS), who(0), data,
                    torch.ones(K), local)
    for n, old in state.params.items():
        m = out['mask'][n].double() if n in out['mask'] else torch.ones(K).double()
        m = m.reshape(*m.shape, *(1,)*(old.dim() + 1 - m.dim())).expand(K, *old.shape)
        assert torch.allclose(new.params[n], (old + (m*out['params'][n]).sum(0))/(1 + m.sum(0)), atol=1e-7)

@pytest.mark.parametrize('executor', ['threads', 'extract'])
def test_clients_in_threads_look_one_at_a_time(executor):
    "The graph that is watched has the network's own modules, and several threads would leave their tensors in it."
    m = FedDSE(rates=(1., .5))
    net, alone = model(), train(m)
    torch.set_num_threads(2)
    for _ in range(3):
        state = start(m, net, CLIENTS)
        for r in range(3):
            state = fed_round(m, net, state, who(r), dict(batches(r), x=batches(r)['x'].double()), SIZES,
                              Local(lr=.1, momentum=.9, weight_decay=.01), executor=executor)
        assert (gap(state, alone) < 1e-9
                and all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in net.parameters()))
