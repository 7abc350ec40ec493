"Double precision stays double precision, and readings of released code that differ in a few words."
import pytest, torch, torch.nn.functional as F
from torch import nn
from fedlit.ground.stacks import Rewritten, single, stacked
from fedlit.ground.tape import record
from fedlit.method import Method
from fedlit.methods import FedAvg, FedDecorr, FedNova, FedProx, FedRolex, HeteroFL, SCAFFOLD, DepthFL
from fedlit.methods.depthfl import mutual
from fedlit.methods.submodels import top
from fedlit.models import Net
from fedlit.parse import method as parse
from fedlit.batches import Batches
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.server import aggregate, recompute
from fedlit.state import start
from types import SimpleNamespace

class One(nn.Module):
    "A network that is one number."
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, 1, dtype=torch.double))
    def forward(self, x):
        z = x@self.w
        return z, z

def answers(*values):
    "What `local_phase` would return of clients that end at these numbers."
    n = len(values)
    return dict(params=dict(w=torch.tensor(values, dtype=torch.double).reshape(n, 1, 1)), buffers={},
                client={'FedAvg': {}, 'Look': {}}, uploads={}, mask={},
                steps=torch.ones(n, dtype=torch.long), loss=torch.zeros(n))

def test_an_average_of_doubles_is_exact():
    state = start(FedAvg(), One(), 2)
    new = aggregate(Broadcast(FedAvg(), None, state, Local()), [0, 1], answers(1., 4.), [1., 2.])
    assert new.params['w'].item() == pytest.approx(3., abs=1e-15)      # float32 weights gave 3.000000089

def test_weights_stay_float32_beside_float32_parameters():
    seen = []
    class Look(Method):
        def weigh(self, weights):
            seen.append(weights.dtype)
            return weights
    for net in (One().float(), One()):
        out = answers(1., 4.)
        aggregate(Broadcast(Look(), None, start(Look(), net, 2), Local()), [0, 1],
                  dict(out, params=dict(w=out['params']['w'].to(net.w.dtype))), [1., 2.])
    assert seen == [torch.float32, torch.float64]

def test_the_printed_control_variate_is_exact_in_double_precision():
    m = SCAFFOLD(form='paper')
    zero = dict(w=torch.zeros(1, dtype=torch.double))
    client, _ = m.done(params=zero, initial=dict(w=torch.tensor([.3], dtype=torch.double)),
                       server=dict(c=zero), client=dict(c=zero), mask={},
                       steps=torch.tensor(3), lr=.1, momentum=0., weight_decay=0.)
    assert client['c']['w'].item() == pytest.approx(1., abs=1e-15)     # float32 gave 0.99999996

def test_a_later_hyper_parameter_is_printed_where_it_was_chosen():
    assert repr(FedDecorr()) == "FedDecorr(beta=0.1, form='released')"  # the name under which committed results lie
    assert parse(repr(FedDecorr(floor=.1))) == FedDecorr(floor=.1) != FedDecorr()
    assert repr(HeteroFL(rates=(.5,))) == "HeteroFL(rates=(0.5,), assign='fixed', seed=0)"

def test_rounding_down_as_the_thesis_code():
    kept = lambda n, r, how: int(top(-torch.arange(n), r, how).sum())
    assert [kept(6, .99, h) for h in ('up', 'down')] == [6, 5] and [kept(6, .25, h) for h in ('up', 'down')] == [2, 1]
    assert kept(3, .25, 'down') == 1 and kept(10, .3, 'down') == 3      # at least one, and 0.3 of ten is three
    for m in (HeteroFL, FedRolex):
        mask = m(rates=(.99,), rounding='down').mask(axes=SimpleNamespace(size=dict(a=64)), number=torch.tensor(0),
                                                     clients=1, round=0)
        assert mask['a'].sum() == 63

def test_static_statistics_count_batches_as_the_released_code():
    def norm(): return Net(nn.BatchNorm1d(1), nn.Linear(1, 2))
    x = torch.arange(8.).reshape(8, 1)
    batches = Batches(torch.stack([x[:3], x[3:6], F.pad(x[6:], (0, 0, 0, 1))])[None],
                      torch.zeros(1, 3, 3, dtype=torch.long), torch.tensor([[3, 3, 2]]))
    means = torch.tensor([x[:3].mean(), x[3:6].mean(), x[6:].mean()])
    seen = {s: recompute(FedAvg(), norm(), start(FedAvg(), norm(), 1, s), batches).buffers['body.running_mean'].item()
            for s in ('recomputed', 'static')}
    assert seen['recomputed'] == pytest.approx(x.mean().item()) and seen['static'] == pytest.approx(means.mean().item())
    assert (fed_round(Broadcast(FedAvg(), norm(), start(FedAvg(), norm(), 1, 'static'), Local()), [0], batches, [1.])
            .buffers['body.running_mean'].item() == pytest.approx(means.mean().item()))

def test_depthfls_pinch_is_the_released_divergence():
    o = torch.randn(6, 4, 10, dtype=torch.double, requires_grad=True)
    own, p = torch.tensor([1., 1., 1., 0.]).double(), o.detach().softmax(-1) + 1e-3
    loop = sum((p[:, j]*(p[:, j].log() - o[:, i].log_softmax(1))).sum(1) for i in range(3) for j in range(3) if i != j)
    ours = mutual(o.log_softmax(-1), own, 1e-3)
    torch.testing.assert_close(ours, loop, rtol=0, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), o, retain_graph=True)[0] for v in (ours, loop)),
                               rtol=0, atol=1e-12)
    assert repr(DepthFL()) == "DepthFL(levels=(4, 3, 2, 1), distill=True, ramp=300, exits='all')"

def test_fednova_allows_for_a_proximal_term():
    "The length of a proximal update, counted by taking the steps."
    weights, steps, lr, mu = torch.tensor([.5, .5], dtype=torch.double), torch.tensor([10, 2]), .1, .5
    for momentum in (0., .9):
        def moved(tau):
            w = v = 0.
            for _ in range(tau):
                v = momentum*v + 1 + mu*w
                w -= lr*v
            return -w/lr
        a = torch.tensor([moved(10), moved(2)], dtype=torch.double)
        want = weights*(weights*a).sum()/a
        torch.testing.assert_close(FedNova(mu=mu).weigh(weights=weights, steps=steps, momentum=momentum, lr=lr), want,
                                   rtol=0, atol=1e-12)
    assert repr(FedNova()) == 'FedNova()' and parse(repr(FedNova(mu=.01) + FedProx(mu=.01))).parts[0].mu == .01

# --- a ReLU and the max pool behind it swap places ---
def odd(shape, dtype, seed):
    "Few different values, so that windows have ties, and among them -0, infinity and what is no number."
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=g).to(dtype)
    for v in (-0., float('inf'), float('nan')): x[torch.rand(shape, generator=g) < .03] = v
    return x

def both_ways(net, x):
    "Outputs and gradients of a network that is run as it is, and under `Rewritten`."
    def go():
        y, g = net(x), torch.Generator().manual_seed(1)
        return y.detach(), torch.autograd.grad(y, x, torch.randn(y.shape, generator=g).to(y))[0]
    with Rewritten(): new = go()
    return go(), new

def same_bits(one, two):
    same = lambda u, v: torch.equal(u.isnan(), v.isnan()) and torch.equal(u.nan_to_num(), v.nan_to_num())
    return all(map(same, one, two))

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.double], ids=str)
@pytest.mark.parametrize('pool', [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(2, 3)],
                         ids=['2x2', 'with overlap', 'one by one', 'with gaps'])
@pytest.mark.parametrize('last', [False, True], ids=['channels first', 'channels last'])
def test_a_relu_after_the_pool_gives_the_same_bits(pool, dtype, last):
    for seed in range(3):
        x = odd((2, 3, 9, 9), dtype, seed)
        x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
        for relu in (nn.ReLU(), torch.relu, torch.Tensor.relu):
            assert same_bits(*both_ways(lambda x: pool(relu(x)), x))

def masked(x):
    x = x + 0
    y = F.relu(x)
    y *= .5
    return F.max_pool2d(y, 2)

def spoilt(x):
    x = x + 0
    y = F.relu(x)
    with torch.no_grad(): x.neg_()
    return F.max_pool2d(y, 2)

def dropped(x):
    torch.manual_seed(0)
    return F.max_pool2d(F.dropout(F.relu(x), .5, inplace=True), 2)

def both(x):
    y = F.relu(x)
    return F.max_pool2d(y, 2) + y[..., ::2, ::2]

@pytest.mark.parametrize('net', [
    spoilt, both,
    lambda x: F.max_pool2d(F.relu(x + 0, inplace=True), 2),
    lambda x: sum(F.max_pool2d(F.relu(x), 2, return_indices=True)),
    lambda x: F.adaptive_max_pool2d(F.relu(x), 2),
    lambda x: F.max_pool2d(input=F.relu(input=x), kernel_size=2),
    lambda x: F.max_pool2d(F.relu(x), kernel_size=2, stride=1),
    lambda x: F.max_pool3d(F.relu(x), 2), lambda x: F.max_pool1d(F.relu(x[0]), 2),
    lambda x: F.max_pool2d(F.max_pool2d(F.relu(x), 2), 2)])
def test_what_lies_between_a_relu_and_a_pool_is_heeded(net):
    assert same_bits(*both_ways(net, odd((2, 4, 8, 8), torch.float32, 0).requires_grad_()))

@pytest.mark.parametrize('net', [masked, dropped])
def test_a_relus_result_may_be_written_over_where_nothing_is_trained(net):
    x = odd((2, 4, 8, 8), torch.float32, 0)
    with torch.no_grad():
        plain = net(x)
        with Rewritten(): assert same_bits([plain], [net(x)])

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                  nn.Linear(64, 3))
    def forward(self, x): return self.body(x)

@pytest.mark.parametrize('each', [single, stacked])
def test_a_recorded_step_has_no_relu_before_the_pool(each):
    net, k = Pooled(), 1 if each is single else 2
    params = {n: v.detach().expand(k, *v.shape).clone() for n, v in net.named_parameters()}
    def step(params, x):
        leaves = {n: v.detach().requires_grad_() for n, v in params.items()}
        f = each(lambda w, x: dict(y=torch.func.functional_call(net, w, (x,)).square().mean()), (0, 0))
        return dict(zip(leaves, torch.autograd.grad(f(leaves, x)['y'].sum(), list(leaves.values()))))
    x = torch.randn(k, 5, 1, 8, 8)
    first, bind = record(step, params, x)
    pool, relu = (bind.source.index(f' aten_{w}') for w in ('max_pool2d', 'relu'))
    assert bind.source.count('aten_relu') == 1 and pool < relu
    again = bind()(params, x)
    assert all(torch.equal(first[n], again[n]) for n in first)
