"FedAvg, FedProx, FedAvgM: hooks against values got without fedlit, identities to the bit, rounds against plain torch."
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlit.method import FedAvg, Method
from fedlit.methods.fedavgm import FedAvgM
from fedlit.methods.fedprox import FedProx, proximal
from fedlit.parse import method as parse
from fedlit.round import Local, fed_round, start

torch.set_num_threads(1)
FORMS = "released", "paper", "nesterov"
EXECUTORS = "loop", "vmap"
SIZES = torch.tensor([12., 9., 4.])


class Net(nn.Module):
    "A small network with or without batch normalisation, in double precision."
    def __init__(self, norm=False):
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, x):
        z = self.norm(self.body(x)).tanh()
        return z, self.head(z)


def make(norm=False):
    torch.manual_seed(0)
    return Net(norm)

def batches(steps=(3, 3, 1), B=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    T = max(steps)
    live = torch.tensor([[t < s for t in range(T)] for s in steps])
    return dict(x=torch.randn(len(steps), T, B, 3, generator=g, dtype=torch.double),
                y=torch.randint(0, 2, (len(steps), T, B), generator=g), live=live)

def go(method, rounds=1, model=None, data=None, local=None, executor="loop", weights=SIZES):
    model, data, local = model or make(), data or batches(), local or Local(lr=.1, momentum=.9, weight_decay=.01)
    state = start(method, model, len(data["y"]))
    for _ in range(rounds):
        state = fed_round(method, model, state, list(range(len(data["y"]))), data, weights, local, executor)
    return state

def same(a, b):
    return (all(torch.equal(a.params[k], v) for k, v in b.params.items())
            and all(torch.equal(a.buffers[k], v) for k, v in b.buffers.items()))
def gap(a, b): return max((a[k] - b[k]).abs().max().item() for k in b)

def plain(rounds, client_step, server_step=lambda w, mean, memory: mean, model=None, lr=.1, momentum=.9, wd=.01):
    "An independent federation in torch: deepcopy, optim.SGD, average of state dicts. `client_step` adds to the loss."
    model, data, p, memory = copy.deepcopy(model or make()), batches(), (SIZES/SIZES.sum()).double(), {}
    for _ in range(rounds):
        mean, anchor = {}, {k: v.detach().clone() for k, v in model.named_parameters()}
        for k in range(3):
            local = copy.deepcopy(model).train()
            opt = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum, weight_decay=wd)
            for t in range(int(data["live"][k].sum())):
                opt.zero_grad()
                (F.cross_entropy(local(data["x"][k, t])[1], data["y"][k, t]) + client_step(local, anchor)).backward()
                opt.step()
            for n, v in local.state_dict().items():
                if v.is_floating_point(): mean[n] = mean.get(n, 0) + p[k]*v
        before = {n: v.clone() for n, v in model.state_dict().items() if n in mean}
        model.load_state_dict({**model.state_dict(), **server_step(before, mean, memory)})
    return model.state_dict()


# --- FedAvg ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("weights", [SIZES, torch.ones(3), torch.tensor([0., 1., 0.])])
def test_one_full_batch_step_is_gradient_descent_on_the_weighted_objective(executor, weights):
    model, data = make(), batches((1, 1, 1), B=7)
    state = go(FedAvg(), 1, model, data, Local(lr=.3, momentum=0.), executor, weights)
    p = (weights/weights.sum()).double()
    loss = sum(pk*F.cross_entropy(model(data["x"][k, 0])[1], data["y"][k, 0]) for k, pk in enumerate(p))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = {n: v.detach() - .3*g for (n, v), g in zip(model.named_parameters(), grads)}
    assert gap(state.params, expected) < 1e-7  # weights are float32 in a round

@pytest.mark.parametrize("executor", EXECUTORS)
def test_fedavg_is_the_plain_loop_over_rounds(executor):
    state, expected = go(FedAvg(), 3, executor=executor), plain(3, lambda net, anchor: 0.)
    assert gap(state.params, {k: expected[k] for k in state.params}) < 1e-6

def test_running_statistics_are_averaged_by_data_and_counters_rounded():
    model = make(norm=True)
    state, expected = go(FedAvg(), 2, model), plain(2, lambda net, anchor: 0., model=model)
    for k in ("norm.running_mean", "norm.running_var"): assert (state.buffers[k] - expected[k]).abs().max() < 1e-6
    first = go(FedAvg(), 1, model).buffers["norm.num_batches_tracked"]
    assert first.dtype == torch.int64 and first.item() == round((12*3 + 9*3 + 4*1)/25) == 3

@pytest.mark.parametrize("n", range(1, 60))
def test_a_counter_on_which_all_agree_is_kept(n):
    "The released codes truncate a float sum here, and lose one for some n."
    model = make(norm=True)
    model.norm.num_batches_tracked.fill_(n)
    weights = torch.rand(3, generator=torch.Generator().manual_seed(n)) + .1
    state = go(FedAvg(), 1, model, batches((2, 2, 2)), weights=weights)
    assert state.buffers["norm.num_batches_tracked"].item() == n + 2

def test_no_velocity_outlives_a_round():
    data = batches((4,))
    half = [{k: v[:, s] for k, v in data.items()} for s in (slice(0, 2), slice(2, 4))]
    def split(momentum):
        local, state = Local(lr=.1, momentum=momentum), start(FedAvg(), make(), 1)
        for d in half: state = fed_round(FedAvg(), make(), state, [0], d, [1.], local)
        return gap(state.params, go(FedAvg(), 1, data=data, local=local, weights=[1.]).params)
    assert split(0.) < 1e-12 < 1e-3 < split(.9)


# --- FedProx --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mu", [0., .01, 3.])
def test_fedprox_loss_and_gradient_by_hand(mu):
    w, b, w0, b0 = [[1., -2.], [.5, 0.]], [3.], [[0., -1.], [.5, 2.]], [1.]
    value = mu/2*((1-0)**2 + (-2+1)**2 + 0 + (0-2)**2 + (3-1)**2)  # = mu/2 * 10
    params = dict(w=torch.tensor(w, requires_grad=True), b=torch.tensor(b, requires_grad=True))
    received = dict(w=torch.tensor(w0), b=torch.tensor(b0), running_mean=torch.full((4,), 9.))
    loss = proximal(params, received, mu)
    assert abs(loss.item() - value) < 1e-6 and value == mu*5
    data = dict(w=torch.full((2, 2), .5), b=torch.ones(1))
    pulled = FedProx(mu=mu).grad(data, params, received)
    for gw, gb in (torch.autograd.grad(loss, [params["w"], params["b"]]), [pulled[k] - data[k] for k in "wb"]):
        assert torch.allclose(gw, mu*torch.tensor([[1., -1.], [0., -2.]]), atol=1e-6) and abs(gb.item() - 2*mu) < 1e-6

@pytest.mark.parametrize("executor", EXECUTORS)
def test_fedprox_is_the_plain_loop_with_the_term(executor):
    term = lambda net, anchor: .35*sum((p - anchor[n]).pow(2).sum() for n, p in net.named_parameters())
    state, expected = go(FedProx(mu=.7), 3, executor=executor), plain(3, term)
    assert gap(state.params, {k: expected[k] for k in state.params}) < 1e-6
    assert gap(state.params, go(FedAvg(), 3).params) > 1e-3

@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("norm", [False, True])
def test_fedprox_at_zero_is_fedavg_to_the_bit(executor, norm):
    assert same(go(FedProx(mu=0.), 3, make(norm), executor=executor), go(FedAvg(), 3, make(norm), executor=executor))

def test_fedprox_first_step_is_free():
    "At the received parameters the spring has no length, so a single step is FedAvg's."
    data = batches((1, 1, 1))
    assert same(go(FedProx(mu=50.), 1, data=data), go(FedAvg(), 1, data=data))

def test_fedprox_reaches_the_closed_form():
    "Scalar parabola h/2 (w-c)^2 from w0: the proximal point is (h c + mu w0)/(h + mu)."
    class Number(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2., dtype=torch.double))
        def forward(self, x): return x, self.w*x
    h, c, mu = 4., -1., 1.5
    x = torch.full((1, 80, 1), math.sqrt(h), dtype=torch.double)
    state = fed_round(FedProx(mu=mu), Number(), start(FedProx(mu=mu), Number(), 1), [0], dict(x=x, y=c*x), [1.],
                      Local(lr=.1, momentum=0.), criterion=lambda out, y: (out - y).square().mean()/2)
    assert abs(state.params["w"].item() - (h*c + mu*2)/(h + mu)) < 1e-6

def test_fedprox_stability_limit():
    "SGD on mu/2 (w-w0)^2 alone contracts exactly where lr*mu < 2 (1 + momentum)."
    class Push(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.double))
        def forward(self, x): return x, self.w*x
    def size(lrmu, rho):
        x, m = torch.ones(1, 300, 1, dtype=torch.double), FedProx(mu=lrmu/.1)
        state = fed_round(m, Push(), start(m, Push(), 1), [0], dict(x=x, y=x), [1.], Local(lr=.1, momentum=rho),
                          criterion=lambda out, y: out.mean())
        return abs(state.params["w"].item())
    for rho in (0., .5, .9): assert size(2*(1 + rho)*.97, rho) < 1 < 10 < size(2*(1 + rho)*1.03, rho)

def test_distance_to_oneself_is_fedavg_to_the_bit():
    "What FedDecorr released as FedProx."
    class Aliased(Method):
        mu: float = 1.
        def loss(self, params): return self.mu/2*sum((p - p).square().sum() for p in params.values())
    assert same(go(Aliased(mu=10.), 3), go(FedAvg(), 3))
    assert not same(go(FedProx(mu=10.), 3, local=Local(lr=.01)), go(FedAvg(), 3, local=Local(lr=.01)))

@pytest.mark.parametrize("mu", [-1e-9, float("nan"), -3])
def test_fedprox_refuses(mu):
    with pytest.raises(ValueError, match="FedProx: mu=.*at least 0"): FedProx(mu=mu)


# --- FedAvgM --------------------------------------------------------------------------------------------------------

def weights_of(form, beta, age):
    "How much a delta that is `age` rounds old counts in the server's step."
    if form == "released": return (1-beta)*beta**age
    return beta**age if form == "paper" else 1 + beta if age == 0 else beta**(age+1)

@pytest.mark.parametrize("beta", [0., .5, .9, .99])
@pytest.mark.parametrize("form", FORMS)
def test_fedavgm_unrolled(form, beta):
    g, server = torch.Generator().manual_seed(3), {}
    deltas = [dict(w=torch.randn(2, 3, generator=g), running_mean=torch.randn(4, generator=g)) for _ in range(9)]
    for t, delta in enumerate(deltas):
        step, server = FedAvgM(beta, form).merge(delta=delta, server=server, params=dict(w=None))
        def past(k, form): return sum(weights_of(form, beta, i)*deltas[t-i][k].double() for i in range(t+1))
        assert torch.allclose(step["w"].double(), past("w", form), atol=2e-6)
        buffer = past("running_mean", form) if form == "released" else delta["running_mean"].double()
        assert torch.allclose(step["running_mean"].double(), buffer, atol=2e-6)
        assert set(server["velocity"]) == (set(delta) if form == "released" else {"w"})

@pytest.mark.parametrize("form, kw", [("paper", {}), ("nesterov", dict(nesterov=True))])
def test_fedavgm_is_torch_sgd_on_minus_delta(form, kw):
    w, server = nn.Parameter(torch.zeros(5)), {}
    opt, at, g = torch.optim.SGD([w], lr=1., momentum=.8, **kw), torch.zeros(5), torch.Generator().manual_seed(0)
    for _ in range(8):
        d = torch.randn(5, generator=g)
        w.grad = -d
        opt.step()
        step, server = FedAvgM(.8, form).merge(dict(w=d), server, dict(w=None))
        at = at + step["w"]
        assert torch.allclose(at, w.detach(), atol=1e-6)

@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_fedavgm_at_zero_is_fedavg_to_the_bit(form, norm, executor):
    assert same(go(FedAvgM(0., form), 4, make(norm), executor=executor), go(FedAvg(), 4, make(norm), executor=executor))

@pytest.mark.parametrize("form", FORMS)
def test_fedavgm_is_the_plain_loop_with_a_server_optimiser(form):
    beta, model = .9, make(norm=True)
    trained = {n for n, _ in model.named_parameters()}
    def server(before, mean, memory):
        out = {}
        for n, w in before.items():
            d = mean[n] - w
            if n not in trained and form != "released":
                out[n] = mean[n]
                continue
            memory[n] = beta*memory.get(n, 0.) + ((1-beta)*d if form == "released" else d)
            out[n] = w + (d + beta*memory[n] if form == "nesterov" else memory[n])
        return out
    state, expected = go(FedAvgM(beta, form), 5, model), plain(5, lambda net, anchor: 0., server, model)
    got = {**state.params, **state.buffers}
    assert max((got[k] - v).abs().max().item() for k, v in expected.items() if v.is_floating_point()) < 1e-6

def test_moving_average_is_the_paper_form_with_a_small_server_rate():
    class Rate(Method):
        lr: float = 1.
        def merge(self, delta, server, params):
            return {k: self.lr*d if k in params else d for k, d in delta.items()}, server
    ema, twin = go(FedAvgM(.9), 6, make(True)), go(FedAvgM(.9, "paper") + Rate(lr=1-.9), 6, make(True))
    assert (gap(ema.params, twin.params) < 1e-6
            < gap(ema.buffers, {k: v for k, v in twin.buffers.items() if v.is_floating_point()}))
    assert gap(twin.params, go(Rate(lr=1-.9) + FedAvgM(.9, "paper"), 6, make(True)).params) < 1e-9

@pytest.mark.parametrize("form, limit", [("released", 1.), ("paper", 10.), ("nesterov", 10.)])
def test_constant_delta(form, limit):
    server, steps = {}, []
    for _ in range(300):
        step, server = FedAvgM(.9, form).merge(dict(w=torch.ones((), dtype=torch.double)), server, dict(w=None))
        steps.append(step["w"].item())
    assert abs(steps[-1] - limit) < 1e-6 and all(b > a for a, b in zip(steps[:20], steps[1:20]))
    assert abs(steps[0] - dict(released=.1, paper=1., nesterov=1.9)[form]) < 1e-6

def test_smoothed_running_variance_can_turn_negative():
    "Why `form='paper'` leaves buffers alone: from 1, asked for 0.1 at every round."
    v, server, seen = 1., {}, []
    for _ in range(15):
        step, server = FedAvgM(.9).merge(dict(var=torch.tensor(.1 - v)), server, {})
        v += step["var"].item()
        seen.append(v)
    assert min(seen) < 0

@pytest.mark.parametrize("kw, message", [(dict(momentum=1.), r"momentum=1.0.*\[0, 1\)"),
                                         (dict(momentum=-.1), "momentum=-0.1"),
                                         (dict(form="ema"), "form='ema'.*'released'")])
def test_fedavgm_refuses(kw, message):
    with pytest.raises(ValueError, match=message): FedAvgM(**kw)


# --- all of them ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("m", [FedAvg(), FedProx(mu=.3), *[FedAvgM(.7, f) for f in FORMS],
                               FedProx(mu=.3) + FedAvgM(.7, "paper")], ids=repr)
def test_every_member(m):
    assert parse(repr(m)) == m and FedAvg() + m == m == m + FedAvg()
    loop, vmapped = (go(m, 3, make(True), executor=e) for e in EXECUTORS)
    assert gap(loop.params, vmapped.params) < 1e-6 and gap(loop.buffers, vmapped.buffers) < 1e-6
