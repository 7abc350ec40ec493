"Do methods add up: the arithmetic by hand, the families, what cannot be, and runs that go on."
import json, math
import numpy as np, pandas as pd, pytest, torch
from scipy import stats
from types import SimpleNamespace
import fedlit
from fedlit import cli
from fedlit.cli import main
from fedlit.data import load
from fedlit.ground.files import result_path
from fedlit.methods import FedAvg, FedDF, FedDecorr, FedProx, FedRolex, HeteroFL
from fedlit.papers.evidence import interval, sign_flips
from fedlit.papers.interactions import Interactions, fewest, interactions, sums
from fedlit.local import Local
from fedlit.compare import compare, experiment
from fedlit.setting import _keep_task

A, B, C = FedProx(mu=.1), FedDecorr(), FedProx(mu=1.)
QUICK = dict(rounds=1, local=Local(epochs=1, batch_size=64), progress=False,
             options=(('hidden', (16,)), ('features', 8), ('norm', 'batch')))

def made(curves, methods=(A, B, C)):
    "From accuracies: method -> one a seed."
    runs = {(repr(m), s): v if isinstance(v, str) else [v] for m, vs in curves.items() for s, v in enumerate(vs)}
    return Interactions(list(methods), list(range(len(next(iter(curves.values()))))), runs, {})

def drawn(n=9, seed=0, lift=0.):
    "Accuracies of FedAvg, three methods and their pairs; A + B has `lift` beyond its parts."
    rng = np.random.default_rng(seed)
    base = rng.uniform(.5, .7, n)
    noise = lambda: rng.normal(0, .005, n)
    out = {FedAvg(): base, A: base + .02 + noise(), B: base + .03 + noise(), C: base + noise()}
    return {**out, A + B: base + .05 + lift + noise(), A + C: base + .02 + noise(), B + C: base + .03 + noise()}

def test_it_is_the_arithmetic_of_four_runs_a_seed():
    curves = drawn(seed=1, lift=.04)
    t, e = made(curves).pairs(), made(curves).effects()
    d = 100*(curves[A + B] - curves[A] - curves[B] + curves[FedAvg()])
    row = t.iloc[0]
    assert (row.a, row.b) == (repr(A), repr(B)) and row['mean'] == pytest.approx(d.mean())
    assert (row.low, row.high) == pytest.approx(interval(d)) and row.p == pytest.approx(sign_flips(d))
    assert t.adjusted.tolist() == pytest.approx(stats.false_discovery_control(t.p).tolist())
    assert t.verdict.tolist() == ['above zero', 'undecided', 'undecided'] and math.isnan(t.needs[0]) and t.needs[1] > 9
    assert e.verdict.tolist() == ['above zero', 'above zero', 'undecided'] and e['mean'][0] == pytest.approx(
        100*(curves[A] - curves[FedAvg()]).mean())
    assert row.gain == pytest.approx(100*(curves[A + B] - curves[FedAvg()]).mean())

def test_what_all_runs_of_a_seed_share_does_not_count():
    curves = drawn(lift=.02)
    shift = np.random.default_rng(1).uniform(-.2, .2, 9)
    shifted = made({m: v + shift for m, v in curves.items()}).pairs()
    assert shifted['mean'].tolist() == pytest.approx(made(curves).pairs()['mean'].tolist())

@pytest.mark.slow
def test_false_alarms_over_all_pairs_are_rare():
    "Under no interaction at all, in how many of a hundred matrices is any pair decided?"
    alarms = sum((made(drawn(seed=s)).pairs().verdict != 'undecided').any() for s in range(100))
    assert alarms <= 5 + 4*math.sqrt(100*.05*.95)

@pytest.mark.parametrize('pairs', [1, 3, 10, 45])
def test_with_fewer_seeds_no_pair_can_be_decided(pairs):
    n = fewest(pairs)
    lowest = lambda n: stats.false_discovery_control([sign_flips(np.ones(n) + np.arange(n)/9)] + [1.]*(pairs-1))[0]
    assert lowest(n) <= .05 and (n == 6 or lowest(n-1) > .05)

def test_a_ceiling_is_no_interaction_on_log_odds():
    logit = lambda p: np.log(p/(1-p))
    back = lambda z: 1/(1 + np.exp(-z))
    rng = np.random.default_rng(0)
    base = rng.normal(2.5, .2, 9)
    z = {FedAvg(): base, A: base + 1.2, B: base + 1.2, A + B: base + 2.4}
    seen = made({m: back(v + rng.normal(0, .02, 9)) for m, v in z.items()}, (A, B))
    assert seen.pairs().verdict[0] == 'below zero' and seen.pairs('log_odds').verdict[0] == 'undecided'
    assert logit(.9) == pytest.approx(made({FedAvg(): [.9]}, (A, B)).values(FedAvg(), 'log_odds')[0])
    with pytest.raises(ValueError, match='points, log_odds'): seen.pairs('log')

@pytest.mark.parametrize('edge', [0., 1.])
def test_an_accuracy_of_none_or_all_has_no_log_odds(edge):
    curves = drawn()
    curves[A] = np.r_[edge, curves[A][1:]]
    seen = made(curves)
    for t in (seen.pairs('log_odds'), seen.effects('log_odds')):
        assert 'seed 0' in t.why[0] and 'log_odds' in t.why[0] and t.verdict.isna()[0]
        assert not t.why[2] and t.verdict.notna()[2]
    seen.plot(scale='log_odds')
    assert not seen.pairs().why.any()

def test_pairs_that_cannot_be_keep_an_empty_cell_with_the_reason():
    methods = [HeteroFL(rates=(1., .5)), FedRolex(rates=(1., .5)), FedDF()]
    seen = interactions(methods, seeds=(0,), **QUICK)
    t = seen.pairs()
    assert 'which coordinates a client has' in t.why[0] and 'FedDF' in t.why[1] and 'FedDF' in t.why[2]
    assert t.verdict.isna().all() and t['mean'].isna().all() and seen.effects().why[:2].tolist() == ['', '']
    assert 'empty: ' in repr(seen) and sum(x.get_text() == 'empty' for x in seen.plot().texts) == 4

def test_runs_away_is_a_reason_and_no_number():
    curves = drawn()
    curves[A + B] = [*curves[A + B][:-1], 'FloatingPointError: client 3']
    assert 'seed 8: FloatingPointError: client 3' in made(curves).pairs().why[0]
    def train(m, seed, checkpoint):
        loss = [1, math.nan if m == A else 1]
        return SimpleNamespace(history=pd.DataFrame(dict(round=[1, 2], accuracy=[.5, .1], loss=loss)))
    t = interactions([A, B], seeds=(0, 1), train=train, asked={}, progress=False)
    assert 'test loss is not a number after round 2' in t.pairs().why[0] and t.effects().why.tolist()[1] == ''

def test_rounds_that_were_not_tested_are_no_reason():
    columns = dict(round=[1, 2, 3], accuracy=[math.nan, .5, .6], loss=[math.nan, 1., 1.])
    run = SimpleNamespace(history=pd.DataFrame(columns))
    seen = interactions([A, B], seeds=(0,), train=lambda *_: run, asked={}, progress=False)
    assert {*map(tuple, seen.runs.values())} == {(.5, .6)}
    run.history.loc[2, ['accuracy', 'loss']] = math.nan # the last round is always tested
    with pytest.raises(FloatingPointError, match='after round 3'):
        interactions([A, B], seeds=(0,), train=lambda *_: run, asked={}, progress=False)

def test_shares_other_than_accuracy_add_up_too_and_errors_do_not():
    h = dict(round=[1], average_precision=[.5], f1=[.2], loss=[1.])
    train = lambda *_: SimpleNamespace(history=pd.DataFrame(h))
    seen = interactions([A, B], seeds=(0,), train=train, asked={}, progress=False)
    assert {*map(tuple, seen.runs.values())} == {(.5,)}
    h = dict(round=[1], mse=[30.], loss=[30.])
    with pytest.raises(ValueError, match='mse'): interactions([A, B], seeds=(0,), train=train, asked={}, progress=False)

@pytest.mark.parametrize('methods, word', [([A], 'at least two'), ([A, A], '2 times'), ([A, FedAvg()], 'leave it out')])
def test_requests_without_a_pair(methods, word):
    with pytest.raises(ValueError, match=word): sums(methods)

def on_compare(seeds):
    return compare([FedAvg()], alpha=10., seeds=seeds, rounds=1, local=Local(epochs=.1), columns=()).seed.tolist()

def on_interactions(seeds):
    run = SimpleNamespace(history=pd.DataFrame(dict(round=[1], accuracy=[.5], loss=[1.])))
    return interactions([A, B], seeds, train=lambda *_: run, asked={}, progress=False).seeds

@pytest.mark.parametrize('call', [on_compare, on_interactions])
def test_seeds_mean_in_python_what_they_mean_on_the_command_line(call):
    assert call(2) == call((0, 1)) == call(range(2)) == call(np.int64(2)) == call(torch.arange(2)) == [0, 1]
    assert call([7]) == [7]
    for wrong in (0, -1, True, 1.5, 'ab', (1, -1), (1, 2.), (True,)):
        with pytest.raises(ValueError, match='seeds=.*, but it must be a number of seeds'): call(wrong)
    with pytest.raises(ValueError, match='3 is there twice'): call((3, 5, 3))
    with pytest.raises(ValueError, match='one or more'): call(())

def test_it_goes_on_from_its_folder_and_refuses_another(tmp_path):
    whole = interactions([A, B], seeds=(0,), **QUICK)
    assert 'points, one seed, adjusted' in repr(whole) and not any('nan' in t.get_text() for t in whole.plot().texts)
    count = []
    class Stop(Exception): pass
    def stopping(m, s, checkpoint):
        if len(count) == 2: raise Stop
        count.append(m)
        return experiment(**{'alpha': .1, **QUICK})(m, s, checkpoint).run()
    asked = {k: str(v) for k, v in QUICK.items() if k != 'progress'}
    with pytest.raises(Stop), pytest.warns(UserWarning, match='2 of 4 runs are finished'):
        interactions([A, B], (0,), tmp_path, stopping, asked, progress=False)
    assert len(Interactions.load(tmp_path/'interactions.json').runs) == 2
    on = interactions([A, B], (0,), tmp_path, **QUICK)
    assert on.runs == whole.runs and [f.name for f in tmp_path.iterdir()] == ['interactions.json']
    with pytest.raises(ValueError, match='alpha'): interactions([A, B], (0,), tmp_path, alpha=1., **QUICK)

def test_two_processes_with_other_seeds_share_a_folder(tmp_path):
    def ask(seed, before=lambda: None, **asked):
        def train(*_):
            before()
            return SimpleNamespace(history=pd.DataFrame(dict(round=[1], accuracy=[seed/10], loss=[1.])))
        return interactions([A, B], (seed,), tmp_path, train, asked, progress=False)
    def meanwhile(*args, **kw): # another process runs from beginning to end during the first run of this one
        todo = iter([lambda: ask(*args, **kw)])
        return lambda: next(todo, lambda: None)()
    ask(3, meanwhile(5))
    assert [s for _, s in Interactions.load(tmp_path/'interactions.json').runs].count(5) == 4
    (tmp_path/'interactions.json').unlink()
    with pytest.raises(ValueError, match='alpha: 1 there, None here'), pytest.warns(match='0 of 4|1 of 4'):
        ask(3, meanwhile(5, alpha='1'))

def test_a_folder_of_other_data_is_refused(tmp_path):
    "Whose description is the same, but not its samples; and a function needs no address to be known again."
    some = lambda seed: load('digits').subset(200, seed=seed, test=100)
    halves = lambda task, clients, seed: list(torch.arange(len(task.y_train)).chunk(2))
    ask = lambda task, split: interactions([A, B], (0,), tmp_path, task=task, partition=split, **QUICK)
    was = ask(some(0), halves)
    assert str(some(0)) == str(some(1)) and ask(some(0), lambda *a: halves(*a)).runs == was.runs
    with pytest.raises(ValueError, match='other runs .another partition.; choose another folder'):
        ask(some(0), lambda *a: halves(*a)[::-1])
    with pytest.raises(ValueError, match='other runs .other labels; other images'): ask(some(1), halves)

def test_the_command_line_refuses_it_too(tmp_path):
    def ask(sign, seeds):
        x = np.random.default_rng(0).normal(size=(120, 3))
        pd.DataFrame(dict(a=x[:, 0], b=x[:, 1], y=(x[:, 0] + sign*x[:, 1] > 0).astype(int))).to_csv(tmp_path/'t.csv')
        main(['interactions', repr(A), 'FedAvgM()', '--data', str(tmp_path/'t.csv'), '--y', 'y', '--clients', '2',
              '--rounds', '1', '--epochs', '1', '--quiet', '--out', str(tmp_path/'out'), '--seeds', *seeds])
    ask(1, ['0', '1'])
    ask(1, ['0', '1', '2'])
    _keep_task.cache_clear() # as in another process
    with pytest.raises(SystemExit, match='has other runs .*other labels'): ask(-1, ['3', '4'])

def interrupted_after(n):
    "A function that trains, until Ctrl-C."
    left = iter(range(n))
    def train(*_, **kw):
        if next(left, None) is None: raise KeyboardInterrupt
        return SimpleNamespace(history=pd.DataFrame(dict(round=[1], accuracy=[.5], loss=[1.])))
    return train

@pytest.mark.parametrize('n, seeds', [(6, [3]), (2, [3, 5])]) # with one whole seed, and with none
def test_an_interrupt_has_the_runs_that_were_finished(n, seeds, tmp_path):
    def stopped(folder):
        with pytest.raises(KeyboardInterrupt, match=f'{n} of 8 runs are finished; .* e.runs; .*the same call') as e:
            interactions([A, B], (3, 5), folder, interrupted_after(n), {}, False)
        return e.value
    seen = stopped(None).runs
    assert len(seen.runs) == n and seen.seeds == seeds and any(seen.pairs().why) == (n == 2)
    assert 'with folder= the same call would go on' in str(stopped(None)) and 'would' not in str(stopped(tmp_path))

def test_the_command_line_keeps_them_too(tmp_path, monkeypatch, capsys):
    ask, file = ['interactions', repr(A), repr(B), '--seeds', '3', '5', '--quiet', '--json'], tmp_path/'t.json'
    monkeypatch.setattr(cli, '_federate', interrupted_after(6))
    with pytest.raises(SystemExit, match='interrupted; nothing but this table and .*t.json is kept without --out'):
        main([*ask, str(file)])
    assert len(json.loads(file.read_text('utf-8'))['runs']) == 6 and 'FedProx + FedDecorr' in capsys.readouterr().out
    monkeypatch.setattr(cli, '_federate', interrupted_after(0))
    with pytest.raises(SystemExit, match='interrupted; nothing is kept without --out'): main([*ask, str(file)])

def test_it_trains_what_compare_trains():
    kw = {k: v for k, v in QUICK.items() if k != 'progress'}
    theirs = compare([FedAvg(), A, B, A + B], alpha=.1, seeds=(0,), columns=('accuracy',), **kw).accuracy.tolist()
    ours = interactions([A, B], seeds=(0,), **QUICK)
    assert [ours.values(m)[0]/100 for m in (FedAvg(), A, B, A + B)] == pytest.approx(theirs)

def test_the_command_line_is_the_function(tmp_path, capsys):
    assert fedlit.interactions is interactions
    quick = ['--seeds', '1', '--rounds', '1', '--epochs', '1', '--batch-size', '64', '--alpha', '0.1', '--quiet']
    main(['interactions', repr(A), repr(B), *quick,
          '--option', 'hidden=(16,)', 'features=8', '--out', str(tmp_path), '--json', str(tmp_path/'t.json')])
    ours = interactions([A, B], seeds=(0,), **QUICK)
    assert json.loads((tmp_path/'t.json').read_text(encoding='utf-8'))['runs'] == ours.content()['runs']
    assert (tmp_path/'interactions.png').exists() and 'FedProx + FedDecorr' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='at least two'): main(['interactions', repr(A), '--quiet'])

def test_the_committed_runs_are_whole():
    five = Interactions.load(result_path('interactions/digits.json'))
    assert len(five.methods) == 5 and len(five.seeds) >= fewest(10) and not five.pairs().why.any()
    assert len(five.runs) == 16*len(five.seeds)
