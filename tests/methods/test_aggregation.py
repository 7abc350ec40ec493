"FedAvgM and FedNova: hooks against values got without fedlit, identities to the bit, rounds written out by hand."
import pytest, torch
from dataclasses import replace
from fedlit.method import FedAvg, Method
from fedlit import laws
from fedlit.methods import FedAdagrad, FedAdam, FedAvgM, FedExP, FedNova, FedYogi
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import start
from by_hand import EXECUTORS, FULL, W0, X, Y, by_torch, classifier, classify, fit, gap, slope

# ---- FedAvgM ----

FORMS = 'released', 'paper', 'nesterov'

def weights_of(form, beta, age):
    "How much a delta that is `age` rounds old counts in the server's step."
    if form == 'released': return (1-beta)*beta**age
    return beta**age if form == 'paper' else 1 + beta if age == 0 else beta**(age+1)

@pytest.mark.parametrize('beta', [0., .5, .9, .99])
@pytest.mark.parametrize('form', FORMS)
def test_fedavgm_unrolled(form, beta):
    g, server = torch.Generator().manual_seed(3), {}
    deltas = [dict(w=torch.randn(2, 3, generator=g), running_mean=torch.randn(4, generator=g)) for _ in range(9)]
    for t, delta in enumerate(deltas):
        step, server = FedAvgM(beta, form).merge(delta=delta, server=server, params=dict(w=None))
        def past(k, form): return sum(weights_of(form, beta, i)*deltas[t-i][k].double() for i in range(t+1))
        assert torch.allclose(step['w'].double(), past('w', form), atol=2e-6)
        buffer = past('running_mean', form) if form == 'released' else delta['running_mean'].double()
        assert torch.allclose(step['running_mean'].double(), buffer, atol=2e-6)
        assert set(server['velocity']) == (set(delta) if form == 'released' else {'w'})

@pytest.mark.parametrize('form', FORMS)
def test_fedavgm_is_the_plain_loop_with_a_server_optimiser(form):
    beta, model = .9, classifier(norm=True)
    trained = {n for n, _ in model.named_parameters()}
    def server(before, mean, memory):
        out = {}
        for n, w in before.items():
            d = mean[n] - w
            if n not in trained and form != 'released':
                out[n] = mean[n]
                continue
            memory[n] = beta*memory.get(n, 0.) + ((1-beta)*d if form == 'released' else d)
            out[n] = w + (d + beta*memory[n] if form == 'nesterov' else memory[n])
        return out
    state, expected = classify(FedAvgM(beta, form), 5, model), by_torch(5, server=server, model=model)
    got = {**state.params, **state.buffers}
    assert max((got[k] - v).abs().max().item() for k, v in expected.items() if v.is_floating_point()) < 1e-6

def test_moving_average_is_the_paper_form_with_a_small_server_rate():
    class Rate(Method):
        lr: float = 1.
        def merge(self, delta, server, params):
            return {k: self.lr*d if k in params else d for k, d in delta.items()}, server
    ema, twin = (classify(m, 6, classifier(True)) for m in (FedAvgM(.9), FedAvgM(.9, 'paper') + Rate(lr=1-.9)))
    assert (gap(ema.params, twin.params) < 1e-6
            < gap(ema.buffers, {k: v for k, v in twin.buffers.items() if v.is_floating_point()}))
    assert gap(twin.params, classify(Rate(lr=1-.9) + FedAvgM(.9, 'paper'), 6, classifier(True)).params) < 1e-9

# ---- FedNova ----

@pytest.mark.parametrize('rho', [0., .9])
def test_fednova_with_unequal_steps(rho):
    "Client 0 takes three steps, client 1 one; update of (tau_eff sum p d), the d normalised by their length."
    lr, p, live = .05, torch.tensor([.3, .7], dtype=torch.double), [[4, 4, 4], [4, 0, 0]]
    d, a = [], []
    for k, tau in enumerate((3, 1)):
        y, v, length, weight = W0.clone(), torch.zeros(3, dtype=torch.double), 0., 0.
        for t in range(tau):
            v = rho*v + slope(y, X[k, t], Y[k, t])
            y = y - lr*v
            weight = rho*weight + 1.
            length += weight          # how often each gradient so far counts
        d.append((W0 - y)/length)
        a.append(length)
    want = W0 - sum(pk*ak for pk, ak in zip(p, a))*sum(pk*dk for pk, dk in zip(p, d))
    s = fit(FedNova(), 1, lambda r: [0, 1], live, Local(lr=lr, momentum=rho), sizes=(.3, .7))
    assert torch.allclose(s.params['head.weight'][0], want, atol=1e-5)
    fed = fit(FedAvg(), 1, lambda r: [0, 1], live, Local(lr=lr, momentum=rho), sizes=(.3, .7))
    assert not torch.allclose(s.params['head.weight'], fed.params['head.weight'], atol=1e-3)

def test_fednova_with_equal_steps_is_fedavg():
    a, b = (fit(m, 2, lambda r: [0, 1], FULL, Local(lr=.05, momentum=.9), sizes=(.3, .7))
            for m in (FedNova(), FedAvg()))
    assert torch.allclose(a.params['head.weight'], b.params['head.weight'], atol=1e-9)

# ---- FedAdagrad, FedAdam, FedYogi ----

@pytest.mark.parametrize('m', [FedAdagrad(lr=.05), FedAdagrad(beta1=.5), FedAdam(tau=1e-2), FedAdam(beta1=0.),
                               FedYogi(), FedYogi(beta2=.5)], ids=repr)
def test_an_adaptive_server_against_a_hand_written_one(m):
    "Four of six ragged clients in three rounds; the server written out number by number, as the paper prints it."
    world, plain = laws.small_world(), FedAvg()
    state = start(m, world.model, 6)
    mean, second = {k: torch.zeros_like(v) for k, v in state.params.items()}, {}
    for r in range(3):
        twin = replace(state, server={})
        avg = fed_round(Broadcast(plain, world.model, twin, world.local), world.cohort(r), world.data(r), world.sizes)
        state = fed_round(Broadcast(m, world.model, state, world.local), world.cohort(r), world.data(r), world.sizes)
        for k, w in twin.params.items():
            delta, old = avg.params[k] - w, second.get(k, m.tau**2*torch.ones_like(w))
            mean[k] = m.beta1*mean[k] + (1 - m.beta1)*delta
            second[k] = (old + delta**2 if type(m) is FedAdagrad
                         else m.beta2*old + (1 - m.beta2)*delta**2 if type(m) is FedAdam
                         else old - (1 - m.beta2)*delta**2*torch.sign(old - delta**2))
            assert torch.allclose(state.params[k], w + m.lr*mean[k]/(second[k]**.5 + m.tau), atol=1e-12)
        assert all(torch.equal(state.buffers[k], v) for k, v in avg.buffers.items())

# ---- FedExP ----

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('eps', [1e-3, .01])
def test_fedexp_is_the_loop_by_hand(eps, executor):
    "Two clients of unequal weight on a line; near the end they pull apart, and the server stretches its step."
    lr, p, w, etas = .3, (.3, .7), W0.clone(), []
    for _ in range(12):
        steps = []
        for k in range(2):
            y = w.clone()
            for t in range(3): y = y - lr*slope(y, X[k, t], Y[k, t])
            steps.append(y - w)
        mean = p[0]*steps[0] + p[1]*steps[1]
        far = p[0]*float(steps[0] @ steps[0]) + p[1]*float(steps[1] @ steps[1])
        etas.append(max(1., far/(2*(float(mean @ mean) + eps))))
        w = w + etas[-1]*mean
    s = fit(FedExP(eps=eps), 12, lambda r: [0, 1], FULL, Local(lr=lr, momentum=0.), sizes=p, executor=executor)
    assert torch.allclose(s.params['head.weight'][0], w, atol=1e-9)
    assert abs(float(s.server['FedExP']['eta']) - etas[-1]) < 1e-9 and max(etas) > 1.3 and min(etas) == 1.

def test_fedexp_stretches_parameters_only_and_counts_what_travels():
    "Four clients with orthogonal steps; a statistic and a tensor that stays at home are neither stretched nor counted."
    eye, w, m = torch.eye(4), dict(w=torch.zeros(4), home=torch.zeros(9)), FedExP(eps=1e-12)
    far = [m.done({}, w, dict(w=d, home=torch.ones(9), mean=torch.ones(5)), {'home'})[1]['far'] for d in eye]
    step, memory = m.merge(dict(w=eye.mean(0), mean=torch.ones(5)), {}, w, dict(far=torch.stack(far)), torch.ones(4)/4)
    assert memory['eta'] == pytest.approx(2, abs=1e-6) and torch.equal(step['mean'], torch.ones(5))
    assert torch.allclose(step['w'], torch.full((4,), .5))
