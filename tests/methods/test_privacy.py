"Clipping, noise and epsilon: against loops by hand, against the noise's distribution, and against the accountants."
import importlib.util, math, time, warnings
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
import pytest, torch
from scipy import optimize, stats
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
import fedlit.laws as laws
from fedlit.cohort import Broadcast, buffers_to_send
from fedlit.ground.tape import Tapes
from fedlit.laws import COUNTS
from fedlit.method import Method
from fedlit.methods import (CoordinateMedian, DP, DPSGD, FedAvg, FedAvgM, FedBN, FedCAC, FedDF, FedDecorr, FedDyn,
                            FedNova, FedPer, FedProx, HeteroFL, MOON, PerFedAvg, SCAFFOLD, SOLO, TopK, pFedMe)
from fedlit.methods import privacy
from fedlit.methods.privacy import clip_update, epsilon_of, looks, noise_for, system_normal
from fedlit.models import freeze
from fedlit.parse import methods_by_name
from fedlit.batches import Batches
from fedlit.local import Adam, Local, SGD
from fedlit.round import fed_round, local_phase
from fedlit.state import STATISTICS, start
from fedlit.ground.tree import sqnorm, tmap, zeros
from fedlit.vocabulary import OFFERS
from by_hand import FULL, W0, X, Y, ended, fit, slope
from federation import PRIVATE

COUNTED = importlib.util.find_spec('dp_accounting') is not None
counted = pytest.mark.skipif(not COUNTED, reason='dp-accounting is not there')
LR = Local(lr=.1, momentum=0.)
PLAIN = laws.small_world(norm=False, bias=True)

class Moving(laws.Small):
    "A network whose forward, while it trains, moves what no gradient moves: buffers and a counter."
    def __init__(self, norm=False):
        super().__init__(norm)
        self.register_buffer('codes', torch.zeros(6))
        self.register_buffer('centre', torch.zeros(6))
        self.register_buffer('bright', torch.tensor(0))
        self.register_buffer('fixed', torch.ones(6))
    def forward(self, x):
        z, logits = super().forward(x)
        if self.training and len(x) > 1: # not where DPSGD looks at samples one by one
            with torch.no_grad():
                self.codes.lerp_(z.mean(0), .5)
                self.centre.lerp_(z.mean(0), .5)
                self.bright.add_((x.mean((1, 2, 3)) > 0).sum())
        return z - .1*self.codes - .1*self.centre, logits

MOVING = {norm: laws.World(Moving(norm).double(), PLAIN.data, PLAIN.clients, PLAIN.sizes, PLAIN.proxy,
                           local=PLAIN.local) for norm in (False, True)}

class Wide(nn.Module):
    "Many parameters whose gradient is zero, so that noise is all there is."
    def __init__(self, n=20000):
        super().__init__()
        self.head = nn.Linear(n, 1, bias=False)
        nn.init.zeros_(self.head.weight)
    def forward(self, x): return x, 0*self.head(x)

def still(method, rounds=1, clients=4, executor='loop', net=None, state=None):
    "What clients and server add to a network that does not move."
    net = net or Wide()
    state = state or start(method, net, clients)
    n = net.head.weight.shape[1]
    data = dict(x=torch.zeros(clients, 1, 2, n), y=torch.zeros(clients, 1, 2))
    for _ in range(rounds):
        out = local_phase(Broadcast(method, net, state, LR, criterion=lambda out, y: out.sum()), list(range(clients)),
                          Batches(**data), executor)
        state = fed_round(Broadcast(method, net, state, LR, criterion=lambda out, y: out.sum()), list(range(clients)),
                          data, torch.arange(1., clients+1), executor)
    return out['params']['head.weight'][:, 0], state.params['head.weight'][0]

def normal(v, deviation): # the system's randomness has no seed: a right one may fail once in 10^9 times
    return stats.kstest(v.double().numpy()/deviation, 'norm').pvalue > 1e-9

# ---- clipping ----

@pytest.mark.parametrize('per', ['update', 'tensor'])
def test_no_update_is_longer_than_the_clip(per):
    gen = torch.Generator().manual_seed(0)
    for size in (1e-3, 1., 100.):
        tree = {k: size*torch.randn(s, generator=gen) for k, s in dict(a=3, b=50, c=1).items()}
        cut = clip_update(tree, .5, per)
        assert sqnorm(cut).sqrt() <= .5*(1 + 1e-6)
        for k, v in tree.items(): assert torch.cosine_similarity(v, cut[k], 0) > 1 - 1e-6 # nothing is turned
        if sqnorm(tree) < .01: assert all(torch.equal(v, cut[k]) for k, v in tree.items())
    zero = clip_update(dict(a=torch.zeros(2)), .5, per)
    assert not zero['a'].any()

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_the_mean_of_clipped_updates_by_hand(executor):
    w = W0.clone()
    for _ in range(3):
        moved = [ended(k, w) - w for k in range(2)]
        w = w + torch.stack([d*min(1, .3/d.norm()) for d in moved]).mean(0)
    for sizes in ((1., 1.), (9., 1.)): # data does not count
        s = fit(DP(clip=.3, noise=0.), 3, lambda r: [0, 1], FULL, LR, sizes, executor)
        assert torch.allclose(s.params['head.weight'][0], w, atol=1e-9)

def test_one_client_moves_the_mean_by_no_more_than_it_may():
    "Whatever a client has, even numbers that no image has: the server ends within 2C/K."
    net, m = PLAIN.model, DP(clip=.05, noise=0.)
    state, data, ends = start(m, net, 6), PLAIN.data(0), []
    for scale in (1., 50., -50.):
        x = data['x'].clone()
        x[2] *= scale
        new = fed_round(Broadcast(m, net, state, PLAIN.local), PLAIN.cohort(0), dict(data, x=x), PLAIN.sizes)
        ends.append(torch.cat([v.flatten() for v in new.params.values()]))
    apart = max((a - b).norm() for a in ends for b in ends)
    assert .05/4 < apart <= 2*.05/4 + 1e-9

# ---- noise ----

def test_the_servers_noise_is_normal_and_as_large_as_it_says():
    _, w = still(DP(clip=.5, noise=2.))
    assert normal(w, 2*.5/4) and w.std().item() == pytest.approx(.25, rel=.02)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('source', ['seed', 'system'])
def test_every_client_has_noise_of_its_own(source, executor):
    each, w = still(DP(clip=.5, noise=2., at='client', source=source), executor=executor)
    assert all(normal(v, 1.) for v in each)
    assert (torch.corrcoef(each) - torch.eye(4)).abs().max() < .04
    assert w.std().item() == pytest.approx(1/math.sqrt(4), rel=.03)

@pytest.mark.parametrize('at', ['server', 'client'])
def test_noise_comes_from_the_seed_and_differs_from_round_to_round(at):
    m = DP(clip=.5, noise=2., at=at)
    one, two = still(m)[1], still(m, rounds=2)[1]
    assert torch.equal(one, still(m)[1]) and abs(torch.corrcoef(torch.stack([one, two - one]))[0, 1]) < .04
    assert not torch.equal(one, still(m, state=start(m, Wide(), 4, seed=1))[1])

@pytest.mark.parametrize('at', ['server', 'client'])
def test_the_systems_noise_is_never_the_same(at):
    m = DP(clip=.5, noise=2., at=at, source='system')
    a, b = still(m)[1], still(m)[1]
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < .04
    v = system_normal(torch.empty(50000, dtype=torch.double))
    assert normal(v, 1.) and not normal(1.1*v, 1.) and v.abs().max() < 9

def test_what_stays_at_home_and_what_is_frozen_gets_no_noise():
    world = laws.small_world(norm=True)
    world.model.c2.weight.requires_grad_(False)
    plain, noisy = (laws.train(FedBN() + DP(clip=1e-9, noise=z), world, rounds=1) for z in (0., 1e9))
    assert 'c2.weight' not in {**noisy.params, **noisy.buffers}
    for k, v in plain.personal.items(): assert torch.equal(v[:], noisy.personal[k][:]), k
    assert all((noisy.params[k] - v).abs().max() > .01 for k, v in plain.params.items() if k not in plain.personal)

# ---- samples ----

def by_hand(w, z, clip):
    "The mean of clipped gradients of the samples, summed one by one."
    ends = []
    for k in range(2):
        v = w
        for t in range(3):
            each = [slope(v, x[None], y[None]) for x, y in zip(X[k, t], Y[k, t])]
            v = v - .1*sum(g*min(1, clip/g.norm()) for g in each)/len(each)
        ends.append(v)
    return torch.stack(ends).mean(0)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_the_gradient_of_every_sample_is_clipped(executor):
    s = fit(DPSGD(clip=.4, noise=0.), 1, lambda r: [0, 1], FULL, LR, executor=executor)
    assert torch.allclose(s.params['head.weight'][0], by_hand(W0, 0, .4), atol=1e-9)
    assert not torch.allclose(by_hand(W0, 0, .4), by_hand(W0, 0, 1e9), atol=1e-2)

def test_a_clip_that_nothing_reaches_is_sgd():
    a, b = (laws.train(m, PLAIN, 'vmap') for m in (DPSGD(clip=1e6, noise=0.), FedAvg()))
    assert max((a.params[k] - v).abs().max() for k, v in b.params.items()) < 1e-12

@pytest.mark.parametrize('source', ['seed', 'system'])
def test_every_step_has_noise_of_its_own_played_back_or_not(source):
    "Three rounds of two clients with two steps each: all noise is independent, of standard deviation lr z C/B."
    net, m = Wide(5000), DPSGD(clip=.5, noise=2., source=source)
    data = dict(x=torch.zeros(2, 2, 4, 5000), y=torch.zeros(2, 2, 4, dtype=torch.long))
    def run(tapes):
        state, seen = start(m, net, 2), []
        for _ in range(3):
            out = local_phase(Broadcast(m, net, state, LR, criterion=lambda out, y: out.sum()), [0, 1], Batches(**data),
                              tapes=tapes)
            seen.append(out['params']['head.weight'][:, 0] - state.params['head.weight'])
            state = fed_round(Broadcast(m, net, state, LR, criterion=lambda out, y: out.sum()), [0, 1], data, [1., 1.],
                              tapes=tapes)
        return torch.cat(seen)
    for tapes in (None, Tapes()):
        each = run(tapes)
        assert all(normal(v, .1*2*.5/4*math.sqrt(2)) for v in each)
        assert (torch.corrcoef(each) - torch.eye(6)).abs().max() < .1 # seven standard deviations

# ---- laws ----

@pytest.mark.parametrize('m', PRIVATE[:3], ids=repr)
def test_every_executor_adds_the_same_noise(m):
    for law in (laws.check_executors, laws.check_recorded): assert law(m, PLAIN).holds, law(m, PLAIN)

@pytest.mark.slow
@pytest.mark.parametrize('m', PRIVATE, ids=repr)
def test_every_law_holds(m):
    for name, law in laws.LAWS.items():
        seen = law(m, PLAIN)
        assert seen.holds is not False, (name, seen)

# ---- beside others ----

class Loud(Method):
    "Sends something that no server reads."
    def done(self, client, delta): return client, dict(more=delta['head.bias'])

@pytest.mark.parametrize('make,why', [
    (lambda: SCAFFOLD() + DP(), 'would travel unprotected'),
    (lambda: DP(at='client') + SCAFFOLD(), 'would travel unprotected'),
    (lambda: FedCAC() + DP(), 'would travel unprotected'),
    (lambda: FedNova() + DP(), 'decide `weigh` alone'),
    (lambda: HeteroFL() + DP(), 'averaged over those that have an entry'),
    (lambda: DP() + FedDF(), 'looks at what each client has trained'),
    (lambda: DP(at='client') + FedDF(), 'looks at what each client has trained'),
    (lambda: FedAvgM() + DP(), r'write DP\(.*\) \+ FedAvgM'),
    (lambda: DP() + TopK(), r'write TopK\(.*\) \+ DP'),
    (lambda: DP() + DP(at='client'), 'both decide how updates are protected'),
    (lambda: DPSGD() + DPSGD(noise=2.), 'both decide how gradients are protected'),
    (lambda: MOON() + DPSGD(), 'decide `loss` alone'),
    (lambda: DPSGD() + FedDecorr(), 'decide `loss` alone'),
    (lambda: DPSGD() + pFedMe(), 'looks at samples by itself, at `objective`'),
    (lambda: FedProx(mu=1.) + DPSGD(), r'would be lost; write DPSGD\(.*\) \+ FedProx')])
def test_what_would_break_the_promise_is_refused(make, why):
    with pytest.raises(ValueError, match=why): make()

class Doubt(Method):
    "Is less sure of dark images."
    def predict(self, logits, x): return logits*x.mean((1, 2, 3)).sigmoid()[:, None]

@pytest.mark.parametrize('add', [lambda m, own: m + own, lambda m, own: own + m])
def test_a_prediction_may_look_at_its_input(add): assert laws.check_runs(add(DPSGD(), Doubt()), PLAIN).holds

def test_what_is_sent_besides_is_refused_in_the_round():
    with pytest.raises(ValueError, match='but Loud sends something besides'): laws.train(Loud() + DP(), PLAIN, rounds=1)

@pytest.mark.parametrize('m', [DP(), DP(at='client'), DPSGD()], ids=repr)
def test_statistics_of_batches_are_refused(m):
    net = laws.small_world(norm=True).model
    with pytest.raises(ValueError, match='BatchNorm|buffers would be sent'): start(m, net, 3)
    if isinstance(m, DP): start(m, net, 3, 'home')

class Later(Method):
    def init(self, params): return params, {}, dict(last=zeros(params))
    def send(self, delta, client, mask, round, number, generator):
        return {k: (v + client['last'][k])/2 for k, v in delta.items()}, dict(last=delta)

@pytest.mark.parametrize('m', [DP() + FedAvgM(), SOLO() + DP(), MOON() + DP(), TopK() + DP(),
                               DPSGD() + SCAFFOLD(), DPSGD() + FedProx(mu=.1), DPSGD() + DP(),
                               DP(at='client') + Later(), DP(at='client') + TopK()], ids=repr)
def test_what_is_protected_runs(m): assert laws.check_runs(m, PLAIN).holds

class Fresh(Method):
    def send(self, delta, client, params, received): return {k: params[k] - received[k] for k in delta}, client

class Memory(Method):
    def init(self, params): return params, {}, dict(raw=zeros(params))
    def done(self, client, delta): return dict(raw=delta), {}
    def send(self, delta, client): return client['raw'], client

class Steps(Method):
    def merge(self, delta, server, steps): return {k: v*steps[0] for k, v in delta.items()}, server

@pytest.mark.parametrize('m, why', [(Fresh(), "its `send` sees `params`"), (Memory(), 'before the noise'),
                                    (Steps(), 'how many steps')], ids=repr)
def test_what_a_later_part_asks_for_is_refused(m, why):
    for at in ('client', 'server'):
        with pytest.raises(ValueError, match=why if at == 'client' or m == Steps() else 'has been clipped'):
            DP(at=at) + m
    if m != Steps(): assert laws.check_runs(m + DP(at='client'), PLAIN).holds # whose noise comes last

@pytest.mark.parametrize('name', sorted(OFFERS))
def test_every_name_that_a_later_send_may_ask_for_is_looked_at(name):
    "A later part that asks for it is refused, or what it sees is the same for other data, but for the noise."
    objects = 'axes', 'criterion', 'model', 'generator' # the same ones always, or without data
    if 'send' not in OFFERS[name].hooks or name in ('delta', 'client', *objects): return
    seen = []
    def send(self, delta, client, **more):
        seen.append(more.get(name))
        return delta, client
    named = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in ('self', 'delta', 'client')]
    send.__signature__ = Signature([*named, Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None)])
    try: m = DP(at='client') + type('Asks', (Method,), dict(send=send))()
    except ValueError: return
    net = MOVING[False].model
    for r in (0, 1): # other images, labels, and numbers of steps
        data = dict(PLAIN.data(r), counts=COUNTS[[2*r + 1, 0, 0, 0]])
        with warnings.catch_warnings():
            warnings.simplefilter('ignore') # of what does not leave
            local_phase(Broadcast(m, net, start(m, net, 6), PLAIN.local, proxy=PLAIN.proxy), [0],
                        Batches(**data).of([0]))
    a, b = seen
    if torch.is_tensor(a): a, b = dict(all=a), dict(all=b)
    assert all(torch.equal(v, b[k]) for k, v in a.items()) if isinstance(a, dict) else a == b

@pytest.mark.parametrize('order', [0, 1])
def test_a_median_of_private_updates_counts_all_alike(order):
    "Of the updates as they were sent, whatever each client's number of samples."
    pair = DP(clip=.3, noise=0., at='client'), CoordinateMedian()
    m, world = pair[order] + pair[1 - order], replace(PLAIN, sizes=torch.tensor([1., 100., 3., 2.]))
    state = start(m, PLAIN.model, 6)
    out = local_phase(Broadcast(m, PLAIN.model, state, PLAIN.local), PLAIN.cohort(0), Batches(**PLAIN.data(0)))
    new = laws.train(m, world, rounds=1)
    for k, v in out['params'].items():
        middle = (v - state.params[k]).sort(0).values[1:3].mean(0)
        assert torch.allclose(new.params[k], state.params[k] + middle, atol=1e-12)

def test_norms_that_are_frozen_are_no_statistics_of_clients():
    net = freeze(laws.small_world(norm=True).model, but=('fc', 'head'))
    for statistics in STATISTICS: start(DP(), net, 3, statistics)

# ---- epsilon ----

@counted
@pytest.mark.parametrize('noise,rounds,drawn', [(1.1, 100, 10), (8., 30, 20), (8., 20, 100)])
def test_epsilon_is_the_librarys(noise, rounds, drawn):
    import dp_accounting as dp
    for sampling, kind, z in (('fixed', dp.NeighboringRelation.REPLACE_ONE, noise/2),
                              ('poisson', dp.NeighboringRelation.ADD_OR_REMOVE_ONE, noise)):
        accountant, once = dp.rdp.RdpAccountant(neighboring_relation=kind), dp.GaussianDpEvent(z)
        sampled = (dp.SampledWithoutReplacementDpEvent(100, drawn, once) if sampling == 'fixed'
                   else dp.PoissonSampledDpEvent(drawn/100, once))
        accountant.compose(sampled, rounds)
        ours = epsilon_of(noise, rounds, 1e-5, 100, drawn, sampling)
        assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)

@counted
def test_the_fewer_clients_are_drawn_the_smaller_epsilon():
    each = [epsilon_of(5., 100, clients=10, drawn=m) for m in range(1, 11)]
    assert each == sorted(each) and each[-1] == epsilon_of(5., 100, clients=10)

@counted
@pytest.mark.parametrize('drawn', [5, 9])
def test_the_divergence_of_a_round_is_no_smaller_than_that_of_an_example(drawn):
    "A client moves the sum up or down by the clip if it is drawn, and all others send zeros: by integration."
    q, z, x = drawn/10, 2., torch.linspace(-30, 30, 100_001, dtype=torch.double)
    bell = lambda m: torch.exp(-(x - m)**2/(2*z*z))/(z*math.sqrt(2*math.pi))
    up, down = (((1 - q)*bell(0) + q*bell(m)).log() for m in (1, -1))
    orders, bound = privacy._of_one_round(z, 10, drawn, 'fixed')
    for a, most in [(a, b) for a, b in zip(orders, bound) if a <= 8]:
        assert torch.trapezoid((a*up + (1 - a)*down).exp(), x).log()/(a - 1) <= most*(1 + 1e-6)

@counted
def test_without_sampling_epsilon_has_a_formula():
    "Renyi divergence a T/(2 z^2) at order a; the conversion of Mironov (2017), which the library's improves on."
    z, rounds, delta = 6., 10, 1e-5
    simple = min(a*rounds/(2*(z/2)**2) + math.log(1/delta)/(a - 1) for a in torch.linspace(1.01, 100, 5000).tolist())
    assert .8*simple < epsilon_of(z, rounds, delta) <= simple
    assert epsilon_of(z, rounds, delta, sampling='poisson') == pytest.approx(epsilon_of(2*z, rounds, delta))

@counted
def test_opacus_says_the_same():
    opacus = pytest.importorskip('opacus.accountants')
    accountant = opacus.RDPAccountant()
    for _ in range(20): accountant.step(noise_multiplier=1.3, sample_rate=.2)
    theirs = accountant.get_epsilon(1e-5)
    assert epsilon_of(1.3, 20, 1e-5, 100, 20, 'poisson') == pytest.approx(theirs, rel=.01)

@counted
def test_the_noise_for_an_epsilon():
    for kw in (dict(clients=5), dict(clients=100, drawn=10, sampling='poisson')):
        z = noise_for(3., 25, **kw)
        assert epsilon_of(z, 25, **kw) <= 3 < epsilon_of(z - .002, 25, **kw)

@pytest.fixture(scope='module')
def digits():
    from fedlit.data import load
    from fedlit.models import build
    from fedlit.partition import iid
    task = load('digits').subset(200, seed=0)
    return build('mlp', task, seed=0), task, iid(task.y_train, 8, seed=0)

def run(digits, method, rounds=3, local=None, **kw):
    from fedlit.run import federate
    return federate(*digits, method, rounds, local or Local(epochs=2), progress=False, **kw)

@counted
def test_epsilon_is_a_column_and_goes_on_after_a_stop(digits, tmp_path):
    m = DP(clip=.5, noise=3., delta=1e-4)
    whole = run(digits, m, participation=.5)
    assert whole.history.epsilon.tolist() == [epsilon_of(3., t, 1e-4, 8, 4) for t in (1, 2, 3)]
    kw = dict(participation=.5, checkpoint=str(tmp_path/'run'))
    run(digits, m, minutes=0, **kw)
    again = run(digits, m, **kw)
    assert again.history.epsilon.tolist() == whole.history.epsilon.tolist()
    assert all(torch.equal(v, again.state.params[k]) for k, v in whole.state.params.items())

@counted
def test_clients_that_remember_have_no_amplification(digits):
    "What they send depends on when they were drawn, so that the bounds of subsampled rounds do not add up."
    said = lambda m: run(digits, m, 2, participation=.5).history.epsilon.tolist()
    spent = lambda drawn: [epsilon_of(3., t, 1e-5, 8, drawn) for t in (1, 2)]
    for m in DP(clip=.5, noise=3.) + FedDyn(), TopK() + DP(clip=.5, noise=3.), FedPer() + DP(clip=.5, noise=3.):
        assert said(m) == spent(8)
    for m in FedProx(mu=.1), DPSGD(): assert said(m + DP(clip=.5, noise=3.)) == spent(4)

@counted
@pytest.mark.parametrize('how, drawn', [(SGD(kept=True), 8), (Adam(kept=True), 8), (Adam(), 4)], ids=repr)
def test_an_optimiser_that_is_kept_has_no_amplification(digits, how, drawn):
    history = run(digits, DP(clip=.01, noise=3.), 2, Local(optimizer=how, lr=.001), participation=.5).history
    assert history.epsilon.tolist() == [epsilon_of(3., t, clients=8, drawn=drawn) for t in (1, 2)]

def test_running_statistics_at_home_are_allowed(digits):
    from fedlit.models import build
    net = build('mlp', digits[1], norm='batch', seed=0)
    history = run((net, *digits[1:]), DP(clip=.5, noise=3.), 2, statistics='home', participation=.5).history
    assert len(history) == 2
    if COUNTED: assert history.epsilon.tolist() == [epsilon_of(3., t, clients=8) for t in (1, 2)]

@counted
@pytest.mark.parametrize('epsilon, kw', [(.001, dict(rounds=10)), (.0025, dict(rounds=1)),
                                         (.1, dict(rounds=1, delta=.1))], ids=str)
def test_noise_for_a_budget_however_small(epsilon, kw):
    z = noise_for(epsilon, **kw)
    assert epsilon_of(z, **kw) <= epsilon < epsilon_of(.9*z, **kw)

@counted
def test_a_client_spends_only_when_it_takes_part(digits):
    from fedlit.participation import draw_clients
    took, most = [0]*8, []
    for r in range(3):
        for k in draw_clients(8, .25, 0, r): took[k] += 1
        most.append(max(took))
    local = run(digits, DP(clip=.01, noise=3., at='client'), participation=.25).history.epsilon
    assert local.tolist() == [epsilon_of(3., t) for t in most] and most[-1] < 3
    samples = run(digits, DPSGD(clip=.01, noise=3.), participation=.25).history.epsilon
    assert samples.tolist() == [epsilon_of(3., 2*t) for t in most]

@pytest.mark.parametrize('clients, passes, times', [
    ([[0, 1], [2, 3]], [2, 3], 3),                  # disjoint: the client that came most often
    ([[0, 1, 1, 1], [2]], [2, 5], 2*9),             # three copies may be in one batch, and move the sum by 6C
    ([[0, 1], [1, 2], [1]], [2, 3, 4], 2 + 3 + 4),  # at three clients, one Gaussian for each of their epochs
    ([[0, 0, 1], [0, 1, 1]], [1, 1], 5),            # 4 + 1, for either
    ([[0, 0], [0]], [0, 1], 1), ([[0, 0]], [0], 0)], ids=str)
def test_how_often_a_sample_is_looked_at(clients, passes, times):
    assert looks(torch.tensor(passes, dtype=torch.float), [torch.tensor(c) for c in clients]) == times

def spent(mu, delta):
    "The exact epsilon of a Gaussian whose mean moves by `mu` deviations (Balle and Wang, ICML 2018)."
    def over(e): return stats.norm.cdf(mu/2 - e/mu) - math.exp(e)*stats.norm.cdf(-mu/2 - e/mu) - delta
    return optimize.brentq(over, 0, 200)

def test_looks_are_those_of_a_plain_count_and_cost_no_more():
    "Of a million samples it takes less than sorting the pairs of owner and sample once, as it is asked every round."
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        clients = [torch.randint(0, 12, (n,), generator=g) for n in (1, 5, 14, 9)]
        passes = torch.randint(0, 4, (4,), generator=g).float()
        plain = [sum(float(e)*int((c == s).sum())**2 for e, c in zip(passes, clients)) for s in range(12)]
        assert looks(passes, clients) == max(plain)
    clients = torch.randperm(300_000, generator=g).reshape(100, -1)
    began = time.process_time()
    torch.stack([torch.arange(100).repeat_interleave(3000), clients.flatten()]).unique(dim=1)
    pairs = time.process_time() - began
    assert looks(torch.ones(100), list(clients)) == 1 and time.process_time() - began < 1.5*pairs

@counted
@pytest.mark.parametrize('copies', [1, 3, 5])
def test_copies_in_a_batch_add_up(copies):
    "One step by hand: the sum of the clipped gradients moves by 2C for each copy, and epsilon is above the exact one."
    net, z = nn.Linear(1, 1, bias=False), 2.
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = net.double()
        def forward(self, x): return x, self.head(x)
    def ended(sign):
        x = torch.ones(1, 1, 6, 1, dtype=torch.double)
        x[..., :copies, :] *= 1000*sign # the replaced sample, wherever it is
        out = local_phase(Broadcast(DPSGD(clip=.5, noise=0.), Line(), start(DPSGD(), Line(), 1), LR,
                                    criterion=lambda out, y: out.sum()), [0],
                          Batches(x, torch.zeros(1, 1, 6, dtype=torch.long)))
        return out['params']['head.weight'].item()
    moved = abs(ended(1) - ended(-1))*6/LR.lr # of the sum
    assert moved == pytest.approx(2*.5*copies)
    times = looks(torch.ones(1), [torch.tensor([0]*copies + list(range(1, 7 - copies)))])
    assert epsilon_of(z, times) >= spent(moved/(z*.5), 1e-5) > epsilon_of(z, times)*.8
    if copies > 1: assert spent(moved/(z*.5), 1e-5) > epsilon_of(z, 1) # once is too little

@counted
def test_what_a_client_has_twice_or_two_have_costs_more(digits):
    net, task, parts = digits
    def epsilon(clients): return run((net, task, clients), DPSGD(clip=.01, noise=3.), 1).history.epsilon.item()
    thrice = [torch.cat([p, p[:1], p[:1]]) for p in parts]
    assert epsilon(parts) == epsilon_of(3., 2) and epsilon(thrice) == epsilon_of(3., 2*9)
    assert epsilon([parts[0]]*8) == epsilon_of(3., 2*8) >= spent(math.sqrt(16)*2/3, 1e-5)

@counted
@pytest.mark.parametrize('make', [lambda a, b: a + b, lambda a, b: b + a])
def test_clients_and_samples_have_a_column_each(digits, make):
    m = make(DP(clip=.01, noise=4.), DPSGD(clip=.01, noise=3.))
    row = run(digits, m, 1).history.iloc[0]
    assert row.epsilon == epsilon_of(4., 1, clients=8) and row.epsilon_samples == epsilon_of(3., 2)
    none = run(digits, make(DP(clip=.01, noise=0.), DPSGD(clip=.01, noise=3.)), 1).history.iloc[0]
    assert none.epsilon == math.inf > none.epsilon_samples

def test_without_noise_nothing_is_promised(digits):
    assert run(digits, DP(noise=0.), 1).history.epsilon.tolist() == [math.inf]

def test_without_the_accountant_there_is_no_column(digits, monkeypatch):
    monkeypatch.setattr(privacy, 'find_spec', lambda name: None)
    with pytest.warns(UserWarning, match='no column `epsilon`'): history = run(digits, DP(), 1).history
    assert 'epsilon' not in history

def test_without_the_accountant_epsilon_says_what_to_install(monkeypatch):
    import builtins
    real = builtins.__import__
    def missing(name, *args, **kw):
        if name.startswith('dp_accounting'): raise ImportError(name)
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, '__import__', missing)
    with pytest.raises(ImportError, match=r'fedlit\[privacy\]'): epsilon_of(7.77, 3)

# ---- one client's data, through every exported method ----

def published(m, world, other=None, statistics='averaged', executor='loop'):
    """What the first client sends, and what two rounds leave at the server and at all other clients; its images and
    labels and, if `other` is 'size', its number of samples may be others."""
    first, sizes = world.cohort(0)[0], world.sizes.clone()
    def data(r):
        given = {k: v.clone() for k, v in world.data(r).items()}
        for k in [k for k, i in enumerate(world.cohort(r)) if i == first and other]:
            given['x'][k], given['y'][k] = -given['x'][k].flip(0) + .3, 2 - given['y'][k]
            if other == 'size': given['counts'][k], sizes[k] = torch.tensor([2, 0, 0]), 2.
        return given
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # of what a method leaves at home, and of Krum's few clients
        s = start(m, world.model, world.clients, statistics)
        out = local_phase(Broadcast(m, world.model, s, world.local, proxy=world.proxy), [first],
                          Batches(**data(0)).of([0]), executor)
        s = laws.train(m, replace(world, data=data, sizes=sizes), executor, 2, s)
    sent = {k: {n: v for n, v in out[k].items() if n not in s.personal}
            for k in ('params', 'buffers', 'uploads', 'mask')}
    home = tmap(lambda v: v[[k for k in range(world.clients) if k != first]], dict(memory=s.client, home=s.personal))
    return laws.flatten(dict(sent=sent, params=s.params, buffers=s.buffers, server=s.server, **home))

def apart(a, b):
    "The names of what differs, and the largest difference."
    assert set(a) == set(b)
    far = {k: (a[k].double() - v.double()).abs().max().item() for k, v in b.items() if torch.is_tensor(v) and v.numel()}
    return [k for k, v in far.items() if not v < 1e-9], max(far.values())

PRIVATE_NOW = [DP(clip=1e-13, noise=1e13), DP(clip=1e-13, noise=1e13, at='client', per='tensor'),
               DPSGD(clip=1e-13, noise=1e13)]

BESIDE = [name for name in methods_by_name() if name not in ('DP', 'DPSGD', 'DepthFL')] # itself; another network

@pytest.mark.parametrize('private, norm', [*((m, False) for m in PRIVATE_NOW), *((m, True) for m in PRIVATE_NOW[:2])],
                         ids=['server', 'client', 'samples', 'server-norm', 'client-norm'])
@pytest.mark.parametrize('name', BESIDE)
def test_beside_any_method_nothing_of_a_client_is_published(name, private, norm):
    """Before and after any exported method: refused with a reason, or neither the server nor another client notices
    that a client has other data. The noise is that of the seed, so all that differs has gone past the clip. Where there
    is BatchNorm, its statistics are at home."""
    world, statistics = MOVING[norm], 'home' if norm else 'averaged'
    other = methods_by_name()[name](**dict(StructuredDeCov=dict(groups=3), FedDF=dict(steps=2),
                                           FedET=dict(steps=2)).get(name, {}))
    for pair in ((private, other), (other, private)):
        try:
            m = pair[0] + pair[1]
            there = published(m, world, None, statistics)
        except ValueError as e:
            assert len(str(e)) > 60, e
            continue
        change = 'samples' if isinstance(private, DPSGD) else 'size' # of samples, which DPSGD takes to be known
        seen, far = apart(there, published(m, world, change, statistics))
        assert not seen, (m, seen, far)

def test_privacy_goes_with_many():
    "So that the test above is not passed by refusing."
    def goes(a, b):
        try: return bool(a + b)
        except ValueError: return False
    each = [methods_by_name()[n]() for n in BESIDE]
    for private in PRIVATE_NOW: assert sum(goes(private, m) + goes(m, private) for m in each) >= 20

@pytest.mark.parametrize('statistics', STATISTICS)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('private', PRIVATE_NOW[:2], ids=['server', 'client'])
def test_statistics_stay_at_home_or_are_refused(private, executor, statistics):
    m, world = FedBN() + private, MOVING[True]
    if statistics in ('recomputed', 'static'):
        with pytest.raises(ValueError, match="BatchNorm, as in n1, would reach the server"):
            start(m, world.model, world.clients, statistics)
        return
    seen, far = apart(*(published(m, world, other, statistics, executor) for other in (None, 'size')))
    assert not seen, (seen, far)

def told(digits, method, other):
    "What a run's history says where the first client has its data, `other` images and labels, or fewer samples too."
    net, task, parts = digits
    x, y, parts = task.x_train.clone(), task.y_train.clone(), list(parts)
    if other: x[parts[0]], y[parts[0]] = 1 - x[parts[0]], 9 - y[parts[0]]
    if other == 'size': parts[0] = parts[0][:3]
    history = run((net, replace(task, x_train=x, y_train=y), parts), method, 2, bad_clients='report').history
    return history.drop(columns=['seconds', 'peak_mb'], errors='ignore')

@pytest.mark.parametrize('m, other', [(DP(clip=1e-13, noise=0.), 'size'),
                                      (DP(clip=1e-13, noise=0., at='client'), 'size'),
                                      (FedProx() + DP(clip=1e-13, noise=0.) + FedAvgM(), 'size'),
                                      (DPSGD(clip=1e-13, noise=0.), 'samples'), (FedAvg(), 'size')], ids=repr)
def test_the_history_says_nothing_of_a_client(digits, m, other):
    here, there = (told(digits, m, o) for o in ('', other))
    assert here.columns.equals(there.columns) and {'accuracy', 'loss', 'participants'} <= {*here}
    moved = [k for k in here if not here[k].equals(there[k]) and not (here[k] - there[k]).abs().max() < 1e-5]
    sings = {'train_loss', 'drift', 'loss', 'accuracy', 'accuracy_before'}
    assert ({*moved} >= sings - {'accuracy_before'} if m == FedAvg() else not moved), moved
    assert sings & {*here} == (sings if m == FedAvg() else sings - {'train_loss', 'drift'})

def test_clients_own_tests_are_no_part_of_the_promise(digits):
    net, task, parts = digits
    tests = [torch.arange(k, 8*len(parts), len(parts)) for k in range(len(parts))]
    with pytest.warns(UserWarning, match="clients' own tests has no noise, so no promise of DP"):
        run(digits, DP(), 1, tests=tests)

def test_the_canary_sings():
    "Without protection all that can differ does."
    plain, other = (published(SCAFFOLD(), MOVING[False], o) for o in (None, 'samples'))
    seen = apart(plain, other)[0]
    still = {k for k in plain if k not in seen and not k.endswith('/')} # of what is there
    assert still == {'buffers/fixed', 'sent/buffers/fixed'}, still
    for statistics in STATISTICS:
        plain, other = (published(FedBN(), MOVING[True], o, statistics) for o in (None, 'samples'))
        assert ('buffers/n1.running_mean' in apart(plain, other)[0]) == (statistics in ('recomputed', 'static'))

@pytest.mark.parametrize('m', [DP(), DP(at='client'), DPSGD()], ids=repr)
@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads'])
def test_what_no_gradient_moves_stays_as_it_was(m, executor):
    net = MOVING[False].model
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        s = laws.train(m, MOVING[False], executor, 1)
    for k, v in dict(codes=net.codes, centre=net.centre, bright=net.bright, fixed=net.fixed).items():
        assert torch.equal(s.buffers[k], v), k
    said = [str(w.message) for w in said]
    assert isinstance(m, DPSGD) or any("'codes' and 2 more" in t and 'as they were received' in t for t in said), said

class Brightness(Method):
    "A part with a buffer, which the server averages unless it is kept at home."
    home: bool = False
    def init(self, params): return params, {}, {}, dict(bright=torch.zeros(()))
    def keep(self, name): return self.home and name == 'bright'
    def loss(self, x): return 0., dict(bright=x.mean())

@pytest.mark.parametrize('m', [DP(), DP(at='client')], ids=repr)
@pytest.mark.parametrize('add', [lambda m, own: m + own, lambda m, own: own + m])
def test_dp_refuses_a_part_whose_buffer_it_would_hold_still(m, add):
    with pytest.raises(ValueError, match='bright, a buffer that another part'): laws.train(add(m, Brightness()), PLAIN)
    assert laws.train(add(m, Brightness(home=True)), PLAIN).personal['bright'][:].any()

@pytest.mark.parametrize('moved', [[], ['b3'], ['b0', 'b3', 'b5']])
def test_however_many_buffers_there_are_a_device_is_waited_for_once(moved):
    before = {f'b{k}': torch.ones(3) for k in range(6)}
    trained = {k: v.expand(2, 3)*(1 + (k in moved)) for k, v in before.items()}
    with warnings.catch_warnings(record=True) as said, Waits() as waits:
        warnings.simplefilter('always')
        sent = buffers_to_send(DP(), trained, {k: v.expand(2, 3) for k, v in before.items()}, before)
    assert waits.count <= 1 and sent.keys() == trained.keys()
    assert [w.message.args[0].split(' changed')[0] for w in said] == [
        f"'{k}'" + f' and {len(moved) - 1} more'*(len(moved) > 1) for k in moved[:1]]

class Halves(Method):
    "Sends half of the change of the running means."
    def send(self, delta, client, received, buffers):
        means = {k: v for k, v in buffers.items() if k.endswith('mean')}
        return delta, client, {k: (v + received[k])/2 for k, v in means.items()}

def test_buffers_that_are_sent_changed_are_not_said_to_stand_still():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        laws.train(Halves(), laws.small_world(), rounds=1)

class Waits(TorchDispatchMode):
    "Counts what makes the host wait for a device."
    count = 0
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.removeprefix('aten::')
        self.count += name in ('equal', '_local_scalar_dense', 'is_nonzero', '_to_copy')
        return op(*args, **(kwargs or {}))

def test_a_network_that_cannot_be_asked_sample_by_sample_is_named():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.mean = nn.Linear(36, 3).double(), nn.Buffer(torch.zeros(36).double())
        def forward(self, x):
            if self.training: self.mean.lerp_(x.flatten(1).mean(0), .5)
            return x.flatten(1), self.head(x.flatten(1) - self.mean)
    with pytest.raises(ValueError, match='gradient of every sample, .* network or criterion: vmap: .* in place are'):
        laws.train(DPSGD(), replace(PLAIN, model=Alone()), rounds=1)

@counted
@pytest.mark.parametrize('how,epsilon', [('Uniform(0.5)', dict(clients=8, drawn=4)), ('RoundRobin(0.5)', {}),
                                         ('BySize(0.5)', None), ("Available(0.5, ('11111111',))", {}),
                                         ('PowerOfChoice(0.5)', None)])
def test_only_equal_chances_amplify(digits, how, epsilon):
    from fedlit import participation
    how = eval(how, vars(participation))
    history = run(digits, DP(clip=.01, noise=3.), 2, participation=how).history
    assert history.epsilon.tolist() == [math.inf if epsilon is None else epsilon_of(3., t, **epsilon) for t in (1, 2)]
    samples = run(digits, DPSGD(clip=.01, noise=3.), 1, participation=how).history.epsilon.item()
    assert (samples == math.inf) == isinstance(how, participation.PowerOfChoice) # sizes are known, losses are not

@counted
def test_who_is_left_out_hides_no_one_else(digits):
    "`without` makes rounds smaller, and the chance to take part no smaller."
    left = run(digits, DP(clip=.01, noise=3.), 2, participation=.5, without=(1,)).history.epsilon
    assert left.tolist() == [epsilon_of(3., t, clients=8, drawn=4) for t in (1, 2)]

@pytest.mark.parametrize('m', [PerFedAvg(), pFedMe()], ids=repr)
def test_no_order_is_advised_that_is_refused_too(m):
    for make in (lambda: DPSGD() + m, lambda: m + DPSGD()):
        with pytest.raises(ValueError, match='looks at samples by itself'): make()

NONSENSE = [(partial(epsilon_of, noise=1., rounds=3, clients=5), [
    dict(rounds=-1), dict(rounds=2.5), dict(noise='1'), dict(noise=-1), dict(delta=2), dict(delta='x'),
    dict(drawn=0), dict(drawn=9), dict(sampling='shuffle')]), (partial(noise_for, epsilon=8, rounds=20), [
    dict(rounds=0), dict(epsilon='8'), dict(epsilon=0.), dict(epsilon=math.inf), dict(delta=0)])]

@pytest.mark.parametrize('ask, wrong', [(ask, wrong) for ask, each in NONSENSE for wrong in each],
                         ids=lambda v: str(v) if isinstance(v, dict) else v.func.__name__)
def test_what_cannot_be_counted_is_named(ask, wrong):
    (name, value), = wrong.items()
    if name in ('drawn', 'sampling') and not COUNTED: pytest.skip('dp-accounting is not there')
    with pytest.raises(ValueError, match=f'{name}={value!r}'): ask(**wrong)
