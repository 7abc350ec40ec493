"""MOON beyond its page: executors, partial participation, an oracle, memory, degenerate features, neutral elements."""
import copy, math
import pytest, torch, torch.nn.functional as F
from torch import nn
from fedlit.method import FedAvg, Method
from fedlit.methods.feddecorr import FedDecorr
from fedlit.methods.moon import MOON, contrast
from fedlit.cohort import look
from fedlit.round import Local, fed_round, start
from fedlit.tree import leaves

devices = ['cpu'] + (['cuda'] if torch.cuda.is_available() else [])
variants = [MOON(), MOON(mu=5, tau=.1), MOON(form='paper'), MOON(variant='l2', mu=.5), MOON() + FedDecorr()]
local = Local(lr=.1, momentum=.9, weight_decay=1e-3)
who = [[0, 2], [1, 2, 3], [0, 3]]       # client 1 comes late, client 4 never


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
    return dict(x=torch.stack(xs), y=torch.stack(ys), live=live)


def train(method, model, executor, rounds=3, device='cpu'):
    model = model.to(device)
    dtype = model.head.weight.dtype
    state = start(method, model, 5)
    for r in range(rounds):
        batch = {k: v if k == 'live' else v.to(device) for k, v in data(who[r], r).items()}
        batch['x'] = batch['x'].to(dtype)
        state = fed_round(method, model, state, who[r], batch, [1. + k for k in who[r]], local, executor)
    return state


def same(a, b, **tol):
    for u, v in zip(leaves(a), leaves(b), strict=True): torch.testing.assert_close(u.cpu(), v.cpu(), **tol)


@pytest.mark.parametrize('device', devices)
@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('method', variants, ids=repr)
def test_loop_equals_vmap(method, norm, device):
    # FedDecorr multiplies rounding errors on batches of three samples (1e-13 becomes 6e-5 in float32):
    # its sum is compared in double
    dtype = torch.float64 if method.parts[1:] else torch.float32
    a, b = (train(method, net(norm).to(dtype), e, device=device) for e in ('loop', 'vmap'))
    for part in ('params', 'buffers', 'client'): same(getattr(a, part), getattr(b, part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('method', [MOON(mu=2.), MOON(mu=2., form='paper'), MOON(mu=.7, variant='l2')], ids=repr)
def test_against_plain_modules(method, norm, executor):
    "Networks copied, torch.optim.SGD, CosineSimilarity, a two-column cross-entropy: as the released code is organised."
    server, never = net(norm), net(norm)
    previous, trained = {k: copy.deepcopy(never) for k in range(5)}, set()
    for r in range(3):
        batch, locals_ = data(who[r], r), []
        for i, k in enumerate(who[r]):
            m, frozen, prev = copy.deepcopy(server).train(), copy.deepcopy(server).eval(), previous[k].eval()
            opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9, weight_decay=1e-3)
            for t in range(4):
                if not (n := int(batch['live'][i, t])): continue
                x, y = batch['x'][i, t, :n], batch['y'][i, t, :n]
                z, logits = m(x)
                loss = F.cross_entropy(logits, y)
                if method.variant == 'l2': loss = loss + method.mu*(z - frozen(x)[0].detach()).norm(dim=1).mean()
                elif r > 0 and (method.form == 'released' or k in trained):
                    sim = nn.CosineSimilarity(dim=-1)
                    columns = torch.stack([sim(z, frozen(x)[0].detach()), sim(z, prev(x)[0].detach())], 1)/method.tau
                    loss = loss + method.mu*F.cross_entropy(columns, torch.zeros(n, dtype=torch.long))
                opt.zero_grad()
                loss.backward()
                opt.step()
            locals_.append(m)
        weights = torch.tensor([1. + k for k in who[r]])
        weights = weights/weights.sum()
        mixed = {k: sum(w*m.state_dict()[k] for w, m in zip(weights, locals_))
                 for k, v in server.state_dict().items() if v.is_floating_point()}
        server.load_state_dict({**server.state_dict(), **mixed})
        for k, m in zip(who[r], locals_):
            previous[k] = m
            trained.add(k)
    state = train(method, net(norm), executor)
    floats = {k: v for k, v in {**state.params, **state.buffers}.items() if v.is_floating_point()}
    same(floats, {k: server.state_dict()[k] for k in floats}, rtol=1e-4, atol=1e-5)


def test_oracle_sees_the_term(): # guards the test above against a term that does nothing
    plain = train(FedAvg(), net(), 'loop').params
    for m in variants:
        assert max((a-b).abs().max() for a, b in zip(leaves(plain), leaves(train(m, net(), 'loop').params))) > 1e-3


@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('method', [MOON(mu=0), MOON(mu=0, form='paper'), MOON(mu=0, variant='l2')], ids=repr)
def test_without_weight_is_fedavg(method, executor):
    # in a stack, FedAvg's short batches are filled up and MOON's are not
    close = dict(rtol=0, atol=0 if executor == 'loop' else 1e-6)
    same(train(method, net(), executor).params, train(FedAvg(), net(), executor).params, **close)


def test_round_zero_is_fedavg_except_for_l2():
    plain = train(FedAvg(), net(), 'loop', 1).params
    same(train(MOON(mu=9), net(), 'loop', 1).params, plain, rtol=0, atol=0)
    assert any(not torch.equal(a, b)
               for a, b in zip(leaves(plain), leaves(train(MOON(mu=9, variant='l2'), net(), 'loop', 1).params)))


@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_late_client(executor):
    "Client 1 first trains in round 1: under 'paper' as in FedAvg, under 'released' not."
    def late(method):
        model = net()
        state = start(method, model, 5)
        for r, ks in enumerate([[0, 2], [1, 3]]):
            state = fed_round(method, model, state, ks, data(ks, r), [1., 1.], local, executor)
        return state.params
    same(late(MOON(mu=5, form='paper')), late(FedAvg()), rtol=0, atol=1e-7)
    assert max((a-b).abs().max() for a, b in zip(leaves(late(MOON(mu=5))), leaves(late(FedAvg())))) > 1e-3


@pytest.mark.parametrize('device', devices)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_memory_is_the_last_local_model(executor, device):
    state, before = train(MOON(), net(True), executor, 3, device), start(MOON(), net(True), 5)
    m = state.client['MOON']
    assert m['trained'].tolist() == [1, 1, 1, 1, 0] and m['trained'].device.type == device
    for tree in ('params', 'buffers'):
        for k, v in m[tree].items():
            assert v.device.type == device and v.dtype == getattr(before, tree)[k].dtype
            assert torch.equal(v[4].cpu(), getattr(before, tree)[k])
    # what was received (0, 2, 5.33 rounded), plus the steps taken
    assert m['buffers']['body.1.num_batches_tracked'].tolist() == [7, 6, 4, 9, 0]


@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_l2_starts_at_rest(executor):
    "At the first step local and global features agree but for rounding, so one step is FedAvg's."
    def one_step(m):
        model = net()
        state = start(m, model, 5)
        batch = {k: v[:, :1] for k, v in data([0, 1, 2], 0, False).items() if v is not None}
        return fed_round(m, model, state, [0, 1, 2], batch, [1.]*3, local, executor).params
    same(one_step(MOON(mu=50, variant='l2')), one_step(FedAvg()), rtol=0, atol=1e-6)


def test_l2_keeps_no_memory():
    assert not leaves(train(MOON(variant='l2'), net(), 'vmap').client)


def test_frozen_networks_get_no_gradient():
    z, w, v = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    echo = lambda params, buffers, x, train: (2*params['z'], None, buffers)
    memory = dict(params=dict(z=v), buffers={}, trained=torch.ones(()))
    for variant in ('contrastive', 'l2'):
        method = MOON(variant=variant)
        seen = look(method, dict(forward=echo, first=False, params=dict(z=z), buffers={}, received=dict(z=w),
                                 client=dict(MOON=memory), x=None))
        loss = method.loss(z, seen['MOON'], memory)
        grads = torch.autograd.grad(loss, (z, w, v), allow_unused=True)
        assert grads[0] is not None and grads[1] is None and grads[2] is None


# float16 cannot hold the 1e-8 that keeps a cosine from 0/0
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.float64])
def test_extremes_stay_finite(dtype):
    z = torch.tensor([[0., 0.], [1e-4, 0.], [1e2, -1e2], [0., 1.]], dtype=dtype, requires_grad=True)
    near, far = torch.tensor([[0., 1.]], dtype=dtype).expand(4, 2), torch.tensor([[0., -1.]], dtype=dtype).expand(4, 2)
    for tau in (.01, .5, 100.):
        loss = contrast(z, near, far, tau)
        assert loss.isfinite() and 0 <= loss <= 2/tau + math.log(2)
    if dtype in (torch.float32, torch.float64):
        assert torch.autograd.grad(contrast(z, near, far, .5), z)[0].isfinite().all()


def test_dead_features_behind_a_relu_pass_no_gradient():
    pre = torch.full((2, 3), -1., requires_grad=True)
    loss = contrast(pre.relu(), torch.rand(2, 3), torch.rand(2, 3), .5)
    assert torch.equal(torch.autograd.grad(loss, pre)[0], torch.zeros(2, 3))


def test_gradient_by_finite_differences():
    z, near, far = torch.randn(3, 4, 5, dtype=torch.double).unbind(0)
    assert torch.autograd.gradcheck(lambda z: contrast(z, near, far, .3), z.clone().requires_grad_())


def test_sum_adds_the_terms():
    seen = {}

    class Peek(Method):
        "Notes what a round offers."
        def loss(self, features):
            seen['features'] = features
            return 0.
    both = MOON() + FedDecorr() + Peek()
    model = net()
    state = start(both, model, 5)
    fed_round(both, model, state, [0], data([0], 0), [1.], local)
    assert seen['features'].shape == (7, 5)


@pytest.mark.parametrize('bad', [dict(mu=-1), dict(tau=0), dict(tau=-.5), dict(form='Paper'), dict(variant='L2')])
def test_bad_values_are_named(bad):
    (k, v), = bad.items()
    with pytest.raises(ValueError, match=f'{k}={v!r}'): MOON(**bad)


@pytest.mark.parametrize('method', variants[:4], ids=repr)
def test_repr_is_the_configuration(method):
    from fedlit.parse import method as parse
    assert parse(repr(method)) == method


@pytest.mark.parametrize('method', [MOON(mu=2.), MOON(variant='l2'), MOON() + FedDecorr()], ids=repr)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_looking_once_a_round_is_looking_every_time(monkeypatch, method, executor):
    "Frozen networks see every sample once if it stays the same; the result is that of asking them at every step."
    from fedlit.data import load
    from fedlit.models import build
    from fedlit.partition import dirichlet
    from fedlit.batches import TaskBatches
    from fedlit.run import federate
    task = load('digits').subset(300, seed=0)
    parts = dirichlet(task.y_train, 4, .3, seed=1)
    def go():
        return federate(build('mlp', task, seed=0, norm='batch'), task, parts, method,
                        rounds=3, local=Local(epochs=3, batch_size=16), participation=.75,
                        executor=executor, progress=False).state
    once = go()
    looked = []
    monkeypatch.setattr(TaskBatches, 'once', lambda self: looked.append(1))
    same(once.params, go().params, rtol=0, atol=2e-5)
    assert looked

def test_samples_are_known_by_number():
    from fedlit.data import load
    from fedlit.run import batches_of
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
