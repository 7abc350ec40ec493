"The laws that every method obeys by existing."
import importlib, pkgutil, pytest, torch
import fedlit.laws as laws
import fedlit.methods as methods
from fedlit.ground.table import Table
from fedlit.method import Method, Sum
from fedlit.methods import DeCov, DepthFL, FedAvg, FedBN, FedProx, FedDecorr, MOON, FedAvgM, SCAFFOLD
from fedlit.parse import methods_by_name, method as parse
from fedlit.batches import Batches, groups, plan
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.server import aggregate, holders
from fedlit.state import start
from by_hand import averaged, sgd
from federation import (CLIENTS, COUNTS, CUTTING, ELSEWHERE, METHODS, TRIMMED, NEUTRAL, PROXY, SIZES, SUMS,
                        batches, difference, model, train, draw_cohort)

ids = lambda m: repr(m)
WORLD = {norm: laws.small_world(norm, bias=True) for norm in (True, False)}

def test_every_exported_method_is_under_the_laws():
    odd = {type(m).__name__ for m in METHODS + ELSEWHERE} ^ set(methods_by_name())
    assert not odd, f'{odd}: a method needs an instance in METHODS of tests/federation.py'

def test_every_public_method_is_exported():
    found = {n for m in pkgutil.iter_modules(methods.__path__) for n, c in
             vars(importlib.import_module(f'fedlit.methods.{m.name}')).items()
             if isinstance(c, type) and issubclass(c, Method) and not n.startswith('_')}
    odd = found - set(methods_by_name()) - {'Method', 'Sum', 'OwnNetwork', 'SubModel'} # which methods are made of
    assert not odd, f'{odd}: in nbs/methods, but not imported by nbs/methods/index.ipynb'

@pytest.mark.parametrize('norm', [True, False], ids=['batchnorm', 'plain'])
@pytest.mark.parametrize('m', METHODS + SUMS, ids=ids)
def test_loop_is_vmap(m, norm):
    seen = laws.check_executors(m, WORLD[norm])
    assert seen.holds, seen.reason
    assert ('extract' in seen.reason) == any(m is c for c in CUTTING + TRIMMED)

@pytest.mark.parametrize('momentum,decay', [(0., 0.), (.9, 0.), (.9, .01)])
def test_fedavg_is_plain_torch(momentum, decay):
    "An independent FedAvg: deep copies, torch.optim.SGD, averaged state dicts; parameters and running statistics."
    net = model()
    for r in range(3):
        data = batches(r)
        own = lambda k: [(data['x'][k, t, :n].double(), data['y'][k, t, :n]) for t, n in enumerate(COUNTS[k]) if n]
        ends = [sgd(net, own(k), lr=.1, momentum=momentum, weight_decay=decay) for k in range(4)]
        averaged(net, ends, [*range(4)], SIZES)
    for ex in ('loop', 'vmap'):
        state = train(FedAvg(), ex, local=Local(lr=.1, momentum=momentum, weight_decay=decay))
        have = {**state.params, **state.buffers}
        assert max((have[n].double()-v.double()).abs().max().item() for n, v in net.state_dict().items()) < 1e-9

def holds(law, m, norm=True):
    seen = law(m, WORLD[norm])
    assert seen.holds, seen.reason

@pytest.mark.parametrize('m', METHODS, ids=ids)
def test_fedavg_is_neutral(m): assert FedAvg() + m == m == m + FedAvg()

@pytest.mark.parametrize('m', NEUTRAL, ids=ids)
def test_a_zeroed_hyperparameter_is_fedavg(m): holds(laws.check_off, m)

@pytest.mark.parametrize('m', [MOON(), FedDecorr(beta=.3), DeCov()], ids=ids)
def test_loss_terms_commute(m):
    a, b = (train(both).params for both in (m + FedDecorr(), FedDecorr() + m))
    assert all((a[k] - b[k]).abs().max() < 1e-12 for k in a)

def test_parts_keep_their_own_memory():
    state = train(MOON() + MOON(mu=.5) + FedAvgM())
    assert list(state.client) == ['MOON', 'MOON 2', 'FedAvgM'] and set(state.server['FedAvgM']) == {'velocity'}

@pytest.mark.parametrize('m', METHODS + SUMS + ELSEWHERE, ids=ids)
def test_a_method_is_its_text(m):
    space = vars(methods)
    holds(laws.check_text, m)
    assert eval(repr(m), dict(space)) == m and parse(repr(m)) == m and hash(parse(repr(m))) == hash(m)

@pytest.mark.parametrize('m', [MOON(), SCAFFOLD(), FedBN()], ids=ids)
def test_clients_that_sit_out_keep_their_memory(m):
    before, after = train(m, rounds=1), train(m, rounds=2)
    out = sorted({*range(CLIENTS)} - {*draw_cohort(1)})
    home = {k: v for k, v in laws.contents(before).items() if isinstance(v, Table) and v.numel()}
    assert home and all(torch.equal(v[out], laws.contents(after)[k][out]) for k, v in home.items())

@pytest.mark.slow
@pytest.mark.parametrize('m', METHODS + SUMS + [m for m in ELSEWHERE if not isinstance(m, DepthFL)], ids=ids)
def test_every_law_holds(m): # of DepthFL, on a network with exits, in test_check.py
    report = laws.check(m)
    assert report.ok, report

def test_frozen_parameters_stay():
    net = model()
    net.c1.weight.requires_grad_(False)
    state = start(FedAvg(), net, CLIENTS)
    new = fed_round(Broadcast(FedAvg(), net, state, Local(lr=.1)), draw_cohort(0),
                    dict(batches(0), x=batches(0)['x'].double()), SIZES)
    assert 'c1.weight' not in {**new.params, **new.buffers} and torch.equal(new.fixed['c1.weight'], net.c1.weight)
    assert not torch.equal(new.params['c2.weight'], net.c2.weight)
    assert 'fixed/c1.weight' in laws.contents(new) # all that a state holds

# ---- batches ----

def test_groups_cover_every_live_client_once():
    for n in range(200):
        counts = torch.randint(0, 4, (7,), generator=torch.Generator().manual_seed(n))
        got = sorted(k for size, ks in groups(counts)
                     for k in (range(7)[ks] if isinstance(ks, slice) else ks) if counts[k] == size)
        assert got == (counts > 0).nonzero()[:, 0].tolist()

@pytest.mark.parametrize('drop_last', [False, True])
def test_plan_visits_every_sample_once_an_epoch(drop_last):
    parts = [torch.arange(0, 37), torch.arange(37, 50), torch.arange(50, 90)]
    index, counts = plan(parts, [2, 0, 1], Local(epochs=3, batch_size=8, drop_last=drop_last), seed=5, round=2)
    for row, k in enumerate([2, 0, 1]):
        seen = torch.cat([index[row, t, :n] for t, n in enumerate(counts[row])])
        assert set(seen.tolist()) <= set(parts[k].tolist())
        assert len(seen) == 3*(len(parts[k])//8*8 if drop_last else len(parts[k]))
        if not drop_last: assert seen.bincount(minlength=90)[parts[k]].eq(3).all()

@pytest.mark.parametrize('n', [1, 7, 8, 9, 15, 16, 33, 40])
def test_equal_batches_are_as_many_and_hold_every_sample_once(n):
    equal, usual = (plan([torch.arange(n)], [0], Local(epochs=2, batch_size=8, equal_batches=e))
                    for e in (True, False))
    index, counts = equal[0][0], equal[1][0]
    assert (counts > 0).sum() == (usual[1][0] > 0).sum() and counts.max() - counts.min() <= 1
    seen = torch.cat([index[t, :m] for t, m in enumerate(counts)])
    assert torch.equal(seen.bincount(minlength=n), torch.full((n,), 2))
    assert all((index[t, m:] == index[t, 0]).all() for t, m in enumerate(counts)) # empty places repeat the first

def test_equal_batches_leave_none_that_is_too_small():
    with pytest.raises(ValueError, match='client 0 has too few samples, 1, for a network with BatchNorm'):
        plan([torch.arange(1)], [0], Local(equal_batches=True), min_batch=2)
    with pytest.raises(ValueError, match='equal_batches=True.*drop_last'): Local(drop_last=True, equal_batches=True)

def test_plan_refuses_a_client_without_batches():
    with pytest.raises(ValueError, match='client 0 has too few samples, 3'):
        plan([torch.arange(3)], [0], Local(batch_size=8, drop_last=True))

def test_round_refuses_bad_input():
    net, data = model(), batches(0)
    state = start(FedAvg(), net, CLIENTS)
    with pytest.raises(ValueError, match='vmop'):
        fed_round(Broadcast(FedAvg(), net, state, Local()), draw_cohort(0), data, SIZES, executor='vmop')
    with pytest.raises(ValueError, match='must agree'):
        Batches(data['x'], data['y'][:, :2])
    with pytest.raises(ValueError, match='must be 4 finite numbers'):
        fed_round(Broadcast(FedAvg(), net, state, Local()), draw_cohort(0), dict(data, x=data['x'].double()), SIZES[:3])
    with pytest.raises(TypeError, match='features, logits'):
        fed_round(Broadcast(FedAvg(), torch.nn.Linear(6, 2), start(FedAvg(), torch.nn.Linear(6, 2), 6), Local()),
                  draw_cohort(0), data, SIZES)

@pytest.mark.parametrize('text', 'FedNova() FedDyn() SCAFFOLD() FedAvgM() FedALA() Scaler() OldCounts()'.split())
def test_what_is_no_method_twice_is_refused(text):
    m = parse(text)
    for other in (parse(text), m): # equal, and the very same
        with pytest.raises(ValueError, match='both decide'): m + other
    with pytest.raises(ValueError, match='both decide'): FedProx() + m + MOON() + parse(text)

def test_sum_is_a_monoid():
    a, b, c = FedProx(), MOON(), FedDecorr()
    assert (a+b)+c == a+(b+c) and isinstance(a+b, Sum) and (a+b).name == 'FedProx + MOON'

@pytest.mark.parametrize('statistics', ['averaged', 'home', 'recomputed'])
@pytest.mark.parametrize('m', [FedAvg(), FedDecorr(), CUTTING[0]], ids=ids)
def test_statistics_are_the_same_in_every_executor(m, statistics):
    "One policy, three executors; and each policy is another thing than the others."
    def go(executor, statistics=statistics):
        net = model()
        state = start(m, net, CLIENTS, statistics)
        for r in range(2):
            state = fed_round(Broadcast(m, net, state, Local(lr=.1)), draw_cohort(r),
                              dict(batches(r), x=batches(r)['x'].double()), SIZES, executor=executor)
        return state
    one = go('loop')
    assert all(difference(one, go(e)) < 1e-9 for e in ('vmap', 'extract'))
    assert bool(one.personal) == (statistics == 'home')
    other = go('loop', 'recomputed' if statistics != 'recomputed' else 'averaged')
    assert not torch.allclose(one.buffers['n1.running_var'], other.buffers['n1.running_var'])

@pytest.mark.parametrize('m', CUTTING, ids=ids)
def test_every_entry_is_trained_by_somebody_or_stays(m):
    "Two weak clients: an entry that neither trains has not moved, most of the rest has."
    holds(laws.check_masked, m, norm=False)
    net = model(norm=False)
    state, local, two = start(m, net, CLIENTS), Local(lr=.1), slice(1, 3)
    data = Batches(**{k: (v.double() if k == 'x' else v)[two] for k, v in batches(0).items()})
    sent = Broadcast(m, net, state, local, proxy=PROXY)
    out = local_phase(sent, [4, 5], data)
    new, many = aggregate(sent, [4, 5], out, SIZES[two]), holders(out['mask'], state.params, 2)
    seen = {k: n.expand_as(state.params[k]) for k, n in many.items()}
    assert all(torch.equal(new.params[k][n == 0], state.params[k][n == 0]) for k, n in seen.items())
    moved = torch.cat([(new.params[k] != state.params[k])[n > 0] for k, n in seen.items()])
    assert moved.double().mean() > .3 and {int(v) for n in seen.values() for v in n.unique()} <= {0, 1, 2}
    if 'dynamic' not in repr(m): assert any((n == 0).any() for n in seen.values())
