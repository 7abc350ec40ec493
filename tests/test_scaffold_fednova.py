"SCAFFOLD and FedNova against loops written out by hand: a linear model, two clients, no fedlit inside."
import pytest, torch
from torch import nn
from fedlit.methods import FedAvg, FedNova, FedProx, SCAFFOLD, FedAvgM
from fedlit.round import Local, fed_round, start

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad(): self.head.weight.copy_(torch.tensor([[.5, -1., .2]]))
    def forward(self, x): return x, self.head(x)

square = lambda out, y: (out[:, 0] - y).square().mean()/2
g = torch.Generator().manual_seed(3)
X, Y = torch.randn(2, 3, 4, 3, dtype=torch.double, generator=g), torch.randn(2, 3, 4, dtype=torch.double, generator=g)
grad = lambda w, x, y: ((x@w - y)[:, None]*x).mean(0)
W0 = torch.tensor([.5, -1., .2], dtype=torch.double)

def run(method, rounds, who, live, local, sizes=(1., 1.), executor='loop', clients=2):
    net = Line()
    state = start(method, net, clients)
    for r in range(rounds):
        ks = who(r)
        data = dict(x=X[ks], y=Y[ks], live=torch.tensor(live)[ks])
        state = fed_round(method, net, state, ks, data, [sizes[k] for k in ks], local,
                          criterion=square, executor=executor)
    return state

FULL = [[4, 4, 4], [4, 4, 4]]

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
            for t in range(3): y = y - lr*(grad(y, X[k, t], Y[k, t]) - cs[k] + c)
            new = cs[k] - c + (w - y)/(3*lr)
            ends.append(y)
            changes.append((k, new - cs[k]))
        w = torch.stack(ends).mean(0)
        for k, d in changes: cs[k] = cs[k] + d
        c = c + sum(d for _, d in changes)/2
    for form in ('paper', 'corrected'):
        s = run(SCAFFOLD(form=form), 3, participate, FULL, Local(lr=lr, momentum=0.), executor=executor)
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
        s = fed_round(SCAFFOLD(form=form), net, start(SCAFFOLD(form=form), net, 1), [0], data, [1.],
                      Local(lr=.01, momentum=.9), criterion=lambda out, y: out.mean())
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
    s = fed_round(SCAFFOLD(), net, start(SCAFFOLD(), net, 1), [0], data, [1.],
                  Local(lr=.1, momentum=rho, weight_decay=decay), criterion=lambda out, y: 0*out.sum())
    assert s.client['SCAFFOLD']['c']['head.weight'].abs().max() < 1e-5
    if decay: assert not torch.allclose(s.params['head.weight'][0], W0)

@pytest.mark.parametrize('rho', [0., .9])
def test_fednova_with_unequal_steps(rho):
    "Client 0 takes three steps, client 1 one; update of (tau_eff sum p d), the d normalised by their length."
    lr, p, live = .05, torch.tensor([.3, .7], dtype=torch.double), [[4, 4, 4], [4, 0, 0]]
    d, a = [], []
    for k, tau in enumerate((3, 1)):
        y, v, length, weight = W0.clone(), torch.zeros(3, dtype=torch.double), 0., 0.
        for t in range(tau):
            v = rho*v + grad(y, X[k, t], Y[k, t])
            y = y - lr*v
            weight = rho*weight + 1.
            length += weight          # how often each gradient so far counts
        d.append((W0 - y)/length)
        a.append(length)
    want = W0 - sum(pk*ak for pk, ak in zip(p, a))*sum(pk*dk for pk, dk in zip(p, d))
    s = run(FedNova(), 1, lambda r: [0, 1], live, Local(lr=lr, momentum=rho), sizes=(.3, .7))
    assert torch.allclose(s.params['head.weight'][0], want, atol=1e-5)
    fed = run(FedAvg(), 1, lambda r: [0, 1], live, Local(lr=lr, momentum=rho), sizes=(.3, .7))
    assert not torch.allclose(s.params['head.weight'], fed.params['head.weight'], atol=1e-3)

def test_fednova_with_equal_steps_is_fedavg():
    a, b = (run(m, 2, lambda r: [0, 1], FULL, Local(lr=.05, momentum=.9), sizes=(.3, .7))
            for m in (FedNova(), FedAvg()))
    assert torch.allclose(a.params['head.weight'], b.params['head.weight'], atol=1e-9)

def test_three_parts_at_once():
    "SCAFFOLD() + FedProx() + FedAvgM(): each does its part of a hand-written round."
    lr, mu, beta = .1, .3, .5
    w, c, cs, v = (W0.clone(), torch.zeros(3, dtype=torch.double),
                   [torch.zeros(3, dtype=torch.double)]*2, torch.zeros(3, dtype=torch.double))
    for _r in range(2):
        ends, new = [], []
        for k in range(2):
            y = w.clone()
            for t in range(3): y = y - lr*(grad(y, X[k, t], Y[k, t]) + mu*(y - w) - cs[k] + c)
            ends.append(y)
            new.append(cs[k] - c + (w - y)/(3*lr))
        v = beta*v + torch.stack(ends).mean(0) - w
        w, c, cs = w + v, c + sum(n - o for n, o in zip(new, cs))/2, new
    s = run(SCAFFOLD() + FedProx(mu=mu) + FedAvgM(momentum=beta, form='paper'), 2, lambda r: [0, 1], FULL,
            Local(lr=lr, momentum=0.))
    assert torch.allclose(s.params['head.weight'][0], w, atol=1e-5)
