"Robust aggregation: breakdown points, part of a network, weights that clients claim, and the law of the hook."
import pytest, torch, warnings
from fedlit.laws import small_world
from fedlit.method import Method
from fedlit.methods import (
    CoordinateMedian, DP, FedAvg, FedNova, FedPer, FedProto, HeteroFL, Krum, NormClipping, SCAFFOLD, SOLO,
    TrimmedMean)
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.server import aggregate
from fedlit.state import start
from fedlit.ground.tree import rows
from federation import train

def server(method, deltas, weights=None, mask=None, steps=None):
    "The step that the server takes when a linear model's clients changed so much."
    net = torch.nn.Linear(*deltas.shape[:0:-1], bias=False).double()
    torch.nn.init.zeros_(net.weight)
    state, K = start(method, net, len(deltas)), len(deltas)
    out = dict(params=dict(weight=state.params['weight'] + deltas), buffers={}, uploads={},
               client=rows(state.client, list(range(K))), mask=mask or {},
               steps=torch.full((K,), 5) if steps is None else steps)
    return aggregate(Broadcast(method, None, state, Local(momentum=0.)), list(range(K)), out,
                     [1.]*K if weights is None else weights).params['weight'] - state.params['weight']

def crowd(K, seed=0): return torch.randn(K, 3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(seed))

@pytest.mark.parametrize('size', [1e3, 1e10, -1e10, 1e30])
@pytest.mark.parametrize('method,K,liars', [(CoordinateMedian(), 9, 4), (CoordinateMedian(), 8, 3),
                                            (TrimmedMean(trim=.2), 10, 2), (TrimmedMean(trim=.4), 10, 4),
                                            (Krum(attackers=2), 7, 2), (Krum(attackers=3, best=4), 9, 3)], ids=repr)
def test_liars_below_the_breakdown_point_move_nothing_far(method, K, liars, size):
    honest = crowd(K)
    lied = honest.clone()
    lied[:liars] = size*(1 + .1*crowd(liars, 1).abs())
    rest = honest[liars:]
    step = server(method, lied)
    assert (step >= rest.amin(0) - 1e-9).all() and (step <= rest.amax(0) + 1e-9).all()
    # one more is too many, where it is the breakdown point that is given
    if type(method) is not Krum:
        lied[:liars+1] = size
        assert server(method, lied).abs().max() > abs(size)/100
    assert server(FedAvg(), lied).abs().max() > abs(size)/100

def test_krum_elects_nothing_farther_than_its_bound():
    "A lie that it elects is within D sqrt((K-f-2)/(K-2f-1)) of an honest update, D the diameter of the honest ones."
    elected = 0
    for K, f in ((7, 2), (11, 3), (20, 8)):
        for far in (.5, 1, 2, 3, 5, 1e3):
            deltas = crowd(K)
            honest = deltas[f:]
            deltas[:f] = honest.mean(0) - far*honest.std(0) # all liars agree
            step = server(Krum(attackers=f), deltas)
            apart = torch.cdist(*[honest.flatten(1)]*2).max()
            near = (honest - step).flatten(1).norm(dim=1).min()
            assert near <= apart*((K-f-2)/(K-2*f-1))**.5 + 1e-9
            elected += near > 1e-6
    assert elected > 3 # it does elect lies, but near ones

def test_a_clipped_liar_moves_the_mean_by_its_weight_times_the_bound():
    honest, weights = crowd(6), [3., 1, 1, 1, 1, 1]
    without = server(NormClipping(norm=2.), torch.cat([0*honest[:1], honest[1:]]), weights)
    for seed in range(10):
        lied = honest.clone()
        lied[0] = 10.**seed*crowd(1, seed)[0]
        assert (server(NormClipping(norm=2.), lied, weights) - without).norm() <= 3/8*2 + 1e-9
    # by itself the bound is the median of the lengths, which fewer than half cannot push beyond the honest ones
    lied[1] = 1e9
    bound = lied[2:].flatten(1).norm(dim=1).max()
    assert server(NormClipping(), lied).norm() <= bound + 1e-9

@pytest.mark.parametrize('odd', [float('nan'), float('inf'), -float('inf'), 1e300])
@pytest.mark.parametrize('norm', [None, 2.])
def test_one_odd_number_is_no_update_under_clipping(odd, norm):
    honest = crowd(6)
    lied, zero = honest.clone(), honest.clone()
    lied[0, 0, 0], zero[0] = odd, 0
    step = server(NormClipping(norm=norm), lied)
    assert step.isfinite().all()
    if norm: assert torch.allclose(step, server(NormClipping(norm=norm), zero))
    mean, stats = dict(w=honest.flatten(1).clone()), dict(running_mean=torch.ones(6, 2).double())
    stats['running_mean'][0, 0] = odd
    out = NormClipping(norm=norm).combine({**mean, **stats}, torch.ones(6), dict(w=0))[0]
    assert all(v.isfinite().all() for v in out.values())
    assert out['w'][0].any() # its parameters are sound

def test_entries_are_combined_among_those_who_trained_them():
    deltas = torch.tensor([[[1., 7, 0]], [[2, 0, 0]], [[9, 0, 0]]], dtype=torch.double)
    mask = dict(weight=torch.tensor([[[1., 1, 0]], [[1, 0, 0]], [[1, 0, 0]]], dtype=torch.double))
    assert server(CoordinateMedian(), deltas, mask=mask).tolist() == [[2, 7, 0]]
    assert server(TrimmedMean(trim=.34), deltas, mask=mask).tolist() == [[2, 7, 0]]
    assert server(NormClipping(norm=torch.inf), deltas, mask=mask).tolist()[0] == pytest.approx([4, 7, 0])
    assert server(Krum(attackers=0), deltas, mask=mask).tolist()[0] in ([1, 7, 0], [2, 0, 0])

def test_what_clients_claim_to_have_does_not_count_where_heads_are_counted():
    deltas = crowd(5)
    for method in (CoordinateMedian(), TrimmedMean(), Krum(attackers=1), Krum(attackers=1, best=3)):
        assert torch.equal(server(method, deltas), server(method, deltas, [1e6, 1, 1, 1, 1]))
    assert not torch.allclose(server(NormClipping(), deltas), server(NormClipping(), deltas, [1e6, 1, 1, 1, 1]))

def test_what_weigh_decides_is_in_the_stack():
    "FedNova stretches each client's step; the median is of the stretched ones."
    deltas, steps = crowd(5), torch.tensor([1, 2, 5, 10, 20])
    nova = FedNova()
    p = torch.full((5,), .2)
    q = nova.weigh(weights=p, steps=steps, momentum=0., lr=.05)
    right = (deltas*(q/p).double().view(-1, 1, 1)).median(0).values
    assert torch.allclose(server(nova + CoordinateMedian(), deltas, steps=steps), right, atol=1e-9)
    assert torch.allclose(server(nova + NormClipping(norm=torch.inf), deltas, steps=steps),
                          server(nova, deltas, steps=steps), atol=1e-12)

def test_parts_are_asked_from_left_to_right():
    deltas = crowd(7)
    class Double(Method):
        def combine(self, deltas, weights): return {k: 2*v for k, v in deltas.items()}, weights
    clipped = NormClipping(norm=1.).combine(dict(weight=2*deltas), torch.ones(7), dict(weight=0))[0]['weight']
    assert torch.allclose(server(Double() + NormClipping(norm=1.) + CoordinateMedian(), deltas),
                          clipped.median(0).values, atol=1e-12)

@pytest.mark.parametrize('bad,said', [
    (lambda d, w: d, 'two things'),
    (lambda d, w: ({}, w), 'nothing for weight; begin with'),
    (lambda d, w: ({k: v[0] for k, v in d.items()}, w), 'a row for each weight'),
    (lambda d, w: (d, w[:2]), 'a row for each weight'),
    (lambda d, w: (d, 1.), 'a row for each weight')])
def test_the_law_of_the_hook(bad, said):
    class Odd(Method):
        def combine(self, deltas, weights): return bad(deltas, weights)
    with pytest.raises(TypeError, match=f'combine returned .*{said}'): server(Odd(), crowd(3))

def test_too_few_clients_for_krums_guarantee_are_said():
    with pytest.warns(UserWarning, match=r'Krum\(attackers=1\) wants 5 clients .* and this one has 4'):
        server(Krum(attackers=1), crowd(4))

def test_a_round_of_a_cutting_method_with_a_median_stays_finite():
    from fedlit.laws import train
    state = train(HeteroFL(rates=(1., .5)) + SCAFFOLD() + CoordinateMedian(), small_world(), 'extract')
    assert all(v.isfinite().all() for v in state.params.values())

@pytest.mark.parametrize('m', [CoordinateMedian(), TrimmedMean(trim=.2), NormClipping(), Krum()], ids=repr)
def test_noise_for_a_mean_is_refused_where_there_is_none(m):
    for make in (lambda: DP() + m, lambda: m + DP()):
        with pytest.raises(ValueError, match="something else than a mean.*at='client'"): make()
    assert (DP(at='client') + m).parts and (m + DP(at='client')).parts

@pytest.mark.parametrize('m', [SOLO(), FedProto()], ids=repr)
@pytest.mark.parametrize('robust', [Krum(attackers=0), CoordinateMedian(), TrimmedMean(), NormClipping()], ids=repr)
def test_where_no_parameter_travels_there_is_nothing_to_combine(m, robust):
    a, b = (train(x, 'vmap', norm=False) for x in (m, m + robust))
    assert all((v[k] - b.personal[n][k]).abs().max() < 1e-12 for n, v in a.personal.items() for k in range(6))

def test_what_stays_at_home_is_not_combined():
    seen = []
    class Look(Method):
        def combine(self, deltas, weights):
            seen.append(deltas.keys())
            return deltas, weights
    home = train(FedPer() + Look(), 'loop', norm=False).personal
    assert home and seen and not any(home.keys() & k for k in seen)

def test_more_best_clients_than_there_are_is_said():
    with pytest.warns(UserWarning, match=r'Krum\(best=9\) of 4 clients is the mean of all'):
        train(Krum(attackers=0, best=9), 'vmap', rounds=1, norm=False)

def test_more_best_clients_than_are_honest_is_said():
    for best in (7, 8):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            server(Krum(attackers=2, best=best), crowd(9))
        assert len(said) == (best == 8)
    assert 'Krum(attackers=2, best=8) of 9 clients always averages an attacker' in str(said[0].message)
    assert 'best=7' in str(said[0].message)

def test_krum_does_not_take_the_running_statistics_of_a_liar():
    K, liar = 7, 3
    deltas = dict(w=torch.eye(K), running_mean=torch.zeros(K, 2)) # the origin is closest to all
    deltas['w'][liar] = 0
    deltas['running_mean'][liar] = 9e3
    out, weights = Krum(attackers=2).combine(deltas=deltas, weights=torch.full((K,), 1/K), params=dict(w=None))
    assert weights[liar] == 1 and (out['running_mean']*weights[:, None]).sum(0).abs().max() == 0
