"What a fresh reader broke: empty places, draws, recordings, filled batches, names that vary."
import copy, pytest, torch, torch.nn.functional as F
from functools import partial
from torch import nn
from fedlit.batches import batches_of
from fedlit.local import Local
from fedlit.cohort import Broadcast, Cohort
from fedlit.data import load
from fedlit.engine.frozen import FrozenCohort
from fedlit.engine.ragged import RaggedCohort, can_pad
from fedlit.ground.stacks import masked_batchnorm, stacked
from fedlit.ground.tape import Tapes
from fedlit.method import FedAvg, Method
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.round import fed_round, local_phase
from fedlit.state import pure, start
from fedlit.run import federate
from fedlit.vocabulary import OFFERS, STEP, offers
from dataclasses import replace

TASK = load('digits').subset(200, seed=0)
CLIENTS = dirichlet(TASK.y_train, 4, .5, seed=1)
WHO = [0, 1, 2, 3]

def net(**kw): return build('mlp', TASK, seed=0, **kw)

def one(method, executor='loop', network=None, tapes=None, rounds=1, **sent):
    network, local = network or net(), Local(epochs=2, batch_size=16, lr=.1)
    state = start(method, network, 4)
    for r in range(rounds):
        data = batches_of(TASK, CLIENTS, WHO, local, round=r)
        state = fed_round(Broadcast(method, network, state, local, **sent), WHO, data, [len(c) for c in CLIENTS],
                          executor, tapes)
    return state.params

def apart(a, b): return max((v - b[k]).abs().max().item() for k, v in a.items())

@pytest.mark.parametrize('local', [Local(epochs=2, batch_size=16), Local(epochs=1, batch_size=500), Local(steps=3)])
def test_empty_places_hold_the_first_sample_of_their_batch(local):
    data = batches_of(TASK, CLIENTS, WHO, local)
    assert (data.counts < data.widest()).any()
    for t in range(data.counts.shape[1]):
        live = (data.counts[:, t] > 0).nonzero()[:, 0].tolist()
        x, y = data.at(t, live, data.index.shape[2])
        assert torch.equal(x, torch.where((y < 0).view(*y.shape, *[1]*(x.dim() - 2)), x[:, :1], x))
        assert torch.equal((y >= 0).sum(1), data.counts[live, t])

@pytest.mark.filterwarnings('ignore:client')
def test_one_bad_sample_makes_one_client_bad():
    x = TASK.x_train.clone()
    x[0] = torch.nan
    bad = replace(TASK, x_train=x)
    owner = next(k for k, c in enumerate(CLIENTS) if 0 in c.tolist())
    for executor in ('loop', 'vmap'):
        run = federate(net(), bad, CLIENTS, FedAvg(), 1, Local(epochs=1, batch_size=16), executor=executor,
                       bad_clients='skip', progress=False)
        assert run.history.bad_clients.iloc[0] == str(owner), executor

class Noisy(Method):
    "A frozen hook that draws, with the generator that it is given."
    def frozen(self, x, generator): return dict(noise=torch.randn(len(x), 1, generator=generator))
    def loss(self, features, frozen): return (features*frozen['noise']).square().mean()

def test_draws_of_frozen_hooks_are_named():
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ends.append(one(Noisy()))
    assert apart(*ends) == 0

def test_a_client_draws_the_same_in_every_company():
    local, network = Local(epochs=2, batch_size=16, lr=.1), net()
    def end(who):
        sent = Broadcast(Noisy(), network, start(Noisy(), network, 4), local)
        data = batches_of(TASK, CLIENTS, who, local)
        out = local_phase(Broadcast(Noisy(), network, sent.state, local), who, data, 'vmap')
        return {k: v[who.index(1)] for k, v in out['params'].items()}
    assert apart(end([1]), end([3, 1, 0])) < 1e-5

class Trains(Method):
    "Its frozen network is in training mode, where BatchNorm looks across the batch."
    def frozen(self, forward, received, x):
        own = {k: v + (0*x.sum()).to(v.dtype) for k, v in received.items()} # vmap lets nobody write to what all share
        return dict(z=forward(received, own, x)[0])
    def loss(self, features, frozen): return (features - frozen['z']).square().mean()

class Follows(Trains):
    "Its frozen network is the one that trains."
    def frozen(self, forward, params, buffers, x): return dict(z=forward(params, buffers, x, train=False)[0])

@pytest.mark.parametrize('m', [Trains(), Follows()], ids=repr)
def test_outputs_that_depend_on_the_batch_or_the_step_are_not_computed_beforehand(m):
    network, local = net(norm='batch'), Local(epochs=2, batch_size=16, lr=.01)
    sent = Broadcast(m, network, start(m, network, 4), local)
    data = batches_of(TASK, CLIENTS, WHO, local, min_batch=2)
    ends = [cohort(sent, [1], data.of([1])).train()['params'] for cohort in (Cohort, FrozenCohort)]
    assert apart(*ends) == 0
    assert apart(*(local_phase(sent, WHO, data, executor)['params'] for executor in ('loop', 'vmap'))) < 1e-4

class LateNoise(Method):
    "Draws in later steps only."
    def loss(self, features, step, generator):
        return (features*torch.randn(1, generator=generator)).square().mean() if step > 0 else 0*features.sum()

def test_a_step_that_draws_later_is_sealed_too():
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ends.append(one(LateNoise(), tapes=Tapes()))
    assert apart(*ends) == 0

def test_a_recording_belongs_to_its_network():
    class Net(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.body, self.head, self.act = nn.Linear(64, 8), nn.Linear(8, 10), act
        def forward(self, x):
            z = self.act(self.body(x.flatten(1)))
            return z, self.head(z)
    torch.manual_seed(0)
    relu, tanh = Net(torch.relu), Net(torch.tanh)
    tanh.load_state_dict(relu.state_dict())
    tapes = Tapes()
    one(FedAvg(), network=relu, tapes=tapes, rounds=2)
    assert apart(one(FedAvg(), network=tanh, tapes=tapes, rounds=2), one(FedAvg(), network=tanh, rounds=2)) == 0
    half = partial(pure, precision=torch.bfloat16)
    halves = [one(FedAvg(), network=relu, tapes=t, function=half) for t in (tapes, None)]
    assert apart(*halves) == 0

def test_recordings_are_played_where_the_function_is_made_anew():
    tapes, network = Tapes(), net()
    for _ in range(3): one(FedAvg(), network=network, tapes=tapes, function=partial(pure, channels_last=False))
    many = len(tapes.kept)
    one(FedAvg(), network=network, tapes=tapes, function=partial(pure, channels_last=False))
    assert len(tapes.kept) == many and any(callable(v) for v in tapes.kept.values())

def test_a_hook_that_uses_samples_keeps_batches_as_they_are():
    class Scaled(Method):
        def use(self, params, x=None):
            return params if x is None else {k: v*(1 + .1*x.mean()) for k, v in params.items()}
    network, local = net(norm='none'), Local(batch_size=16)
    sent = Broadcast(Scaled(), network, start(Scaled(), network, 4), local)
    assert not can_pad(sent, batches_of(TASK, CLIENTS, WHO, local))

def test_a_hook_that_the_table_adds_to_a_step_is_asked_about_empty_places(monkeypatch):
    class Looks(Method):
        def done(self, client, forward): return client, {}
    network, local = net(norm='none'), Local(batch_size=16)
    sent = Broadcast(Looks(), network, start(Looks(), network, 4), local)
    assert can_pad(sent, batches_of(TASK, CLIENTS, WHO, local))
    monkeypatch.setattr('fedlit.engine.ragged.STEP', (*STEP, 'done')) # as if it ran in every step
    assert not can_pad(sent, batches_of(TASK, CLIENTS, WHO, local))

def test_clients_of_a_filled_cohort_stand_in_any_order():
    network, local = net(norm='none'), Local(epochs=1, batch_size=16, lr=.1)
    order = sorted(WHO, key=lambda k: len(CLIENTS[k])) # the shortest first
    sent = Broadcast(FedAvg(), network, start(FedAvg(), network, 4), local)
    torn, filled = (RaggedCohort(sent, order, batches_of(TASK, CLIENTS, order, local), stacked, fill).train()
                    for fill in (False, True))
    assert apart(torn['params'], filled['params']) < 1e-5

@pytest.fixture
def fraction(monkeypatch):
    "A new name to ask for: one row of the table, one place in the round."
    offers(('loss',), varies='step', fraction=('()', 'the share of its steps that the client has done'))
    real = Cohort.offer
    def offer(self, own):
        offer = real(self, own)
        return {**offer, 'fraction': offer['step']/offer['steps']} if 'step' in offer else offer
    monkeypatch.setattr(Cohort, 'offer', offer)
    yield
    del OFFERS['fraction']

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('recorded', [False, True])
def test_a_new_name_that_varies_from_step_to_step(fraction, executor, recorded):
    class Asks(Method):
        def loss(self, features, fraction): return fraction*features.square().mean()
    class ByHand(Method):
        def loss(self, features, step, steps): return (step/steps)*features.square().mean()
    tapes = Tapes() if recorded else None
    assert apart(one(Asks(), executor, tapes=tapes, rounds=2), one(ByHand(), executor, rounds=2)) < 1e-6

# ---- BatchNorm over the samples ----

def by_autograd(x, r, w, b):
    "BatchNorm over the rows with r = 1, written out."
    over, wide = (0, *range(2, x.dim())), (1, -1) + (1,)*(x.dim()-2)
    r = r.to(x).view(-1, *(1,)*(x.dim()-1))
    n = r.sum()*x[0, 0].numel()
    gap = x - ((x*r).sum(over)/n).view(wide)
    var = (gap.square()*r).sum(over)/n
    return gap*((var + 1e-5).rsqrt()*w).view(wide) + b.view(wide)

@pytest.mark.parametrize('shape', [(6, 3), (6, 3, 4), (6, 3, 2, 2)], ids=str)
def test_the_gradient_of_batchnorm_by_hand_is_autograds_at_empty_places_too(shape):
    double = dict(dtype=torch.double)
    x, w, b = torch.randn(4, *shape, **double), torch.randn(4, 3, **double), torch.randn(3, **double)
    r = torch.arange(6) < torch.tensor([[6], [5], [3], [2]])
    def ours(x, r, w, b):
        mean, var = (v + 0*x.sum() for v in (torch.zeros(3, **double), torch.ones(3, **double)))
        with masked_batchnorm(r): return F.batch_norm(x, mean, var, w, b, training=True)
    def first(f): return torch.func.grad(lambda x, w, b, r: f(x, r, w, b).pow(3).sum(), (0, 1, 2))
    def second(f): return torch.func.grad(lambda *of: sum(v.square().sum() for v in first(f)(*of)), (0, 1, 2))
    for of in (first, second):
        got, want = (torch.func.vmap(of(f), (0, 0, None, 0))(x, w, b, r) for f in (ours, by_autograd))
        for u, v in zip(got, want): assert (u - v).abs().max() < 1e-11*v.abs().max()

@pytest.mark.parametrize('norm', [nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, track_running_stats=False),
                                  nn.BatchNorm1d(3, momentum=None)])
def test_batchnorm_of_all_kinds_passes_over_empty_places(norm):
    x, alone = torch.randn(6, 3), copy.deepcopy(norm)
    with masked_batchnorm(torch.arange(6) < 4): out = norm(x)
    assert (out[:4] - alone(x[:4])).abs().max() < 1e-5
    for u, v in zip(norm.buffers(), alone.buffers()): assert (u - v).abs().max() < 1e-6

@pytest.mark.parametrize('norm, x', [(nn.BatchNorm1d(6), torch.randn(40, 6) + 10),
                                     (nn.BatchNorm2d(3), torch.rand(40, 3, 4, 4))])
def test_batchnorm_stays_exact_under_autocast(norm, x):
    alone = copy.deepcopy(norm)
    with torch.autocast('cpu', torch.bfloat16):
        with masked_batchnorm(torch.arange(40) < 30): out = norm(x)
        assert (out[:30] - alone(x[:30])).abs().max() < 1e-4
    for u, v in zip(norm.buffers(), alone.buffers()): assert (u - v).abs().max() < 1e-5

@pytest.mark.parametrize('valid', [None, torch.arange(5) < 4])
def test_statistics_that_clients_share_are_refused_and_not_touched(valid):
    mean, var = torch.zeros(3), torch.ones(3)
    def f(x):
        with masked_batchnorm(valid): return F.batch_norm(x, mean, var, training=True)
    with pytest.raises(RuntimeError, match='running_mean is one for all clients and would be updated in place'):
        stacked(f, (0,))(torch.randn(4, 5, 3))
    assert not mean.any() and (var == 1).all()
