"Without one client: a replay in which the rest is as it was."
import numpy as np, pytest, torch
from fedlit.data import load
from fedlit.methods import (FedAvg, FedAvgM, FedBN, FedCAC, FedDecorr, FedDyn, FedPer, FedNova, HeteroFL, MOON,
                            SCAFFOLD)
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.parse import methods_by_name
from fedlit.participation import draw_clients
from fedlit.result import Run
from fedlit.run import Federation, federate, federating
from fedlit.scores import tests_of as own_tests
from fedlit.ground.tree import leaves
from federation import same

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
FAST = dict(local=Local(epochs=1, batch_size=64), progress=False)
HALF = dict(rounds=2, participation=1/3, seed=2)
NEVER = next(iter({*range(6)} - {k for r in range(2) for k in draw_clients(6, 1/3, 2, r)}))

def net(seed=0, norm='batch'): return build('mlp', TASK, seed=seed, hidden=(16,), features=8, norm=norm)
def run(method=None, **kw): return federate(net(), TASK, CLIENTS, method or FedAvg(), **{**FAST, **kw})

METHODS = [FedAvg(), MOON() + FedDecorr(), SCAFFOLD() + FedAvgM(), FedDyn(), FedNova(), FedBN() + FedPer(), FedCAC(),
           HeteroFL(rates=(1., .5))]

@pytest.mark.filterwarnings('ignore:.*hardly vary')
@pytest.mark.parametrize('ex', [pytest.param('loop', marks=pytest.mark.slow), 'vmap'])
@pytest.mark.parametrize('m', METHODS, ids=repr)
def test_without_a_client_that_never_took_part_it_is_the_run_itself(m, ex):
    first = run(m, executor=ex, **HALF)
    w = first.without(client=NEVER)
    assert same(first, w.run) and w.difference == 0 and w.moved == 0 and (w.history.difference == 0).all()
    assert w.run.settings['without'] == [NEVER] and first.settings['without'] is None

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', [name for name in methods_by_name() if name != 'DepthFL']) # another network
def test_so_it_is_with_every_method(name):
    options = dict(StructuredDeCov=dict(groups=2), FedDF=dict(steps=2), FedET=dict(steps=2),
                   FedDecomp=dict(lora_epochs=1), FedGSE=dict(pool=12))
    method, model = methods_by_name()[name](**options.get(name, {})), net(norm='none' if 'DP' in name else 'batch')
    proxy = (TASK.normalise(TASK.x_test[:24]), TASK.y_test[:24]) if name == 'FedGSE' else TASK.x_test[:20]
    first = federate(model, TASK, CLIENTS, method, proxy=proxy, **FAST, **HALF)
    assert same(first, first.without(client=NEVER).run)

@pytest.mark.parametrize('m', [MOON(), SCAFFOLD(), FedPer()], ids=repr)
def test_nothing_of_the_client_is_left(m):
    w = run(m, rounds=2).without(client=3)
    s = w.run.state
    tables = leaves(dict(client=s.client, personal=s.personal))
    assert tables and all(t.written() == [0, 1, 2, 4, 5] for t in tables)
    assert (w.run.history.participants == 5).all() and (w.before.history.participants == 6).all()

def test_the_others_train_as_they_did():
    a = run(rounds=1, executor='loop', keep_locals=True)
    b = a.without(client=3, keep_locals=True).run
    assert b.locals['who'] == [0, 1, 2, 4, 5]
    for k, v in a.locals['params'].items(): assert torch.equal(v[b.locals['who']], b.locals['params'][k])
    p = torch.tensor([float(len(CLIENTS[k])) for k in b.locals['who']])
    for k, v in b.locals['params'].items():     # and the server averages the five by their sizes
        assert torch.allclose(b.state.params[k], torch.tensordot(p/p.sum(), v, 1), atol=1e-6)

def test_a_round_that_only_the_client_had_changes_nothing():
    one = dict(rounds=3, participation=.01, seed=1)
    alone = draw_clients(6, .01, 1, 1)[0]
    w = run(**one).without(client=alone)
    h = w.run.history
    assert h.participants.tolist() == [int(draw_clients(6, .01, 1, r) != [alone]) for r in range(3)]
    assert h.accuracy[1] == h.accuracy[0] and h['round'].tolist() == [1, 2, 3] and h.drift.isna()[1]
    with_tests = run(FedPer(), **one).without(client=alone)
    assert with_tests.clients()['personal without'].isna().tolist() == [k == alone for k in range(6)]

def test_clients_are_tested_in_a_last_round_that_nobody_trained_in():
    alone = draw_clients(6, .01, 1, 1)[0]
    got = run(FedPer(), rounds=2, participation=.01, seed=1, without=(alone,))
    assert got.history.participants.tolist() == [1, 0] and got.history.personal.notna().all()
    assert got.per_client(TASK, own_tests(TASK, CLIENTS, 1)).personal.mean() == pytest.approx(got.last['personal'])

def test_a_run_that_went_on_is_compared_where_both_were_tested(tmp_path):
    how = dict(evaluate_every=4, checkpoint=tmp_path/'run')
    run(rounds=2, **how)
    w = run(rounds=5, **how).without(3)
    assert w.before.history.accuracy.dropna().index.tolist() == [1, 3, 4]
    assert w.history['round'].tolist() == [2, 4, 5] and 'after round 5' in repr(w)
    later = run(rounds=9, **{**how, 'evaluate_every': 7}, minutes=0).without(3) # a round that is not tested
    assert later.run.state.round == 6 and 'after round 6' in repr(later) # the run is replayed, and tested there
    assert later.before.last['accuracy'] + later.difference == pytest.approx(later.run.last['accuracy'])
    *_, broken = zip(range(3), federating(net(), TASK, CLIENTS, FedAvg(), rounds=9, evaluate_every=2, **FAST))
    w, seen = broken[1].without(3), broken[1].influence([3])
    assert w.history['round'].tolist() == [2, 3] and 'after round 3' in repr(w) # a replay is tested where it ends
    assert seen.difference[0] == w.difference == w.run.history.accuracy[2] - run(rounds=3).history.accuracy[2]

def test_a_run_that_was_not_tested_yet_is_refused():
    early = next(federating(net(), TASK, CLIENTS, FedAvg(), rounds=9, evaluate_every=2, **FAST))
    for ask in (lambda: early.without(3), early.influence):
        with pytest.raises(ValueError, match='it stopped before the first test'): ask()

def test_a_run_from_a_file_is_replayed_as_well(tmp_path):
    first = run(SCAFFOLD(), rounds=2, evaluate_every=2)
    back = Run.load(first.save(tmp_path/'run.safetensors'))
    assert back.origin is None and same(first.without(3).run, back.without(3, task=TASK, clients=CLIENTS).run)
    assert same(first, federate(net(), TASK, CLIENTS, SCAFFOLD(), rounds=2, evaluate_every=2,
                                without=(), **FAST))
    with pytest.raises(ValueError, match='task=..., clients='): back.without(3)
    with pytest.raises(ValueError, match='other first weights'):
        back.without(3, model=net(1), task=TASK, clients=CLIENTS)
    with pytest.raises(ValueError, match='another partition'):
        back.without(3, task=TASK, clients=dirichlet(TASK.y_train, 6, .5, seed=1))

def test_another_version_replays_the_run_too(tmp_path):
    back = Run.load(run(rounds=1).save(tmp_path/'run.safetensors'))
    back.settings['torch'] = '1.0'
    back.history['accuracy'] = 0.
    w = back.without(3, task=TASK, clients=CLIENTS)
    assert w.before.history.accuracy[0] > 0 and w.before.state.clients == 6

def test_a_network_that_was_trained_in_the_meantime_is_refused():
    model = net()
    first = federate(model, TASK, CLIENTS, FedAvg(), rounds=1, **FAST)
    model.load_state_dict(first.model.state_dict())
    with pytest.raises(ValueError, match='before round 1'): first.without(3)

@pytest.mark.parametrize('left, kind, word', [((9,), ValueError, 'no client 9; the 6 clients are 0 to 5'),
                                              (-1, ValueError, 'no client -1'),
                                              (range(6), ValueError, 'none of the 6'),
                                              (list(range(6)), ValueError, 'none of the 6')])
def test_clients_that_cannot_be_left_out(left, kind, word):
    with pytest.raises(kind, match=word): run(rounds=1).without(left)
    if not isinstance(left, int):
        with pytest.raises(kind, match=word): run(rounds=1, without=left)

def test_ranks_are_sent_back_to_their_own_command():
    first = run(rounds=1)
    first.settings['executor'] = 'torchrun:vmap x 2'
    with pytest.raises(ValueError, match='without=.3,. on the same ranks'): first.without(3)

def test_a_checkpoint_without_a_client_is_another_run(tmp_path):
    file = tmp_path/'c.safetensors'
    run(rounds=1, without=[3], checkpoint=file)
    with pytest.raises(ValueError, match='without'): run(rounds=2, checkpoint=file)
    assert len(run(rounds=2, without=[3], checkpoint=file).history) == 2

def test_twice_without_and_round_by_round():
    *_, last = federating(net(), TASK, CLIENTS, FedAvg(), rounds=2, **FAST)
    twice, both = last.without(3).run.without(1), last.without((1, 3))
    assert same(twice.run, both.run) and twice.before.settings['without'] == [3]
    assert 'Without clients 1, 3' in repr(both)

def test_what_changed_is_counted_by_client_and_by_class():
    first = run(rounds=2, local=Local(epochs=2))
    w = first.without(3)
    who, what = w.clients(), w.classes()
    assert who['left out'].tolist() == [k == 3 for k in range(6)] and 'personal' not in who
    assert who['global difference'].tolist() == (who['global without'] - who['global']).tolist()
    size = TASK.y_test.bincount(minlength=10).double()
    for column, r in (('accuracy', first), ('without', w.run)):
        weighed = (torch.tensor(what[column])*size).sum()/size.sum()
        assert weighed == pytest.approx(r.history.accuracy.iloc[-1])
    assert what['left out'].tolist() == pytest.approx((TASK.y_train[CLIENTS[3]].bincount(minlength=10)
                                                       /TASK.y_train.bincount(minlength=10)).tolist())
    assert 0 < w.moved < 2

def test_influence_is_each_client_in_turn():
    first = run(rounds=1)
    seen = first.influence([1, 3])
    assert seen.client.tolist() == [1, 3]
    for k, d, m in zip(seen.client, seen.difference, seen.moved):
        assert (d, m) == (first.without(k).difference, first.without(k).moved)
    assert first.without(3).run.influence([3, 4]).client.tolist() == [4]

@pytest.mark.parametrize('which', [3, (3, 3), [3], {3}, range(3, 4), np.array([3]), np.int64(3), torch.tensor([3])],
                         ids=str)
def test_clients_to_leave_out_may_be_written_in_any_way(which):
    asked = Federation(net(), TASK, CLIENTS, FedAvg(), without=which).resolve()
    assert asked.without == (3,) and type(asked.without[0]) is int

@pytest.mark.parametrize('which', ['3', 3.0, (True,), None, ('3',)], ids=str)
def test_what_is_no_client_is_not_left_out(which):
    with pytest.raises(TypeError, match='client numbers'): federate(net(), TASK, CLIENTS, FedAvg(), 1, without=which)
    with pytest.raises(TypeError, match='client numbers'): run(rounds=1).without(which)

class Breaks(FedAvg):
    "Its server diverges in the second round."
    def merge(self, delta, server, round): return {k: v*(torch.nan if round else 1) for k, v in delta.items()}, server

@pytest.mark.filterwarnings('ignore')
def test_a_run_that_diverged_is_compared_in_its_last_round():
    first = run(Breaks(), rounds=2, bad_clients='report')
    w, each = first.without(3), first.influence([3])
    assert w.history['round'].tolist() == [1] and np.isnan(w.difference) and repr(w).endswith('after round 2')
    assert each[['accuracy', 'without', 'difference']].isna().all().all()
