"A network for each client: Ditto, APFL, pFedMe, Per-FedAvg, FedProto, FedRoD, FedALA, FedAMP, IFCA, FedPAC, by hand."
import copy
import itertools, warnings
import pytest, torch
from dataclasses import replace
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from fedlit.data import load
from fedlit.local import Adam, Local
from fedlit.method import Method, asks_for, overrides, replaces
from fedlit.methods import (
    APFL, Ditto, FedALA, FedAMP, FedAS, FedAvg, FedBABU, FedCAC, FedDecorr, FedDF, FedMD, FedPAC, FedPer,
    FedProto, FedProx, FedDBE, FedNTD, FedRoD, IFCA, MaskedCE, MOON, PerFedAvg, pFedMe, SOLO)
from fedlit.methods.fedamp import attention
from fedlit.models import build
from fedlit.batches import Batches
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.server import deploy_network, end_state, network_for
from fedlit.state import pure, start
from fedlit.result import Run
from fedlit.run import federate
from by_hand import SIZES, averaged, batches, classifier, descend, gap
from federation import train

DATA = batches(samples=6)
ROUNDS = [0, 1, 2], [2, 0], [1, 2]   # who takes part; the third client takes a single step
LOCAL = Local(lr=.1, momentum=.9, weight_decay=.01)

def federation(method, rounds=ROUNDS, local=LOCAL, norm=True, executor='loop', data=DATA, proxy=None):
    "The state after some rounds of fedlit."
    net = classifier(norm)
    state = start(method, net, 3)
    for who in rounds:
        state = fed_round(Broadcast(method, net, state, local, proxy=proxy), who, {k: v[who] for k, v in data.items()},
                          SIZES[who], executor)
    return state

def sgd(net, local=LOCAL, **kw):
    return torch.optim.SGD(net.parameters(), **dict(lr=local.lr, momentum=local.momentum,
                                                    weight_decay=local.weight_decay, **kw))

def steps(k, data=DATA):
    "The batches of client `k`."
    return [(data['x'][k, t], data['y'][k, t]) for t in range(int(data['counts'][k].sum()))]

def points(net): return [p.detach().clone() for p in net.parameters()]

def same(state, net, own=None, limit=1e-10):
    "The server's network is `net`, and the clients' second ones are `own`."
    assert gap(net.state_dict(), {**state.params, **state.buffers} if not own else
               {n: v for n, v in {**state.params, **state.buffers}.items() if not n.startswith('own.')}) < limit
    for k, v in enumerate(own or []):
        assert gap({n: state.personal[f'own.{n}'][k].double() for n in v.state_dict()},
                   {n: t.double() for n, t in v.state_dict().items()}) < limit, k

# ---- Ditto ----

def ditto(lam, own_lr, norm=True):
    w = classifier(norm)
    own = [copy.deepcopy(w) for _ in range(3)]
    for who in ROUNDS:
        sent, ends = points(w), []
        for k in who:
            g, v = copy.deepcopy(w), own[k]
            for_g = sgd(g)
            for_v = torch.optim.SGD(v.parameters(), lr=own_lr, momentum=.9, weight_decay=.01)
            for x, y in steps(k):
                for net, opt, term in ((g, for_g, 0.), (v, for_v, lam/2)):
                    spring = sum((p - q).square().sum() for p, q in zip(net.parameters(), sent))
                    descend(opt, F.cross_entropy(net(x)[1], y) + term*spring)
            ends.append(g)
        averaged(w, ends, who)
    return w, own

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('lam,lr', [(0., 0.), (.7, 0.), (.7, .03)])
def test_ditto(lam, lr, executor): same(federation(Ditto(lam, lr), executor=executor), *ditto(lam, lr or .1))

def test_a_client_of_ditto_uses_its_own_network_and_the_server_the_common_one():
    state = federation(Ditto())
    for k in (None, 0, 2):
        params, buffers = network_for(Ditto(), state, k)
        from_own = {n: state.personal[f'own.{n}'][k] for n in params} if k is not None else state.params
        assert not any(n.startswith('own.') for n in params)
        assert all(torch.equal(v, from_own[n]) for n, v in params.items())
        mean = 'norm.running_mean'
        assert torch.equal(buffers[mean], state.buffers[mean] if k is None else state.personal[f'own.{mean}'][k])

# ---- FedProto ----

def fedproto(lam, form, norm=True):
    nets, known = [classifier(norm) for _ in range(3)], {}
    for who in ROUNDS:
        sent = {}
        for k in who:
            net, opt = nets[k].train(), sgd(nets[k])
            for x, y in steps(k):
                z, out = net(x)
                loss = F.cross_entropy(out, y)
                for i, c in enumerate(y.tolist()):
                    if c in known: loss = loss + lam*(z[i] - known[c]).square().sum()/z.numel()
                descend(opt, loss)
            x, y = (torch.cat(v) for v in zip(*steps(k)))
            with torch.no_grad(): z = net.eval()(x)[0]
            for c in set(y.tolist()): sent.setdefault(c, []).append((z[y == c].mean(0), int((y == c).sum())))
        for c, each in sent.items():
            n = [m if form == 'paper' else 1 for _, m in each]
            known[c] = sum(v*m for (v, _), m in zip(each, n))/sum(n)
    return nets, known

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('form', ['released', 'paper'])
def test_fedproto(form, executor):
    m, local = FedProto(lam=2., form=form), Local(epochs=1, lr=.1, momentum=.9, weight_decay=.01)
    state, (nets, known) = federation(m, local=local, executor=executor), fedproto(2., form)
    for c, v in known.items(): assert (state.server['FedProto']['means'][c] - v).abs().max() < 1e-10
    for k, net in enumerate(nets):
        assert gap({n: v[k].double() for n, v in state.personal.items()},
                   {n: v.double() for n, v in net.state_dict().items()}) < 1e-10
    assert len(known) == 2 and all(torch.equal(state.params[n], v) for n, v in classifier(True).named_parameters())

def test_samples_stay_at_the_client():
    "What `done` sees is no part of what it sends; it is asked client by client, and only where it asks."
    seen = []
    class Looks(Method):
        def done(self, client, data):
            seen.append(tuple(data[0].shape))
            return client, dict(mean=data[0].mean())
    class Blind(Method):
        def done(self, client): return client, {}
    net, asked = classifier(), []
    class Counting(Batches):
        def data(self, *args):
            asked.append(args)
            return super().data(*args)
    for m, n in ((Looks(), 3), (Blind(), 0)):
        out = local_phase(Broadcast(m, net, start(m, net, 3), Local(epochs=1)), [0, 1, 2], Counting(**DATA), 'vmap')
        assert len(asked) == n and all(v.shape == (3,) for v in out['uploads'].get('Looks', {}).values())
        asked.clear()
    assert sorted(seen[-3:]) == [(6, 3), (18, 3), (18, 3)] # those before are of the trial

# ---- APFL ----

def apfl(alpha, learn, norm=True):
    w = classifier(norm)
    own, alphas = [copy.deepcopy(w) for _ in range(3)], [alpha]*3
    for who in ROUNDS:
        ends = []
        for k in who:
            g, v, mixed = copy.deepcopy(w), own[k], copy.deepcopy(own[k])
            for_g, for_v = sgd(g), sgd(v)
            for x, y in steps(k):
                with torch.no_grad():
                    for m, a, b in zip(mixed.parameters(), v.parameters(), g.parameters()):
                        m.copy_(alphas[k]*a + (1 - alphas[k])*b)
                mixed.zero_grad()
                F.cross_entropy(mixed(x)[1], y).backward()
                slope = sum(((a - b)*m.grad).sum().item()
                            for m, a, b in zip(mixed.parameters(), v.parameters(), g.parameters()))
                for m, a in zip(mixed.parameters(), v.parameters()): a.grad = alphas[k]*m.grad
                descend(for_g, F.cross_entropy(g(x)[1], y))
                for_v.step()
                if learn: alphas[k] = min(1., max(0., alphas[k] - .1*slope))
            for n, b in mixed.named_buffers(): v.get_buffer(n).copy_(b)
            ends.append(g)
        averaged(w, ends, who)
    return w, own, alphas

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('alpha,learn', [(.4, True), (.02, True), (.4, False), (0., False)])
def test_apfl(alpha, learn, executor):
    state, (w, own, alphas) = federation(APFL(alpha, learn), executor=executor), apfl(alpha, learn)
    state.buffers.pop('alpha')
    same(state, w, own)
    assert (state.personal['alpha'][:] - torch.tensor(alphas, dtype=torch.double)).abs().max() < 1e-10
    assert (len(set(alphas)) == 3) == learn

@pytest.mark.parametrize('m, name', [(APFL(), 'alpha'), (FedDBE(), 'feature_mean')], ids=['APFL', 'FedDBE'])
@pytest.mark.parametrize('add', ['register_parameter', 'register_buffer'])
def test_a_part_does_not_take_the_name_of_a_tensor_of_the_network(m, name, add):
    "With a parameter `alpha`, the network would compute with APFL's weight in its place."
    net = classifier()
    getattr(net, add)(name, nn.Parameter(torch.ones(())) if add == 'register_parameter' else torch.ones(()))
    with pytest.raises(ValueError, match=f'{m.name} adds {name!r}, but there is a tensor of that name already'):
        start(m, net, 3)
    assert start(FedAvg(), net, 3)

def apfl_of_outputs(alpha, learn, norm=True):
    w = classifier(norm)
    own, alphas = [copy.deepcopy(w) for _ in range(3)], [torch.tensor(alpha, dtype=torch.double) for _ in range(3)]
    for who in ROUNDS:
        ends = []
        for k in who:
            g, v = copy.deepcopy(w), own[k]
            for_g, for_v = sgd(g), sgd(v)
            for x, y in steps(k):
                a = alphas[k].clone().requires_grad_()
                common = g(x)[1]
                for optimizer in (for_g, for_v): optimizer.zero_grad()
                (F.cross_entropy(common, y) + F.cross_entropy(a*v(x)[1] + (1 - a)*common.detach(), y)).backward()
                for optimizer in (for_g, for_v): optimizer.step()
                if learn: alphas[k] = (alphas[k] - .1*a.grad).clamp(0, 1)
            ends.append(g)
        averaged(w, ends, who)
    return w, own, torch.stack(alphas)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('alpha,learn', [(.4, True), (.02, True), (.4, False), (0., False)])
def test_apfl_of_outputs(alpha, learn, executor):
    method = APFL(alpha, learn, mix='outputs')
    state, (w, own, alphas) = federation(method, executor=executor), apfl_of_outputs(alpha, learn)
    at = deploy_network(method, state, 1, model=w)[1]
    x, _ = steps(1)[0]
    for net in (w, *own): net.eval()
    z, common = w(x)
    assert (at(common, z, x) - (alphas[1]*own[1](x)[1] + (1 - alphas[1])*common)).abs().max() < 1e-10
    assert torch.equal(deploy_network(method, state, model=w)[1](common, z, x), common)
    state.buffers.pop('alpha')
    same(state, w, own)
    assert (state.personal['alpha'][:] - alphas).abs().max() < 1e-10
    assert (len(set(alphas.tolist())) == 3) == learn

@pytest.mark.parametrize('alpha', [.4, 1.])
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_apfl_of_outputs_leaves_out_the_classes_that_are_left_out(alpha, executor):
    method = APFL(alpha, mix='outputs') + MaskedCE(fill='inf')
    state = federation(method, executor=executor, data=dict(DATA, y=torch.zeros_like(DATA['y'])))
    assert all(v.isfinite().all() for v in state.params.values())
    assert all(v[:].isfinite().all() for v in state.personal.values())

# ---- FedRoD ----

def fedrod(norm=True):
    w, own = classifier(norm), [nn.Linear(5, 2).double() for _ in range(3)]
    for p in own:
        for v in p.parameters(): nn.init.zeros_(v)
    for who in ROUNDS:
        ends = []
        for k in who:
            g, p = copy.deepcopy(w), own[k]
            for_g, for_p = sgd(g), sgd(p)
            prior = torch.cat([y for _, y in steps(k)]).bincount(minlength=2).double().log()
            for x, y in steps(k):
                z, out = g(x)
                personal = F.cross_entropy(out.detach() + p(z.detach()), y)
                for opt, loss in ((for_g, F.cross_entropy(out + prior, y)), (for_p, personal)):
                    opt.zero_grad()
                    loss.backward()
                for opt in (for_g, for_p): opt.step()
            ends.append(g)
        averaged(w, ends, who)
    return w, own

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_fedrod(executor):
    state, (w, own) = federation(FedRoD(), executor=executor), fedrod()
    same(replace(state, params={k: v for k, v in state.params.items() if not k.startswith('own.')}), w)
    for k, p in enumerate(own):
        ours = {n: state.personal[f'own.head.{n}'][k] for n in ('weight', 'bias')}
        assert gap(ours, dict(p.named_parameters())) < 1e-10
    x, k = DATA['x'][0, 0], 1
    z, out = w.eval()(x)
    assert torch.allclose(pure(w)(*network_for(FedRoD(), state, k), x, False)[1], out + own[k](z), atol=1e-10)
    assert torch.allclose(pure(w)(*network_for(FedRoD(), state), x, False)[1], out, atol=1e-10)

def test_counts_are_those_of_the_samples_that_are_visited():
    seen = []
    class Counts(Method):
        def done(self, client, counts, labels):
            seen.append((counts.tolist(), labels.tolist()))
            return client, {}
    net = classifier()
    local_phase(Broadcast(Counts(), net, start(Counts(), net, 3), Local()), [0, 1, 2], Batches(**DATA))
    want = [torch.cat([y for _, y in steps(k)]).bincount(minlength=2) for k in range(3)]
    assert sorted(seen) == sorted((w.tolist(), (w > 0).tolist()) for w in want)

# ---- pFedMe ----

def pfedme(lam, inner, lr, beta, norm=True, term=lambda z: 0.):
    w, own = classifier(norm), [classifier(norm) for _ in range(3)]
    for who in ROUNDS:
        before, ends = {n: v.clone() for n, v in w.named_parameters()}, []
        for k in who:
            g, theta = copy.deepcopy(w), own[k]
            for_g = sgd(g)
            with torch.no_grad():
                for p, q in zip(theta.parameters(), g.parameters()): p.copy_(q)
            for x, y in steps(k):
                g(x)                               # the common network's running statistics
                for _ in range(inner):
                    theta.zero_grad()
                    z, out = theta(x)
                    (F.cross_entropy(out, y) + term(z)).backward()
                    with torch.no_grad():
                        for p, q in zip(theta.parameters(), g.parameters()): p -= lr*(p.grad + lam*(p - q))
                for p, q in zip(theta.parameters(), g.parameters()): q.grad = lam*(q - p).detach()
                for_g.step()
            ends.append(g)
        averaged(w, ends, who)
        with torch.no_grad():
            for n, v in w.named_parameters(): v.copy_((1 - beta)*before[n] + beta*v)
    return w, own

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('lam,inner,lr,beta', [(5., 3, .05, 1.), (2., 1, .1, .5)])
def test_pfedme(lam, inner, lr, beta, executor):
    state = federation(pFedMe(lam, inner, lr, beta), executor=executor)
    w, own = pfedme(lam, inner, lr, beta)
    state = replace(state, buffers={k: v for k, v in state.buffers.items() if k != 'own:steps'})
    same(state, w, own)
    assert state.personal['own:steps'][:].tolist() == [6, 6, 3]

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_pfedme_counts_on_in_bfloat16(executor): # whose next number after 256 is 258
    net, data = classifier(False).bfloat16(), batches(steps=(258,), samples=1)
    told = Broadcast(pFedMe(steps=1), net, start(pFedMe(), net, 1), LOCAL)
    state = fed_round(told, [0], {**data, 'x': data['x'].bfloat16()}, SIZES[:1], executor)
    assert state.personal['own:steps'][:].tolist() == [258]

def test_the_inner_problem_of_pfedme_has_the_terms_of_other_methods():
    class Tame(Method):
        def loss(self, features): return .3*features.square().mean()
    state = federation(pFedMe(5., 2, .05) + Tame())
    w, own = pfedme(5., 2, .05, 1., term=lambda z: .3*z.square().mean())
    same(replace(state, buffers={k: v for k, v in state.buffers.items() if k != 'own:steps'}), w, own)

# ---- Per-FedAvg ----

def perfedavg(alpha, form, delta):
    w = classifier(False)
    def slope(net, x, y):
        return torch.autograd.grad(F.cross_entropy(net(x)[1], y), list(net.parameters()))
    def moved(net, way, far):
        new = copy.deepcopy(net)
        with torch.no_grad():
            for p, d in zip(new.parameters(), way): p += far*d
        return new
    for who in ROUNDS:
        ends = []
        for k in who:
            g = copy.deepcopy(w)
            opt = sgd(g)
            for x, y in steps(k):
                cut = [(x[i:i+n], y[i:i+n]) for n in [3 if form == 'fo' else 2] for i in range(0, 6, n)]
                meta = slope(moved(g, slope(g, *cut[0]), -alpha), *cut[1])
                if form == 'hf':
                    ahead, behind = (slope(moved(g, meta, d), *cut[2]) for d in (delta, -delta))
                    meta = [m - alpha*(a - b)/(2*delta) for m, a, b in zip(meta, ahead, behind)]
                for p, m in zip(g.parameters(), meta): p.grad = m
                opt.step()
            ends.append(g)
        averaged(w, ends, who)
    x, y = (torch.cat(v) for v in zip(*steps(1)))
    return w, moved(w, slope(w, x, y), -alpha), (x, y)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('form', ['fo', 'hf'])
def test_perfedavg(form, executor):
    m = PerFedAvg(alpha=.2, form=form, delta=1e-2)
    state, (w, adapted, data) = federation(m, norm=False, executor=executor), perfedavg(.2, form, 1e-2)
    same(state, w)
    params, _ = network_for(m, state, 1, data, classifier(False))
    assert gap(dict(adapted.named_parameters()), params) < 1e-10
    with pytest.raises(ValueError, match='makes the network of client 1 from its samples'): network_for(m, state, 1)

def test_personal_columns_are_of_adapted_networks():
    "The columns of a run against networks that are adapted by hand, before, after training, and after averaging."
    task = load('digits').subset(200, seed=0)
    parts, m = [torch.arange(60), torch.arange(60, 160)], PerFedAvg(alpha=.5, steps=2)
    net = build('mlp', task, seed=0, norm='none')
    tests = [torch.arange(0, 40), torch.arange(40, 90)]
    run = federate(net, task, parts, m, 1, Local(epochs=1), tests=tests, keep_locals=True, progress=False)
    def score(params, k):
        new = copy.deepcopy(net)
        new.load_state_dict(params)
        for _ in range(2):
            x, y = task.normalise(task.x_train[parts[k]]), task.y_train[parts[k]]
            grads = torch.autograd.grad(F.cross_entropy(new(x)[1], y), list(new.parameters()))
            with torch.no_grad():
                for p, g in zip(new.parameters(), grads): p -= .5*g
        out = new(task.normalise(task.x_test[tests[k]]))[1].argmax(1)
        return (out == task.y_test[tests[k]]).double().mean().item()
    ended = run.locals['params']
    seen = dict(personal_before=[score(net.state_dict(), k) for k in (0, 1)],
                personal=[score(run.state.params, k) for k in (0, 1)],
                personal_after=[score({n: v[k] for n, v in ended.items()}, k) for k in (0, 1)])
    for column, values in seen.items(): assert run.history[column].iloc[-1] == pytest.approx(sum(values)/2, abs=1e-9)
    each = run.per_client(task, tests)
    run.origin = None # as if from a file
    assert each.equals(run.per_client(task, tests, clients=parts))
    with pytest.raises(ValueError, match='from its samples; pass clients'): run.per_client(task, tests)
    assert each.personal.tolist() == pytest.approx(seen['personal'], abs=1e-9)

@pytest.mark.parametrize('m', [FedCAC(share=0.), FedAS(lr=.1, batch=4), IFCA(), FedALA()], ids=lambda m: m.name)
def test_what_has_just_been_trained_is_used_as_it_is(m):
    "It is not moved once more to where a client would begin."
    net, who = classifier(True), [2, 0]
    state = federation(m, ROUNDS[:1])
    out = local_phase(Broadcast(m, net, state, LOCAL), who, Batches(**{k: v[who] for k, v in DATA.items()}))
    for i, k in enumerate(who):
        own = {n: v[i] for tree in ('params', 'buffers') for n, v in out[tree].items()}
        if m.name == 'IFCA':
            at = f"cluster{out['client']['IFCA']['cluster'][i]}."
            own |= {n.removeprefix(at): v[i] for n, v in out['params'].items() if n.startswith(at)}
        params, buffers = deploy_network(m, end_state(state, out), i, tuple(map(torch.cat, zip(*steps(k)))), net,
                                         number=k)[0]
        assert gap(own, {n: v for n, v in {**params, **buffers}.items() if n in net.state_dict()}) == 0

@pytest.mark.parametrize('one, other', [
    (FedALA(eta=.3), Ditto()), (FedAS(lr=.1, batch=4), Ditto()), (FedALA(eta=.3), pFedMe(lr=.01)),
    (FedAS(lr=.1, batch=4), APFL()), (FedALA(eta=.3), FedRoD()), (FedALA(eta=.3), PerFedAvg(alpha=.2)),
    (FedALA(eta=.3), FedBABU(steps=1)), (Ditto(), PerFedAvg(alpha=.2))], ids=lambda m: m.name)
def test_a_network_for_use_is_made_in_the_order_of_training(one, other):
    "First what moves a client before its first step, then what puts another network in place, then what tunes it."
    nets = []
    for m in (one + other, other + one):
        state, data = federation(m, norm=False), tuple(map(torch.cat, zip(*steps(1))))
        nets.append(network_for(m, state, 1, data, classifier(False))[0])
    assert gap(*nets) < 1e-12 and (not isinstance(other, (Ditto, pFedMe)) or gap(
        {n: state.personal[f'own.{n}'][1] for n in nets[0]}, nets[0]) == 0)

@pytest.mark.parametrize('m', [PerFedAvg(alpha=.5), FedALA(), IFCA()], ids=lambda m: m.name)
def test_a_run_from_a_file_makes_clients_networks_with_its_own_criterion(m, tmp_path):
    task, parts = load('digits').subset(160, seed=0, test=90), [torch.arange(60), torch.arange(60, 160)]
    tests = [torch.arange(0, 40), torch.arange(40, 90)]
    def go(criterion):
        run = federate(build('mlp', task, seed=0), task, parts, m, 1, Local(epochs=1), tests=tests, progress=False,
                       criterion=criterion)
        run.save(tmp_path/'run')
        return run.per_client(task, tests), Run.load(tmp_path/'run')
    own = F.cross_entropy, nn.CrossEntropyLoss(weight=torch.tensor([30.] + [1.]*9))
    for criterion in own:
        each, there = go(criterion)
        assert each.equals(there.per_client(task, tests, clients=parts, criterion=criterion))
    with pytest.raises(ValueError, match=f'{m.name} makes .* not the usual one, cross_entropy; pass criterion'):
        there.per_client(task, tests, clients=parts)
    each, there = go(None)
    assert each.equals(there.per_client(task, tests, clients=parts))
    w = there.without(1, task=task, clients=parts, model=build('mlp', task, seed=0), tests=tests)
    assert w.clients()['global'].equals(each['global'])

def test_what_makes_the_gradient_anew_comes_before_what_corrects_it():
    a, b = (train(m, rounds=2) for m in (FedProx(mu=.5) + PerFedAvg(alpha=.1), PerFedAvg(alpha=.1) + FedProx(mu=.5)))
    none = train(PerFedAvg(alpha=.1), rounds=2)
    assert all(torch.equal(v, b.params[k]) for k, v in a.params.items())
    assert gap(a.params, none.params) > 1e-3

# ---- FedALA ----

def fedala(eta, most, batch, rounds=ROUNDS):
    w, last, weights, learned = classifier(True), {}, {}, set()
    def mixture(k):
        "The network that client `k` begins with; its weights are learned on all samples, in the order of `order`."
        new = copy.deepcopy(w)
        if k not in last: return new, weights.get(k)
        W = weights.get(k) or {n: torch.ones_like(v) for n, v in last[k].items()}
        x, y = (torch.cat(v) for v in zip(*steps(k)))
        full, losses = len(y)//batch*batch or len(y), []
        for _ in range(1 if k in learned else most):
            for i in range(0, full, batch):
                net = copy.deepcopy(w).train()
                with torch.no_grad():
                    for n, v in last[k].items(): net.get_parameter(n).copy_(v + (w.get_parameter(n) - v)*W[n])
                loss = F.cross_entropy(net(x[:full][i:i+batch])[1], y[:full][i:i+batch])
                loss.backward()
                W = {n: (v - eta*net.get_parameter(n).grad*(w.get_parameter(n) - last[k][n]).detach()).clamp(0, 1)
                     for n, v in W.items()}
            losses.append(loss.item())
            if len(losses) > 10 and torch.tensor(losses[-10:]).double().std(correction=0) < .1: break
        with torch.no_grad():
            for n, v in last[k].items(): new.get_parameter(n).copy_(v + (w.get_parameter(n) - v)*W[n])
        return new, W
    for who in rounds:
        ends = []
        for k in who:
            g, W = mixture(k)
            if k in last:
                weights[k] = W
                learned.add(k)
            opt = sgd(g)
            for x, y in steps(k):
                descend(opt, F.cross_entropy(g(x)[1], y))
            ends.append(g)
        for k, g in zip(who, ends): last[k] = {n: v.detach().clone() for n, v in g.head.named_parameters(prefix='head')}
        averaged(w, ends, who)
    return w, weights, mixture

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('most,batch', [(30, 6), (3, 18)])
def test_fedala(most, batch, executor, monkeypatch):
    "With all samples in their own order, so that the loop by hand can look at the same batches."
    monkeypatch.setattr(torch, 'randperm', lambda n, generator=None: torch.arange(n))
    m, local = FedALA(eta=3., share=1., batch=batch, most=most), Local(epochs=1, lr=.1, momentum=.9, weight_decay=.01)
    rounds = (*ROUNDS, [0, 1, 2])
    state, (w, weights, mixture) = federation(m, rounds, local, executor=executor), fedala(3., most, batch, rounds)
    same(state, w)
    for k, W in weights.items():
        for n, v in W.items(): assert (state.client['FedALA']['weights'][n][k] - v).abs().max() < 1e-9
    assert any(((v > 0) & (v < 1)).any() for W in weights.values() for v in W.values())
    data = tuple(torch.cat(v) for v in zip(*steps(2)))
    params, _ = network_for(m, state, 2, data, classifier(True))
    assert gap(dict(mixture(2)[0].named_parameters()), params) < 1e-9

@pytest.mark.parametrize('size,share', [(2, .8), (3, .1)])
def test_fedala_looks_at_two_samples_where_there_are_two_as_batchnorm_needs(size, share):
    task, clients = load('digits'), [torch.arange(20), torch.arange(20, 20+size)]
    run = federate(build('mlp', task, hidden=(8,), features=4, norm='batch', seed=0), task, clients,
                   FedALA(share=share), rounds=2, local=Local(epochs=1), progress=False)
    assert run.state.client['FedALA']['learned'].tolist() == [1., 1.]
    def seen(n, share):
        return sum(len(y) for _, y in FedALA(share=share)._batches((torch.zeros(n, 1), torch.zeros(n)), None))
    assert [seen(1, share), seen(size, share), seen(20, .8)] == [1, 2, 16]

def test_begin_is_refused_in_a_sentence_where_it_is_wrong():
    class Half(Method):
        def begin(self, params, client): return {k: v for k, v in params.items() if 'head' in k}, client
    class One(Method):
        def begin(self, params): return params
    class Remembers(Method):
        def begin(self, params): return params, dict(n=torch.zeros(()))
    for m, said in ((Half(), 'returned nothing for body.bias and 3 more; begin with {\\*\\*params, ...}'),
                    (One(), 'must return two dictionaries: parameters'),
                    (Remembers(), 'a memory with n, but `init` made none')):
        with pytest.raises(TypeError, match=said): federation(m)

def test_where_clients_begin_is_not_where_the_server_is():
    "What a client sends is measured from what it received, not from where it began."
    class Shift(Method):
        def begin(self, params, client): return {k: v + 1 for k, v in params.items()}, client
        def grad(self, grads): return {k: 0*g for k, g in grads.items()}
    for executor in ('loop', 'vmap'):
        state = federation(Shift(), [[0, 1]], Local(lr=.1, momentum=0.), executor=executor)
        for n, v in classifier(True).named_parameters(): assert torch.allclose(state.params[n], v + 1, atol=1e-12)

# ---- tensors of a method's own ----

@pytest.mark.parametrize('hook', ['loss', 'grad'])
def test_buffers_of_a_methods_own(hook):
    "They are set step by step, stay at home if the method keeps them, and the network never sees them."
    class Counts(Method):
        def init(self, params): return params, {}, {}, {'count': torch.zeros(())}
        def keep(self, name): return name == 'count'
    class InLoss(Counts):
        def loss(self, buffers): return 0., dict(count=buffers['count'] + 1)
    class InGrad(Counts):
        def grad(self, grads, buffers): return grads, dict(count=buffers['count'] + 1)
    m = InLoss() if hook == 'loss' else InGrad()
    for executor in ('loop', 'vmap'):
        state = federation(m, executor=executor)
        assert state.personal['count'][:].tolist() == [6, 6, 3] and state.buffers['count'] == 0
        fed = federation(FedAvg(), executor=executor)
        assert all(torch.allclose(state.params[k], v, atol=1e-12) for k, v in fed.params.items())

@pytest.mark.parametrize('m', [FedAS(), MOON(), FedALA(), IFCA()], ids=lambda m: m.name)
def test_what_a_part_remembers_of_the_buffers_is_without_those_that_come_later(m):
    class Counts(Method):
        def init(self, params): return params, {}, {}, {'count': torch.zeros(())}
        def loss(self, buffers): return 0., dict(count=buffers['count'] + 1)
    for both in (m + Counts(), Counts() + m): assert federation(both).buffers['count'] > 0

@pytest.mark.parametrize('hook,signature,answer', [('loss', '', '0.'), ('grad', 'grads', 'grads'),
                                                   ('send', 'delta, client', 'delta, client'),
                                                   ('begin', 'params, client', 'params, client')])
def test_a_buffer_that_is_not_there_is_refused(hook, signature, answer):
    space = dict(Method=Method)
    exec(f'class Mine(Method):\n    def {hook}(self, {signature}): return {answer}, dict(nope=0)', space)
    with pytest.raises(TypeError, match='the buffer nope, which is not there; `init` may return it'):
        federation(space['Mine']())
    exec(f'class Mine(Method):\n    def {hook}(self, {signature}): return {answer}, 1, 2', space)
    with pytest.raises(TypeError, match=r'[34] values \(.*\), but .* of buffers'):
        federation(space['Mine']())

# ---- a hook that its settings leave idle

def test_ditto_at_one_rate_trains_with_adam():
    adam = dict(local=Local(epochs=1, batch_size=32, lr=.01, optimizer=Adam()), rounds=1)
    soft, stiff = (train(Ditto(lam), **adam).personal for lam in (.1, 10.))
    assert any((u[:] != v[:]).any() for u, v in zip(soft.values(), stiff.values()))
    with pytest.raises(ValueError, match='reckons with the length'): train(Ditto(lr=.02), **adam)

def test_an_idle_hook_is_as_if_it_were_not_there():
    class Half(Method):
        on: bool = True
        alone = 'loss',
        @property
        def idle(self): return () if self.on else ('loss', 'grad')
        def loss(self, x): return x.sum()*0
        def grad(self, params): return params
    assert overrides(Half(), 'loss') and not overrides(Half(on=False), 'loss')
    assert asks_for(Half(), 'grad', 'params') and not asks_for(Half(on=False), 'grad', 'params')
    assert replaces(Half()) and not replaces(Half(on=False))
    with pytest.raises(ValueError, match='to decide `loss` alone'): Half() + FedDecorr()
    assert FedAvg() + Half(on=False) == Half(on=False)

@pytest.mark.parametrize('m', [FedALA(batch=1), FedMD(batch_size=1), FedDF(batch_size=1)], ids=repr)
def test_a_batch_too_small_for_batchnorm_is_the_methods_own(m):
    with pytest.raises(ValueError, match=f'on a single sample.*; give {m.name} larger batches'):
        federation(m, proxy=DATA['x'].flatten(0, 2))

def test_fedala_has_no_more_layers_than_the_network():
    with pytest.raises(ValueError, match='layers=99, but the clients have'): train(FedALA(layers=99), rounds=1)

@pytest.mark.parametrize('other,last', [(Ditto(), 'head'), (APFL(), 'head'), (FedDBE(), 'head'), (FedPer(), 'body')],
                         ids=lambda v: v if isinstance(v, str) else v.name)
def test_fedala_mixes_the_last_layer_that_is_common(other, last):
    "What stays at home comes from nobody else, so mixing it would change nothing."
    net = classifier(False)
    each = start(FedALA() + other, net, 3).client['FedALA']['last']
    assert each.keys() == {k for k in net.state_dict() if k.startswith(last)}
    with pytest.raises(ValueError, match='layers=1, but the clients have 0 in common'): start(FedALA() + SOLO(), net, 3)

# ---- FedAMP ----

def fedamp(alpha, sigma, lam, norm=True):
    nets, clouds = ([classifier(norm) for _ in range(3)] for _ in range(2))
    for who in ROUNDS:
        for k in who:
            net, opt = nets[k].train(), sgd(nets[k])
            for x, y in steps(k):
                far = sum((p - q.detach()).square().sum() for p, q in zip(net.parameters(), clouds[k].parameters()))
                descend(opt, F.cross_entropy(net(x)[1], y) + lam/(2*alpha)*far)
        ends = {k: torch.cat([p.flatten() for p in points(nets[k])]) for k in who}
        for i in who:
            share = {j: alpha/sigma*float(torch.exp(-(ends[i] - ends[j]).square().sum()/sigma)) for j in who if j != i}
            mixed = ends[i]*(1 - sum(share.values())) + sum(s*ends[j] for j, s in share.items())
            nn.utils.vector_to_parameters(mixed, clouds[i].parameters())
    return nets, clouds

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('alpha,sigma,lam', [(1., 10., .1), (.3, .8, 2.)])
def test_fedamp(alpha, sigma, lam, executor):
    state, (nets, clouds) = federation(FedAMP(alpha, sigma, lam), executor=executor), fedamp(alpha, sigma, lam)
    for k in range(3):
        assert gap({n: state.personal[n][k].double() for n in nets[k].state_dict()},
                   {n: v.double() for n, v in nets[k].state_dict().items()}) < 1e-9
        assert gap({n: state.personal[f'cloud.{n}'][k] for n, _ in clouds[k].named_parameters()},
                   dict(clouds[k].named_parameters())) < 1e-9
        assert torch.equal(network_for(FedAMP(), state, k)[0]['head.weight'], state.personal['head.weight'][k])
    apart = gap(dict(nets[0].named_parameters()), dict(clouds[0].named_parameters()))
    assert apart > 1e-3 and gap(dict(clouds[0].named_parameters()), dict(clouds[2].named_parameters())) > 1e-3

def test_the_server_of_fedamp_needs_room_for_a_network_of_each_client():
    "And not of each pair."
    largest, flat = 0, torch.randn(20, 300)
    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor): largest = max(largest, out.numel())
            return out
    with Look(): share = attention(flat, 1., 600.)
    assert largest == flat.numel() and torch.allclose(share.sum(1), torch.ones(20))

@pytest.mark.parametrize('other', [MOON(), FedNTD()], ids=repr)
def test_what_a_client_of_fedamp_received_is_a_network(other):
    assert all(train(m, rounds=2).round == 2 for m in (FedAMP() + other, other + FedAMP()))

# ---- IFCA ----

# the first client gives the opposite labels
OPPOSED = dict(DATA, y=((DATA['x'][..., 0] > 0) ^ (torch.arange(3) == 0)[:, None, None]).long())

def ifca(starts, rounds, mu=0.):
    "The networks after some rounds, and which each client has trained in them, round by round."
    nets, seen = starts, []
    for who in rounds:
        ends, before, said = {}, copy.deepcopy(nets), {}
        for k in who:
            x, y = (torch.cat(v) for v in zip(*steps(k, OPPOSED)))
            with torch.no_grad(): tried = [float(F.cross_entropy(copy.deepcopy(n).eval()(x)[1], y)) for n in before]
            said[k] = i = min(range(len(nets)), key=lambda i: tried[i])
            net = copy.deepcopy(before[i]).train()
            opt = sgd(net)
            for x, y in steps(k, OPPOSED):
                far = sum((p - q.detach()).square().sum() for p, q in zip(net.parameters(), before[i].parameters()))
                descend(opt, F.cross_entropy(net(x)[1], y) + mu/2*far)
            ends.setdefault(i, {})[k] = net
        for i, of in ends.items(): averaged(nets[i], list(of.values()), list(of))
        seen.append(said)
    return nets, seen

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [True, False])
@pytest.mark.parametrize('clusters,mu', [(2, 0.), (3, 0.), (3, .5)])
def test_ifca(clusters, mu, norm, executor):
    rounds, m = ([0, 1, 2], [2, 0], [1, 2], [0, 1, 2]), IFCA(clusters) + (FedProx(mu=mu) if mu else FedAvg())
    first, starts = start(m, classifier(norm), 3), [classifier(norm) for _ in range(clusters)]
    names = [n for n, v in starts[0].state_dict().items() if v.is_floating_point()]
    tensors = lambda state, i: {n: {**state.params, **state.buffers}[f'cluster{i}.{n}'].double() for n in names}
    for i, net in enumerate(starts): net.load_state_dict(tensors(first, i), strict=False)
    assert gap(tensors(first, 0), {n: classifier(norm).state_dict()[n] for n in names}) == 0
    once = replace(LOCAL, epochs=1) # the batches are all of a client's samples
    state = federation(m, rounds, once, norm, executor, OPPOSED)
    nets, seen = ifca(starts, rounds, mu)
    for i, net in enumerate(nets): assert gap(tensors(state, i), {n: net.state_dict()[n] for n in names}) < 1e-9
    last = {k: i for said in seen for k, i in said.items()}
    assert state.client['IFCA']['cluster'][:].tolist() == [last[k] for k in range(3)]
    assert len({i for said in seen for i in said.values()}) > 1   # or nothing has been tested
    x, y = (torch.cat(v) for v in zip(*steps(1, OPPOSED)))
    with torch.no_grad(): best = min(nets, key=lambda n: float(F.cross_entropy(copy.deepcopy(n).eval()(x)[1], y)))
    params, buffers = network_for(m, state, 1, (x, y), classifier(norm))
    assert gap({**params, **buffers}, {n: best.state_dict()[n] for n in names}) < 1e-9
    assert not any('cluster' in n for n in params)
    most = max(range(clusters), key=lambda i: sum(SIZES[k] for k, j in seen[-1].items() if i == j))
    common, stats = network_for(m, state)
    assert gap({**common, **stats}, {n: nets[most].state_dict()[n] for n in names}) < 1e-9

def test_a_cluster_that_nobody_chooses_stays_as_it_is():
    m, far = IFCA(2), classifier(True)
    state = start(m, far, 3)
    hopeless = {k: 1e4*v if k == 'cluster1.head.weight' else v for k, v in state.params.items()}
    state = replace(state, params=hopeless)
    new = fed_round(Broadcast(m, far, state, LOCAL), [0, 1, 2], DATA, SIZES, 'vmap')
    assert new.client['IFCA']['cluster'][:].tolist() == [0, 0, 0]
    for tree in ('params', 'buffers'):
        for k, v in getattr(state, tree).items():
            if k.startswith('cluster1.'): assert torch.equal(getattr(new, tree)[k], v), k

def test_ifca_averages_statistics_within_a_cluster():
    with pytest.raises(ValueError, match='IFCA averages norm.running_mean within a cluster, but it stays at home'):
        start(IFCA(), classifier(True), 3, statistics='home')

# ---- FedPAC ----

def best_shares(hs, vs, i):
    "Every set of clients with a positive share is tried: its linear system, then the lowest risk."
    apart, found = torch.stack([(hs[i] - h).flatten() for h in hs]), []
    q = apart@apart.T + torch.diag(torch.stack(vs))
    for n in range(1, len(hs) + 1):
        for on in map(list, itertools.combinations(range(len(hs)), n)):
            w = torch.linalg.solve(q[on][:, on], torch.ones(n, dtype=torch.double))
            a = torch.zeros(len(hs), dtype=torch.double).index_copy(0, torch.tensor(on), w/w.sum())
            if (a >= 0).all(): found.append((float(a@q@a), a))
    return min(found, key=lambda f: f[0])[1]

def fedpac(lam, least, norm=True):
    nets, known, shares = [classifier(norm) for _ in range(3)], {}, {}
    server = classifier(norm)
    for who in ROUNDS:
        hs, vs, sent, ends = [], [], {}, []
        for k in who:
            net, head = nets[k], copy.deepcopy(nets[k].head.state_dict())
            net.load_state_dict(server.state_dict())
            net.head.load_state_dict(head)
            half = len(steps(k))/2
            x, y = (torch.cat(v) for v in zip(*steps(k)[:max(1, int(half + .5))])) # an epoch of the two
            with torch.no_grad(): z = net.eval()(x)[0]
            v, h = 0., torch.zeros(2, 5).double()
            for c in set(y.tolist()):
                p, of = float((y == c).sum())/len(y), z[y == c]
                h[c] = p*of.mean(0)
                v = v + p*of.square().sum(1).mean() - p**2*of.mean(0).square().sum()
            hs.append(h)
            vs.append(v/len(y))
            net.train()
            body = [p for n, p in net.named_parameters() if not n.startswith('head')]
            for_head, for_body = (torch.optim.SGD(ps, lr=.1, momentum=.9, weight_decay=.01)
                                  for ps in (net.head.parameters(), body))
            for t, (xs, ys) in enumerate(steps(k)):
                z, out = net(xs)
                pull = [(z[i] - known[c]).square().sum() for i, c in enumerate(ys.tolist()) if c in known]
                net.zero_grad()
                (F.cross_entropy(out, ys) + lam*sum(pull)/z.numel()).backward()
                (for_body if t >= half else for_head).step()
            with torch.no_grad(): z = net.eval()(x)[0]
            for c in set(y.tolist()): sent.setdefault(c, []).append((z[y == c].mean(0), int((y == c).sum())))
            ends.append(copy.deepcopy(net))
        averaged(server, ends, who)
        for c, each in sent.items(): known[c] = sum(n*m for m, n in each)/sum(n for _, n in each)
        for i, k in enumerate(who):
            a = best_shares(hs, vs, i)
            a = shares[k] = a*(a > least)/a[a > least].sum()
            nets[k].head.load_state_dict({n: sum(s*e.head.state_dict()[n] for s, e in zip(a, ends))
                                          for n in nets[k].head.state_dict()})
    return server, nets, known, shares

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('lam,least', [(2., 1e-3), (0., .2)])
def test_fedpac(lam, least, norm, executor):
    m, local = FedPAC(lam=lam, least=least), Local(epochs=2, lr=.1, momentum=.9, weight_decay=.01)
    state = federation(m, local=local, norm=norm, executor=executor)
    server, nets, known, shares = fedpac(lam, least, norm)
    assert any(1e-3 < a.min() < .999 for a in shares.values())
    body = {n: v for n, v in server.state_dict().items() if not n.startswith('head')}
    assert gap({**state.params, **state.buffers}, body) < 1e-9
    for c, v in known.items(): assert (state.server['FedPAC']['means'][c] - v).abs().max() < 1e-9
    for k, net in enumerate(nets):
        assert gap({f'head.{n}': state.personal[f'head.{n}'][k] for n in net.head.state_dict()},
                   {f'head.{n}': v for n, v in net.head.state_dict().items()}) < 1e-8
    assert gap(nets[0].head.state_dict(), nets[1].head.state_dict()) > 1e-3

def test_fedpac_needs_a_linear_head_and_more_epochs_than_the_body_has():
    with pytest.raises(ValueError, match="FedPAC: head='nose' must name the linear layer on the features"):
        start(FedPAC(head='nose'), classifier(), 3)
    with pytest.raises(ValueError, match='body_epochs=3, but it must be at most the 1 local epochs'):
        federation(FedPAC(body_epochs=3), local=Local(epochs=1))

# ---- FedAS ----

def in_fours(v): return v.split(4)

def fedas(lr, norm=True):
    server, nets, old, traces = classifier(norm), [classifier(norm) for _ in range(3)], {}, {}
    for who in ROUNDS:
        ends = []
        for k in who:
            net, head = nets[k], copy.deepcopy(nets[k].head.state_dict())
            net.load_state_dict(server.state_dict())
            net.head.load_state_dict(head)
            x, y = (torch.cat(v) for v in zip(*steps(k)))
            body = [p for n, p in net.named_parameters() if not n.startswith('head')]
            net.eval()
            if k in old:
                with torch.no_grad(): z = old[k].eval()(x)[0]
                means = {c: z[y == c].mean(0) for c in set(y.tolist())}
                for xs, ys in zip(in_fours(x), in_fours(y)):
                    out = net(xs)[0]
                    far = sum((out[ys == c] - means[c]).square().mean() for c in set(ys.tolist()))
                    for p, g in zip(body, torch.autograd.grad(far, body)): p.data -= lr*g
            net.train()
            optimizer = sgd(net)
            for xs, ys in steps(k):
                descend(optimizer, F.cross_entropy(net(xs)[1], ys))
            net.eval()
            traces[k] = sum(torch.autograd.grad(F.cross_entropy(net(xs)[1], ys), p, retain_graph=True)[0].square().sum()
                            for xs, ys in zip(in_fours(x), in_fours(y)) for p in net.parameters())
            old[k] = copy.deepcopy(net)
            ends.append(copy.deepcopy(net))
        share = torch.stack([traces[k] for k in who])/sum(traces[k] for k in who)
        for n, v in server.state_dict().items():
            mean = sum(q*e.state_dict()[n].double() for q, e in zip(share, ends))
            v.copy_(mean if v.is_floating_point() else mean.round())
    return server, nets

def test_a_client_that_has_much_to_learn_is_no_bad_client_for_fedas():
    "Its gradients may be ten thousand times as long as those of clients that have one class."
    task = load('digits')
    zeros = (task.y_train == 0).nonzero()[:60, 0].split(20)
    clients = [*zeros, (task.y_train > 0).nonzero()[:600, 0]]
    net = build('mlp', task, seed=0, hidden=(32,), features=16)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        federate(net, task, clients, FedAS(batch=1), rounds=3, local=Local(epochs=3, lr=.05), progress=False)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('lr', [.1, 0.])
def test_fedas(lr, norm, executor):
    state = federation(FedAS(lr=lr, batch=4), local=replace(LOCAL, epochs=1), norm=norm, executor=executor)
    server, nets = fedas(lr, norm)
    body = {n: v for n, v in server.state_dict().items() if not n.startswith('head')}
    assert gap({**state.params, **state.buffers}, body) < 1e-9
    for k, net in enumerate(nets):
        assert gap({f'head.{n}': state.personal[f'head.{n}'][k] for n in net.head.state_dict()},
                   {f'head.{n}': v for n, v in net.head.state_dict().items()}) < 1e-9

def test_where_nothing_is_left_to_learn_clients_of_fedas_count_equally():
    m, net = FedAS(), classifier()
    sent = Broadcast(m, net, start(m, net, 3), LOCAL, criterion=lambda logits, y: 0*logits.sum())
    for executor in ('loop', 'vmap'):
        uploads = local_phase(sent, [0, 1, 2], Batches(**DATA), executor)['uploads']['FedAS']
        assert torch.allclose(m.weigh(uploads), torch.ones(3).double()/3)

def test_fedas_needs_a_head():
    with pytest.raises(ValueError, match="FedAS: head='nose' must name a part of the network"):
        start(FedAS(head='nose'), classifier(), 3)
