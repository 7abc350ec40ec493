"""Terms of the local objective: FedProx, MOON, FedDecorr, ExactDecorr, DeCov, StructuredDeCov, FedRS, FedLC, FedNTD,
FedUV."""
import copy, math
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from fedlit.cohort import Broadcast, frozen_outputs
from fedlit.data import load
from fedlit.method import FedAvg
from fedlit.methods import (
    DeCov, ExactDecorr, FedDecorr, FedLC, FedNTD, FedProx, FedRoD, FedRS, FedUV, MaskedCE, MOON, StructuredDeCov)
from fedlit.methods.fedprox import proximal
from fedlit.methods.moon import contrast
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.round import fed_round, local_phase
from fedlit.state import start
from fedlit.batches import TaskBatches, batches_of
from fedlit.run import federate
from fedlit.ground.tree import leaves
from by_hand import EXECUTORS, averaged, by_torch, classify, descend, gap, same

# ---- FedProx ----

@pytest.mark.parametrize('mu', [0., .01, 3.])
def test_fedprox_loss_and_gradient_by_hand(mu):
    w, b, w0, b0 = [[1., -2.], [.5, 0.]], [3.], [[0., -1.], [.5, 2.]], [1.]
    value = mu/2*((1-0)**2 + (-2+1)**2 + 0 + (0-2)**2 + (3-1)**2)  # = mu/2 * 10
    params = dict(w=torch.tensor(w, requires_grad=True), b=torch.tensor(b, requires_grad=True))
    received = dict(w=torch.tensor(w0), b=torch.tensor(b0), running_mean=torch.full((4,), 9.))
    loss = proximal(params, received, mu)
    assert abs(loss.item() - value) < 1e-6 and value == mu*5
    data = dict(w=torch.full((2, 2), .5), b=torch.ones(1))
    pulled = FedProx(mu=mu).grad(data, params, received)
    for gw, gb in (torch.autograd.grad(loss, [params['w'], params['b']]), [pulled[k] - data[k] for k in 'wb']):
        assert torch.allclose(gw, mu*torch.tensor([[1., -1.], [0., -2.]]), atol=1e-6) and abs(gb.item() - 2*mu) < 1e-6

@pytest.mark.parametrize('executor', EXECUTORS)
def test_fedprox_is_the_plain_loop_with_the_term(executor):
    term = lambda net, received: .35*sum((p - received[n]).pow(2).sum() for n, p in net.named_parameters())
    state, expected = classify(FedProx(mu=.7), 3, executor=executor), by_torch(3, term)
    assert gap(state.params, {k: expected[k] for k in state.params}) < 1e-6
    assert gap(state.params, classify(FedAvg(), 3).params) > 1e-3

def test_fedprox_stability_limit():
    "SGD on mu/2 (w-w0)^2 alone contracts exactly where lr*mu < 2 (1 + momentum)."
    class Push(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.double))
        def forward(self, x): return x, self.w*x
    def size(lrmu, rho):
        x, m = torch.ones(1, 300, 1, dtype=torch.double), FedProx(mu=lrmu/.1)
        state = fed_round(Broadcast(m, Push(), start(m, Push(), 1), Local(lr=.1, momentum=rho),
                                    criterion=lambda out, y: out.mean()), [0], dict(x=x, y=x), [1.])
        return abs(state.params['w'].item())
    for rho in (0., .5, .9): assert size(2*(1 + rho)*.97, rho) < 1 < 10 < size(2*(1 + rho)*1.03, rho)

# ---- MOON: five clients, of whom one comes late and one never ----

devices = ['cpu'] + (['cuda'] if torch.cuda.is_available() else [])
variants = [MOON(), MOON(mu=5, tau=.1), MOON(form='paper'), MOON(variant='l2', mu=.5), MOON() + FedDecorr()]
local = Local(lr=.1, momentum=.9, weight_decay=1e-3)
who = [[0, 2], [1, 2, 3], [0, 3]]       # participants of three rounds

class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), *[nn.BatchNorm1d(8)]*norm, nn.ReLU(), nn.Linear(8, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)

def net(norm=False, seed=0):
    torch.manual_seed(seed)
    return Net(norm)

def data(ks, r, ragged=True):
    "Batches of clients `ks` in round `r`, fixed by both: different numbers of steps, and short last batches."
    xs, ys = [], []
    for k in ks:
        g = torch.Generator().manual_seed(100*r + k)
        xs.append(torch.randn(4, 7, 6, generator=g) + k)
        ys.append(torch.randint(0, 3, (4, 7), generator=g))
    live = torch.tensor([[7, 7, 7, 3] if k % 2 else [7, 7, 0, 0] for k in ks]) if ragged else None
    return dict(x=torch.stack(xs), y=torch.stack(ys), counts=live)

def train(method, model, executor, rounds=3, device='cpu'):
    model = model.to(device)
    dtype = model.head.weight.dtype
    state = start(method, model, 5)
    for r in range(rounds):
        batch = {k: v if k == 'counts' else v.to(device) for k, v in data(who[r], r).items()}
        batch['x'] = batch['x'].to(dtype)
        state = fed_round(Broadcast(method, model, state, local), who[r], batch, [1. + k for k in who[r]], executor)
    return state

def agree(a, b, **tol):
    "The tensors of two trees are close, wherever they are."
    for u, v in zip(leaves(a), leaves(b), strict=True): torch.testing.assert_close(u.cpu(), v.cpu(), **tol)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('method', [MOON(mu=2.), MOON(mu=2., form='paper'), MOON(mu=.7, variant='l2')], ids=repr)
def test_moon_against_plain_modules(method, norm, executor):
    "Networks copied, torch.optim.SGD, CosineSimilarity, a two-column cross-entropy: as the released code is organised."
    server, never = net(norm), net(norm)
    previous, trained = {k: copy.deepcopy(never) for k in range(5)}, set()
    for r in range(3):
        batch, locals_ = data(who[r], r), []
        for i, k in enumerate(who[r]):
            m, frozen, prev = copy.deepcopy(server).train(), copy.deepcopy(server).eval(), previous[k].eval()
            opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9, weight_decay=1e-3)
            for t in range(4):
                if not (n := int(batch['counts'][i, t])): continue
                x, y = batch['x'][i, t, :n], batch['y'][i, t, :n]
                z, logits = m(x)
                loss = F.cross_entropy(logits, y)
                if method.variant == 'l2': loss = loss + method.mu*(z - frozen(x)[0].detach()).norm(dim=1).mean()
                elif r > 0 and (method.form == 'released' or k in trained):
                    sim = nn.CosineSimilarity(dim=-1)
                    columns = torch.stack([sim(z, frozen(x)[0].detach()), sim(z, prev(x)[0].detach())], 1)/method.tau
                    loss = loss + method.mu*F.cross_entropy(columns, torch.zeros(n, dtype=torch.long))
                descend(opt, loss)
            locals_.append(m)
        averaged(server, locals_, who[r], 1 + torch.arange(5.))
        for k, m in zip(who[r], locals_):
            previous[k] = m
            trained.add(k)
    state = train(method, net(norm), executor)
    floats = {k: v for k, v in {**state.params, **state.buffers}.items() if v.is_floating_point()}
    agree(floats, {k: server.state_dict()[k] for k in floats}, rtol=1e-4, atol=1e-5)

def test_moon_oracle_sees_the_term(): # guards the test above against a term that does nothing
    plain = train(FedAvg(), net(), 'loop').params
    for m in variants:
        assert max((a-b).abs().max() for a, b in zip(leaves(plain), leaves(train(m, net(), 'loop').params))) > 1e-3

@pytest.mark.parametrize('device', devices)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_moon_memory_is_the_last_local_model(executor, device):
    state, before = train(MOON(), net(True), executor, 3, device), start(MOON(), net(True), 5)
    m = state.client['MOON']
    assert m['trained'].tolist() == [1, 1, 1, 1, 0] and m['trained'].device.type == device
    for tree in ('params', 'buffers'):
        for k, v in m[tree].items():
            assert v.device.type == device and v.dtype == getattr(before, tree)[k].dtype
            assert torch.equal(v[4].cpu(), getattr(before, tree)[k])
    # what was received (0, 2, 5.33 rounded), plus the steps taken
    assert m['buffers']['body.1.num_batches_tracked'].tolist() == [7, 6, 4, 9, 0]

def test_moon_l2_keeps_no_memory():
    assert not leaves(train(MOON(variant='l2'), net(), 'vmap').client)

def test_moon_frozen_networks_get_no_gradient():
    z, w, v = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    echo = lambda params, buffers, x, train: (2*params['z'], None, buffers)
    memory = dict(params=dict(z=v), buffers={}, trained=torch.ones(()))
    for variant in ('contrastive', 'l2'):
        method = MOON(variant=variant)
        seen = frozen_outputs(method, dict(forward=echo, first=False, params=dict(z=z), buffers={}, received=dict(z=w),
                                 client=dict(MOON=memory), x=None))
        loss = method.loss(z, seen['MOON'], memory)
        grads = torch.autograd.grad(loss, (z, w, v), allow_unused=True)
        assert grads[0] is not None and grads[1] is None and grads[2] is None

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.float64])
def test_moon_extremes_stay_finite(dtype):
    z = torch.tensor([[0., 0.], [1e-4, 0.], [1e2, -1e2], [0., 1.]], dtype=dtype, requires_grad=True)
    near, far = torch.tensor([[0., 1.]], dtype=dtype).expand(4, 2), torch.tensor([[0., -1.]], dtype=dtype).expand(4, 2)
    for tau in (.01, .5, 100.):
        loss = contrast(z, near, far, tau)
        assert loss.isfinite() and 0 <= loss <= 2/tau + math.log(2)
    if dtype in (torch.float32, torch.float64):
        assert torch.autograd.grad(contrast(z, near, far, .5), z)[0].isfinite().all()

def test_moon_dead_features_behind_a_relu_pass_no_gradient():
    pre = torch.full((2, 3), -1., requires_grad=True)
    loss = contrast(pre.relu(), torch.rand(2, 3), torch.rand(2, 3), .5)
    assert torch.equal(torch.autograd.grad(loss, pre)[0], torch.zeros(2, 3))

def test_moon_gradient_by_finite_differences():
    z, near, far = torch.randn(3, 4, 5, dtype=torch.double).unbind(0)
    assert torch.autograd.gradcheck(lambda z: contrast(z, near, far, .3), z.clone().requires_grad_())

@pytest.mark.parametrize('method', [MOON(mu=2.), MOON(variant='l2'), MOON() + FedDecorr()], ids=repr)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_moon_looking_once_a_round_is_looking_every_time(monkeypatch, method, executor):
    "Frozen networks see every sample once if it stays the same; the result is that of asking them at every step."
    task = load('digits').subset(300, seed=0)
    parts = dirichlet(task.y_train, 4, .3, seed=1)
    def go():
        return federate(build('mlp', task, seed=0, norm='batch'), task, parts, method,
                        rounds=3, local=Local(epochs=3, batch_size=16), participation=.75,
                        executor=executor, progress=False).state
    once = go()
    looked = []
    monkeypatch.setattr(TaskBatches, 'once', lambda self: looked.append(1))
    agree(once.params, go().params, rtol=0, atol=2e-5)
    assert looked

def test_samples_are_known_by_number():
    task = load('digits').subset(100, seed=0)
    parts = [torch.arange(40), torch.arange(40, 47), torch.arange(47, 100)]
    batches = batches_of(task, parts, [0, 1, 2], Local(epochs=2, batch_size=16))
    n = batches.once()
    x = torch.cat([batches.samples(0, 20), batches.samples(20, n)], 1)
    assert n == 53
    for k in range(3):
        for t in range(batches.counts.shape[1]):
            m = int(batches.counts[k, t])
            if m: assert torch.equal(x[k, batches.place[k, t, :m]], batches.at(t, [k], m)[0][0])

# ---- FedDecorr in both forms and the exact penalty, against NumPy ----

def decorr_by_numpy(z, form):
    n, d = z.shape
    std = np.sqrt(z.var(0, ddof=1) + 1e-8)
    zhat = (z - z.mean(0))/std
    C = zhat.T@zhat
    if form == 'paper': return ((C/(n-1))**2).sum()/d**2
    off = C[~np.eye(d, dtype=bool)]
    return (off**2).mean()/n

@pytest.mark.parametrize('form', ['released', 'paper'])
@pytest.mark.parametrize('shape', [(64, 128), (16, 4), (5, 7), (2, 3), (64, 1280), (130, 17)])
def test_feddecorr_in_both_forms(shape, form):
    z = np.random.default_rng(0).normal(size=shape) @ np.random.default_rng(1).normal(size=(shape[1], shape[1]))
    got = FedDecorr(beta=.3, form=form).loss(features=torch.from_numpy(z)).item()
    assert got == pytest.approx(.3*decorr_by_numpy(z, form), rel=1e-6)
    single = FedDecorr(beta=.3, form=form).loss(features=torch.from_numpy(z).float()).item()
    assert single == pytest.approx(got, rel=1e-4)

@pytest.mark.parametrize('form', ['released', 'paper'])
def test_feddecorr_of_a_constant_feature(form):
    z = np.random.default_rng(0).normal(size=(20, 6))
    z[:, 2] = 3.
    t = torch.from_numpy(z).requires_grad_()
    loss = FedDecorr(beta=1., form=form).loss(features=t)
    loss.backward()
    assert loss.item() == pytest.approx(decorr_by_numpy(z, form), rel=1e-6) and torch.isfinite(t.grad).all()

@pytest.mark.parametrize('of', ['correlation', 'covariance'])
def test_eigenvalues_are_found_where_features_are_dead(of):
    "In single precision LAPACK gives up on some matrices with empty rows: on 91 of 4,000 like these."
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    for dead in torch.rand(400, generator=generator):
        f = torch.relu(draw(32, 8)@draw(8, 64) - 3*torch.rand(64, generator=generator))
        f = f*(torch.rand(64, generator=generator) > dead)
        z = f - f.mean(0)
        if of == 'correlation': z = z/(f.var(0) + 1e-8).sqrt()
        c = (z.T@z/31).double()
        right = c.square().sum()/64 - (c.trace()/64)**2
        assert abs(ExactDecorr(beta=1., of=of).loss(f) - right) < 1e-4*(1 + right)

@pytest.mark.parametrize('m', [FedDecorr(), FedDecorr(form='paper'), ExactDecorr(), ExactDecorr(of='covariance')],
                         ids=repr)
def test_a_batch_of_one_costs_nothing(m):
    z = torch.randn(1, 5, requires_grad=True)
    m.loss(features=z).backward()
    assert m.loss(features=z).item() == 0 and z.grad.eq(0).all()

@pytest.mark.parametrize('m', [FedDecorr(beta=1.), FedDecorr(beta=1., form='paper'),
                               ExactDecorr(beta=1.), ExactDecorr(beta=1., of='covariance')], ids=repr)
@pytest.mark.parametrize('shape', [(7, 4), (4, 7)])
def test_decorrelation_gradients(m, shape):
    z = torch.randn(*shape, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: m.loss(features=f), z, atol=1e-5)

# ---- DeCov and Structured-DeCov, by loops over pairs of features ----

def pairs(h, group):
    "Half the squared covariances of pairs of features in different groups, and mean squared correlation within."
    n, d = h.shape
    mean = [sum(h[i][a] for i in range(n))/n for a in range(d)]
    cov = [[sum((h[i][a]-mean[a])*(h[i][b]-mean[b]) for i in range(n))/n for b in range(d)] for a in range(d)]
    between = sum(cov[a][b]**2 for a in range(d) for b in range(d) if a != b and group(a) != group(b))/2
    inside = [cov[a][b]**2/(cov[a][a]*cov[b][b]) for a in range(d) for b in range(d) if group(a) == group(b)]
    return float(between), float(sum(inside)/len(inside))

@pytest.mark.parametrize('n,d', [(5, 6), (9, 4)])
def test_decov(n, d):
    h = torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(n))
    assert DeCov(weight=.3).loss(h).item() == pytest.approx(.3*pairs(h, lambda a: a)[0], abs=1e-5)

@pytest.mark.parametrize('n', [8, 4])
@pytest.mark.parametrize('groups,within', [(2, 0.), (3, 0.), (2, .5)])
def test_structured_decov(groups, within, n):
    h = torch.randn(n, 6, dtype=torch.double, generator=torch.Generator().manual_seed(groups))
    between, inside = pairs(h, lambda a: a//(6//groups))
    assert (StructuredDeCov(weight=.3, groups=groups, within=within).loss(h).item()
            == pytest.approx(.3*(between - within*inside), abs=1e-5))

def test_structured_decov_takes_the_smaller_product_as_decov_does():
    def operations(m):
        with FlopCounterMode(display=False) as counter: m.loss(torch.randn(8, 256))
        return counter.get_total_flops()
    blocks = 2*8*256*256//8 # of eight groups, with eight samples
    assert operations(StructuredDeCov(groups=8)) == operations(DeCov()) + blocks

# ---- FedRS, FedLC, FedNTD, FedUV ----

def few_classes():
    "Digits, and two clients: one has three classes, one of them rare; the other has two."
    task = load('digits')
    one = lambda k, n: (task.y_train == k).nonzero()[:n, 0]
    return task, [torch.cat([one(0, 30), one(1, 12), one(7, 3)]), torch.cat([one(4, 5), one(9, 11)])]

def restricted(logits, z, said, y, n): # FedRS
    top = torch.stack([torch.exp(logits[:, c]*(1. if k > 0 else .3)) for c, k in enumerate(n)], 1)
    return -(top[range(len(y)), y]/top.sum(1)).log().mean()

def calibrated(logits, z, said, y, n): # FedLC
    top = torch.stack([torch.exp(logits[:, c] - .2*max(k, 1e-8)**-.25) for c, k in enumerate(n)], 1)
    return -(top[range(len(y)), y]/top.sum(1)).log().mean()

def balanced(logits, z, said, y, n): # FedRoD
    return F.cross_entropy(logits + torch.tensor(n).log(), y)

def not_true(beta, tau): # FedNTD
    "Sample by sample, with the true class cut out of what is answered and of what the received network says."
    def loss(logits, z, said, y, n):
        total = 0.
        for own, g, c in zip(logits, said, y.tolist()):
            others = [j for j in range(len(own)) if j != c]
            mine, theirs = (torch.exp(v[others]/tau)/torch.exp(v[others]/tau).sum() for v in (own, g))
            total = total + (theirs*(theirs.log() - mine.log())).sum()
        return F.cross_entropy(logits, y) + beta*total/len(y)
    return loss

def uniform_and_spread(logits, z, said, y, n): # FedUV
    "Class by class and pair by pair."
    p, classes = torch.softmax(logits, 1), logits.shape[1]
    short = [F.relu(classes**-.5 - p[:, c].std()) for c in range(classes)]
    far = torch.stack([(z[i] - z[j]).pow(2).sum() for i in range(len(z)) for j in range(i)])
    return F.cross_entropy(logits, y) + 2.*sum(short)/classes + .7*torch.exp(-far/far[far != 0].median()).mean()

PLAIN, SLOW = Local(epochs=3, batch_size=16, momentum=0.), Local(epochs=3, batch_size=16, lr=.02)

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('method,loss,norm,local', [
    (FedRS(alpha=.3), restricted, 'none', PLAIN), (FedLC(tau=.2), calibrated, 'none', PLAIN),
    (FedLC(tau=.2), calibrated, 'none', Local(steps=2, batch_size=8, lr=.2)),
    (FedLC(tau=.2), calibrated, 'none', Local(epochs=(1, 4), batch_size=16)),
    (FedRoD(), balanced, 'none', Local(steps=2, batch_size=8)),
    (FedNTD(beta=1., tau=1.), not_true(1., 1.), 'batch', Local(epochs=4, batch_size=16)),
    (FedNTD(beta=3., tau=2.), not_true(3., 2.), 'batch', Local(epochs=4, batch_size=16)),
    (FedUV(lam=2., mu=.7), uniform_and_spread, 'none', SLOW)], ids=lambda v: getattr(v, 'name', ''))
def test_clients_that_lack_classes_are_the_loop_by_hand(method, loss, norm, local, executor):
    "Two of unequal size that answer one round; the received network is asked in evaluation mode."
    task, clients = few_classes()
    net = build('mlp', task, seed=0, hidden=(8,), features=4, norm=norm)
    data = batches_of(task, clients, [0, 1], local)
    out, free = (local_phase(Broadcast(m, net, start(m, net, 2), local), [0, 1], data, executor)['params']
                 for m in (method, FedAvg()))
    for k, own in enumerate(clients):
        plain, received = copy.deepcopy(net).train(), copy.deepcopy(net).eval()
        opt = torch.optim.SGD(plain.parameters(), lr=local.lr, momentum=local.momentum)
        n = torch.bincount(task.y_train[own], minlength=10).tolist()
        for t, size in enumerate(data.counts[k].tolist()):
            if not size: continue
            x, y = (v[0] for v in data.at(t, [k], size))
            z, logits = plain(x)
            descend(opt, loss(logits, z, received(x)[1].detach(), y, n))
        for name, p in plain.named_parameters():
            assert (out[name][k] - p).abs().max() < 1e-5
            assert norm == 'batch' or (p - net.get_parameter(name)).abs().max() > 1e-3 # biases before BatchNorm rest
        assert max((out[name][k] - free[name][k]).abs().max() for name in free) > 1e-3

@pytest.mark.parametrize('other', [FedRoD(), MaskedCE(fill='inf')], ids=repr)
def test_fedrs_without_any_push_takes_logits_of_minus_infinity(other):
    "Minus infinity times zero would be NaN."
    task, clients = few_classes()
    net, local = build('mlp', task, seed=0, hidden=(8,), features=4), Local(epochs=1)
    run = federate(net, task, clients, other + FedRS(alpha=0.), rounds=1, local=local, progress=False)
    assert run.history.loss.notna().all()

class Cosine(nn.Module):
    "A network that nobody could cut: its head compares directions."
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10, bias=False)
    def forward(self, x):
        z = self.body(x.flatten(1)).relu()
        return z, 9*F.linear(F.normalize(z), F.normalize(self.head.weight))

@pytest.mark.parametrize('m', [FedLC(), FedRS()], ids=repr)
def test_classes_are_counted_for_networks_that_cannot_be_cut(m):
    task = load('digits').subset(200, seed=0)
    run = federate(Cosine(), task, dirichlet(task.y_train, 4, .5, seed=0), m, 1, Local(epochs=1), progress=False)
    assert np.isfinite(run.last['train_loss'])

def test_two_classes_leave_fedntd_nothing_to_say():
    "Of two classes one is the true one; the softmax of the other is 1."
    assert same(classify(FedNTD(beta=9.), 3), classify(FedAvg(), 3))

def test_feduv_survives_features_that_are_all_alike():
    z, logits = (torch.ones(5, n, requires_grad=True) for n in (3, 4))
    loss = FedUV().loss(logits, z)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, (z, logits))) and torch.isfinite(loss)
