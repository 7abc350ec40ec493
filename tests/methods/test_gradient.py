"SCAFFOLD, FedDyn and FedSAM against loops written out by hand: a few clients, no fedlit inside."
import copy
import pytest, torch
from torch import nn
from fedlit.method import FedAvg, Method
from fedlit.methods import FedAvgM, FedDyn, FedProx, FedRep, FedSAM, SCAFFOLD
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import start
from by_hand import EXECUTORS, FULL, W0, X, Y, Line, by_torch, classifier, classify, fit, gap as apart, slope
from federation import train

# ---- SCAFFOLD ----

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('participate', [lambda r: [0, 1], lambda r: [r % 2]], ids=['all', 'one in turn'])
def test_scaffold_option_two(participate, executor):
    "Control variates and weights of two clients and three steps, over three rounds, without momentum: as printed."
    lr, w, c, cs = (.1, W0.clone(), torch.zeros(3, dtype=torch.double),
                    [torch.zeros(3, dtype=torch.double) for _ in range(2)])
    for r in range(3):
        ends, changes = [], []
        for k in participate(r):
            y = w.clone()
            for t in range(3): y = y - lr*(slope(y, X[k, t], Y[k, t]) - cs[k] + c)
            new = cs[k] - c + (w - y)/(3*lr)
            ends.append(y)
            changes.append((k, new - cs[k]))
        w = torch.stack(ends).mean(0)
        for k, d in changes: cs[k] = cs[k] + d
        c = c + sum(d for _, d in changes)/2
    for form in ('paper', 'corrected'):
        s = fit(SCAFFOLD(form=form), 3, participate, FULL, Local(lr=lr, momentum=0.), executor=executor)
        assert torch.allclose(s.params['head.weight'][0], w, atol=1e-5)
        assert torch.allclose(s.server['SCAFFOLD']['c']['head.weight'][0], c, atol=1e-5)
        assert torch.allclose(s.client['SCAFFOLD']['c']['head.weight'][:, 0], torch.stack(cs), atol=1e-5)

def test_scaffold_printed_estimate_is_inflated_by_momentum():
    "With a constant gradient and many steps the printed estimate tends to g/(1-rho), the corrected one is g."
    class Slope(Line):
        def forward(self, x): return x, self.head(x)
    net, T = Slope(), 200
    data = dict(x=torch.tensor([1., 2., -1.], dtype=torch.double).expand(1, T, 1, 3),
                y=torch.zeros(1, T, 1, dtype=torch.double))
    c = {}
    for form in ('paper', 'corrected'):
        s = fed_round(Broadcast(SCAFFOLD(form=form), net, start(SCAFFOLD(form=form), net, 1),
                                Local(lr=.01, momentum=.9), criterion=lambda out, y: out.mean()), [0], data, [1.])
        c[form] = s.client['SCAFFOLD']['c']['head.weight'][0, 0]
    true = torch.tensor([1., 2., -1.], dtype=torch.double)
    assert torch.allclose(c['corrected'], true, atol=1e-5)
    assert (torch.allclose(c['paper']/true, torch.full((3,), 10., dtype=torch.double), rtol=.06)
            and (c['paper'] - 10*true).abs().max() > .1)

@pytest.mark.parametrize('rho,decay', [(0., .1), (.9, .1), (.5, 0.)])
def test_scaffold_correction_with_weight_decay_and_momentum(rho, decay):
    "A client without any loss: decay alone moves it, and the corrected estimate of the gradient is zero."
    net = Line()
    data = dict(x=X[:1], y=Y[:1])
    s = fed_round(Broadcast(SCAFFOLD(), net, start(SCAFFOLD(), net, 1), Local(lr=.1, momentum=rho, weight_decay=decay),
                            criterion=lambda out, y: 0*out.sum()), [0], data, [1.])
    assert s.client['SCAFFOLD']['c']['head.weight'].abs().max() < 1e-5
    if decay: assert not torch.allclose(s.params['head.weight'][0], W0)

def test_three_parts_at_once():
    "SCAFFOLD() + FedProx() + FedAvgM(): each does its part of a hand-written round."
    lr, mu, beta = .1, .3, .5
    w, c, cs, v = (W0.clone(), torch.zeros(3, dtype=torch.double),
                   [torch.zeros(3, dtype=torch.double)]*2, torch.zeros(3, dtype=torch.double))
    for _r in range(2):
        ends, new = [], []
        for k in range(2):
            y = w.clone()
            for t in range(3): y = y - lr*(slope(y, X[k, t], Y[k, t]) + mu*(y - w) - cs[k] + c)
            ends.append(y)
            new.append(cs[k] - c + (w - y)/(3*lr))
        v = beta*v + torch.stack(ends).mean(0) - w
        w, c, cs = w + v, c + sum(n - o for n, o in zip(new, cs))/2, new
    s = fit(SCAFFOLD() + FedProx(mu=mu) + FedAvgM(momentum=beta, form='paper'), 2, lambda r: [0, 1], FULL,
            Local(lr=lr, momentum=0.))
    assert torch.allclose(s.params['head.weight'][0], w, atol=1e-5)

# ---- FedDyn ----

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
        state = fed_round(Broadcast(m, net, state, Local(lr=lr, momentum=0.),
                                    criterion=lambda z, y: (z[:, 0] - y).square().mean()/2), round, dict(x=x, y=y),
                          [1., 1.])
        ends = []
        for k in round:
            v = w
            for _ in range(4): v -= lr*(a[k]*(v - target[k]) - g[k] + alpha*(v - w))
            g[k] -= alpha*(v - w)
            ends.append(v)
        h -= alpha*sum(v - w for v in ends)/3
        w = sum(ends)/2 - h/alpha
        assert abs(state.params['head.weight'].item() - w) < 1e-6
        assert abs(state.server['FedDyn']['h']['head.weight'].item() - h) < 1e-6 and abs(h - sum(g)/3) < 1e-9
        assert (state.client['FedDyn']['g']['head.weight'].flatten() - torch.tensor(g)).abs().max() < 1e-6
    assert abs(w) > .1

class HeadAtOne(Method):
    "Client 1 trains the head alone."
    def mask(self, params, number):
        return {k: torch.ones_like(v)*((number != 1) | k.startswith('head.')) for k, v in params.items()}

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_a_control_variate_is_of_what_a_client_trains(executor):
    "What a client never trains adds nothing to c, which stays the mean of all."
    method = HeadAtOne() + SCAFFOLD()
    s = train(method, executor, rounds=3)
    c = s.client[SCAFFOLD().name]['c']
    assert not any(c[k][1].any() for k in c if not k.startswith('head.')) and c['head.weight'][1].any()
    assert all(torch.allclose(v[:].mean(0), s.server[SCAFFOLD().name]['c'][k], atol=1e-9) for k, v in c.items())

class Elsewhere(Method):
    "Every client begins somewhere else than where the server is."
    def begin(self, params, number, client): return {k: v + .1*(number + 1) for k, v in params.items()}, client

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('rho', [0., .5])
def test_a_control_variate_reckons_from_where_a_client_began(executor, rho):
    "In one step, a client's first control variate is the gradient where it began, whatever `begin` has done."
    one = [[4, 0, 0], [4, 0, 0]]
    for method in (Elsewhere() + SCAFFOLD(), SCAFFOLD() + Elsewhere()):
        s = fit(method, 1, lambda r: [0, 1], one, Local(lr=.1, momentum=rho), executor=executor)
        for k in range(2):
            c = slope(W0 + .1*(k + 1), X[k, 0], Y[k, 0])
            assert torch.allclose(s.client['SCAFFOLD']['c']['head.weight'][k, 0], c, atol=1e-6)

# ---- FedSAM ----

def uphill(rho):
    "Puts the gradient from a distance of `rho` uphill in the place of the one that is there."
    def grad(net, x, y):
        far, length = copy.deepcopy(net), sum(p.grad.square().sum() for p in net.parameters()).sqrt()
        with torch.no_grad():
            for p, q in zip(far.parameters(), net.parameters()): p += rho*q.grad/length
        far.zero_grad()
        nn.functional.cross_entropy(far(x)[1], y).backward()
        for p, q in zip(far.parameters(), net.parameters()): q.grad = p.grad
    return grad

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('rho,norm', [(.05, True), (.7, False)])
def test_fedsam_is_the_plain_loop(rho, norm, executor):
    "Running statistics see a batch once, at the weights; the gradient is the one uphill."
    net = classifier(norm)
    state, want = classify(FedSAM(rho), 3, net, executor=executor), by_torch(3, model=net, grad=uphill(rho))
    assert apart(want, {**state.params, **{k: v for k, v in state.buffers.items() if v.is_floating_point()}}) < 1e-6
    assert apart(state.params, classify(FedAvg(), 3, net).params) > 1e-3

class Watch(Method):
    "Writes down the gradients that it sees."
    def grad(self, grads):
        self.seen.append({k: v.detach() for k, v in grads.items()})
        return grads
    seen = []

@pytest.mark.parametrize('before', [FedAvg(), FedSAM(.1), SCAFFOLD()], ids=repr)
def test_a_gradient_is_of_what_is_trained(before):
    "Each hook in its turn sees zeros where this step trains nothing."
    held = HeadAtOne() if before == SCAFFOLD() else FedRep()
    Watch.seen.clear()
    train(before + held + Watch(), rounds=2)
    zero = [{k for k, g in seen.items() if not g.any()} for seen in Watch.seen]
    body = {k for k in Watch.seen[0] if not k.startswith('head.')}
    assert body in zero and all(z in (body, {'head.weight', 'head.bias'}, set()) for z in zero)
