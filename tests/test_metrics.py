"""Metrics of one's own: columns beside those of accuracy, whoever trains, and errors that name the metric.

The oracle is a metric that is accuracy: its columns must be those that a run has anyway."""
import math
from functools import partial
import numpy as np, pandas as pd, pytest, torch
import test_distributed as ranks
from sklearn.metrics import f1_score
from fedlit.data import Task, load
from fedlit.ground.files import read_tensors, write_tensors
from fedlit.measure import evaluate
from fedlit.method import FedAvg
from fedlit.methods import DP, FedBN, FedPara, FedPer, HeteroFL
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit import run as running
from fedlit.result import FORMAT, Run
from fedlit.compare import compare
from fedlit.run import Federation, Simulation, federate, federating
from federation import sites
from dataclasses import replace

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
TESTS = running.tests_of(TASK, CLIENTS)

def net(): return build('mlp', TASK, seed=0, norm='batch')

def hits(logits, y): return (logits.argmax(1) == y).float().mean()
def f1(logits, y): return f1_score(y, logits.argmax(1), average='macro', zero_division=0)

def go(method=None, rounds=2, **kw):
    return federate(net(), TASK, CLIENTS, method or FedAvg(), rounds, Local(epochs=1, batch_size=64), progress=False,
                    **kw)

def plain(run, *more): return run.history.drop(columns=['seconds', 'peak_mb', *more])

def is_accuracy(run, name):
    "The columns of a metric that is accuracy, beside those of accuracy."
    h = run.history
    pairs = {name: 'accuracy', f'{name}_before': 'accuracy_before'}
    pairs |= {f'{name}_{k}': k for k in h if k.partition('_')[0] in ('global', 'personal')}
    assert [k for k in h if k.startswith(name)] == [k for k in h if k in pairs], list(h)
    for mine, theirs in pairs.items(): np.testing.assert_allclose(h[mine], h[theirs], atol=1e-6, err_msg=mine)
    return len(pairs)

@pytest.mark.parametrize('kw', [
    dict(), dict(tests=TESTS, participation=.5), dict(method=FedPer()),
    dict(method=FedBN(), evaluate_every=2, rounds=3), dict(executor='loop', tests=TESTS),
    dict(executor='threads', record=False), dict(executor='extract', tests=TESTS, method=HeteroFL(rates=(1., .5)))],
    ids=['plain', 'tests', 'FedPer', 'sometimes', 'loop', 'threads', 'extract'])
def test_a_metric_that_is_accuracy_has_its_columns(kw):
    run = go(metrics=dict(hits=hits), **kw)
    assert is_accuracy(run, 'hits') == (2 if not (kw.get('tests') or kw.get('method')) else 12)
    assert run.settings['metrics'] == ['hits']
    bare = go(**kw)
    assert plain(bare).equals(plain(run, *[k for k in run.history if k.startswith('hits')])) # to the last bit
    assert all(torch.equal(v, bare.state.params[k]) for k, v in run.state.params.items())

def _on_ranks(rank, path):
    run = ranks.digits(2, metrics=dict(hits=hits), executor='torchrun:vmap')
    run.history.to_json(path/f'{rank}.json', double_precision=15)

def test_on_two_ranks(tmp_path):
    ranks.launch(_on_ranks, 2, tmp_path)
    alone = ranks.digits(2, metrics=dict(hits=hits))
    for rank in range(2):
        run = Run(FedAvg(), pd.read_json(tmp_path/f'{rank}.json'), None, {})
        assert is_accuracy(run, 'hits') == 12
        np.testing.assert_allclose(run.history.filter(like='hits'), alone.history.filter(like='hits'), atol=5e-3)

def test_scikit_learns_functions_fit():
    run = go(metrics=dict(f1=f1), tests=TESTS)
    assert run.last['f1'] == f1_score(TASK.y_test, run.predict(TASK.x_test), average='macro', zero_division=0)
    own = [f1_score(TASK.y_test[t], run.predict(TASK.x_test[t]), average='macro', zero_division=0) for t in TESTS]
    assert run.last['f1_global_after'] == pytest.approx(np.mean(own))
    assert run.last['f1_global_after_sd'] == pytest.approx(np.std(own, ddof=1))
    seen = run.per_client(TASK, TESTS, dict(f1=f1))
    assert list(seen) == ['client', 'test samples', 'global', 'personal', 'f1_global', 'f1_personal']
    assert seen['f1_global'].tolist() == own

def test_torchmetrics_functions_fit():
    functional = pytest.importorskip('torchmetrics.functional')
    run = go(metrics=dict(f1=f1, theirs=partial(functional.f1_score, task='multiclass', num_classes=10,
                                                average='macro')))
    np.testing.assert_allclose(run.history['theirs'], run.history['f1'], atol=1e-6)

def vector(logits, y): return logits.mean(0)
def wrong(logits, labels): raise KeyError('no such class')

@pytest.mark.parametrize('metrics,message', [
    (dict(f1=3), "metrics: 'f1' is 3, but it must be a function of \\(logits, y\\) that returns a number"),
    ([f1], 'metrics is a list, but it must be a dict'),
    (dict(accuracy=hits), "metrics: 'accuracy' is a column of the history already"),
    (dict(personal_before_sd=hits), "'personal_before_sd' is a column of the history already"),
    ({1: hits}, 'metrics: 1 is no name'), ({'': hits}, "metrics: '' is no name"),
    (dict(a=hits, a_before=hits), "'a_before' is a column of the metric 'a'"),
    (dict(a=vector), r"metric 'a', asked of logits \(359, 10\) .* \(359,\), returned a Tensor of shape \(10,\)"),
    (dict(a=wrong), r"metric 'a', asked of .* failed: KeyError: 'no such class'"),
    (dict(a=lambda logits: 1.), "metric 'a', .* failed: TypeError: .*positional"),
    (dict(a=lambda logits, y: None), "metric 'a', .* returned a NoneType"),
    ], ids=lambda v: v if isinstance(v, str) else 'given')
def test_what_is_no_metric_is_refused_before_training(metrics, message, monkeypatch):
    monkeypatch.setattr(Simulation, 'rounds', lambda *_: pytest.fail('training began'))
    with pytest.raises((ValueError, TypeError), match=message): go(metrics=metrics)

def test_what_watch_returns_is_a_part_of_the_history(tmp_path):
    said = dict(one=torch.tensor(.5), two=np.float32(.25), each=torch.ones(3), rows=(np.arange(2), [torch.tensor(7)]),
                none=None, word='yes')
    run = go(rounds=1, checkpoint=tmp_path/'run', watch=lambda *_: said)
    seen = run.history.iloc[0][list(said)].to_dict()
    assert seen == dict(one=.5, two=.25, each=[1.]*3, rows=[[0, 1], [7]], none=None, word='yes')
    back = Run.load(tmp_path/'run').history.iloc[0]
    assert all(back[k] == v for k, v in seen.items() if v is not None) and 'one' in run.last
    assert plain(go(watch=lambda *_: None)).equals(plain(go()))

@pytest.mark.parametrize('kw', [
    dict(), dict(executor='loop'), dict(method=FedPara()), dict(statistics='recomputed')], ids=str)
def test_what_is_watched_is_the_network_of_its_round(kw):
    seen = []
    def watch(network, task, *_):
        seen.append(network)
        return dict(mine=evaluate(network, task.x_test, task.y_test, prepare=task.normalise)['accuracy'],
                    learns=float(network.training))
    run = go(rounds=3, watch=watch, **kw)
    assert run.history.mine.tolist() == run.history.accuracy.tolist() and run.history.accuracy.nunique() == 3
    assert not run.history.learns.any() and plain(go(rounds=3, **kw)).equals(plain(run, 'mine', 'learns'))
    last = run.model.state_dict()
    assert all(torch.equal(v, last[k]) for k, v in seen[-1].state_dict().items()) and seen[0] is not seen[-1]

@pytest.mark.parametrize('said,message', [
    (dict(accuracy=5.), "watch: 'accuracy' is a column of the history already"),
    (dict(round=77), "watch: 'round' is a column"), (dict(hits=1.), "watch: 'hits' is a column"),
    ({1: 2.}, 'watch: 1 is no name'), ([1., 2.], 'watch returned a list, but it must return a dict'),
    (dict(a=dict(b=1)), "watch: 'a' is a dict, but it must be a number, a text"),
    (dict(a=[1, object()]), "watch: 'a' is a list, but it must be"), (dict(a=1j), "watch: 'a' is a complex")],
    ids=lambda v: v if isinstance(v, str) else 'given')
def test_what_is_no_column_of_watch_is_refused_after_the_first_round(said, message):
    rounds = []
    with pytest.raises((ValueError, TypeError), match=message):
        go(metrics=dict(hits=hits), watch=lambda *_: rounds.append(1) or said)
    assert rounds == [1]

def test_a_metric_that_fails_on_one_client_is_named_before_training(monkeypatch):
    monkeypatch.setattr(Simulation, 'rounds', lambda *_: pytest.fail('training began'))
    def several(logits, y):
        if len(y.unique()) < 2: raise ValueError('only one class')
        return 1.
    one = (TASK.y_test == 3).nonzero().flatten()
    with pytest.raises(ValueError, match="metric 'several'.*only one class"):
        go(metrics=dict(several=several), tests=[*TESTS[:-1], one])

def test_metrics_may_come_and_go_with_a_checkpoint(tmp_path):
    file = tmp_path/'run'
    go(rounds=1, checkpoint=file)
    run = go(rounds=3, checkpoint=file, metrics=dict(hits=hits))
    h = run.history
    assert math.isnan(h['hits'][0]) and h['hits'][1:].tolist() == pytest.approx(h['accuracy'][1:].tolist())
    assert h['hits_before'][1:].tolist() == pytest.approx(h['accuracy_before'][1:].tolist())
    assert plain(go(rounds=3)).equals(plain(run, 'hits', 'hits_before'))
    assert 'hits' not in go(rounds=4, checkpoint=file).last

def test_the_progress_bar_shows_them(capsys):
    run = federate(net(), TASK, CLIENTS, FedAvg(), 2, Local(epochs=1), metrics=dict(hits=hits))
    said, last = capsys.readouterr().err, run.history.iloc[-1]
    assert '2/2' in said and 'hits 0.' in said
    assert f'accuracy {last.accuracy:.3f}' in said and f'loss {last.train_loss:.3g}' in said

def test_last_and_best():
    run = go(FedPer(), rounds=3, evaluate_every=2, metrics=dict(f1=f1))
    assert run.last['round'] == 3 and run.last['f1'] == run.history['f1'].iloc[-1]
    top = run.history.loc[run.history['f1'].idxmax()]
    assert run.best('f1')['round'] == top['round'] and run.best('f1')['accuracy'] == top['accuracy']
    assert run.best()['accuracy'] == run.history['accuracy'].max()
    assert run.best('loss', lowest=True)['loss'] == run.history['loss'].min()
    assert all(v == v for v in run.best('train_loss').values()) # what a round has not measured is left out
    with pytest.raises(ValueError, match="no column 'f2'; there are round, .*f1"): run.best('f2')
    assert go(rounds=1).best('personal') == {} # a column that there might be
    kept = None
    for r in federating(net(), TASK, CLIENTS, FedAvg(), 3, Local(epochs=1), progress=False):
        if r.best()['round'] == r.state.round: kept = r
    assert kept.last['accuracy'] == r.best()['accuracy']

def test_a_run_that_skips_clients_has_last_too():
    x = TASK.x_train.index_fill(0, CLIENTS[1], float('nan'))
    task = Task('broken', x, TASK.y_train, TASK.x_test, TASK.y_test, 10)
    with pytest.warns(UserWarning, match='client 1 produced NaN'):
        run = federate(net(), task, CLIENTS, FedAvg(), 1, Local(epochs=1), progress=False, bad_clients='skip')
    assert run.last['bad'] == 1 and all(isinstance(v, float) for v in run.last.values())

def test_compare_has_their_columns():
    seen = compare([FedAvg()], rounds=1, seeds=(0,), metrics=dict(hits=hits))
    assert list(seen) == ['method', 'seed', 'accuracy', 'personal', 'hits']
    assert seen['hits'].tolist() == pytest.approx(seen['accuracy'].tolist())

def test_flowers_server_measures_them(tmp_path):
    pytest.importorskip('flwr')
    import fedlit.scale.flower as ff
    task = TASK.subset(60, seed=0)
    config = sites(tmp_path, task, [range(60)], **{'task.mean': str(task.mean), 'task.std': str(task.std)})
    grid = ff.Rehearsal(ff.client_app(), config, [{'partition-id': 0}])
    run = ff.serve(grid, ff.read_plan(config), dict(hits=hits))
    assert run.history['hits'].tolist() == pytest.approx(run.history['accuracy'].tolist())
    with pytest.raises(TypeError, match="metrics: 'f1' is 3"): ff.serve(grid, ff.read_plan(config), dict(f1=3))

# ---- what a trained network says ----

BYTES = Task('bytes', (255*TASK.x_train).byte(), TASK.y_train, (255*TASK.x_test).byte(), TASK.y_test, 10,
             mean=(.3,), std=(.4,), labels=tuple('zero one two three four five six seven eight nine'.split()))

@pytest.fixture(scope='module')
def personal():
    "FedPer on bytes with a normalisation: every client has a head of its own."
    return federate(build('mlp', BYTES, seed=0), BYTES, CLIENTS, FedPer(), 2, Local(epochs=2), progress=False)

def test_predict_is_what_was_evaluated(personal):
    labels = personal.predict(BYTES.x_test)
    assert labels.shape == (359,) and labels.dtype == torch.int64
    assert (labels == BYTES.y_test).float().mean().item() == pytest.approx(personal.last['accuracy'])
    logits = personal.logits(BYTES.x_test)
    assert torch.equal(logits.argmax(1), labels) and not logits.requires_grad
    score = evaluate(personal.model, BYTES.x_test, BYTES.y_test, prepare=BYTES.normalise)
    assert torch.nn.functional.cross_entropy(logits, BYTES.y_test).item() == pytest.approx(score['loss'], abs=1e-5)
    torch.testing.assert_close(personal.logits(BYTES.x_test, batch=7), logits, atol=1e-5, rtol=1e-5)

def test_a_client_has_a_network_of_its_own(personal):
    tests = running.tests_of(BYTES, CLIENTS)
    own = [(personal.predict(BYTES.x_test[t], client=k) == BYTES.y_test[t]).float().mean().item()
           for k, t in enumerate(tests)]
    assert own == pytest.approx(personal.per_client(BYTES, tests)['personal'].tolist())
    assert not torch.equal(personal.logits(BYTES.x_test, client=0), personal.logits(BYTES.x_test))
    for k in (6, -1, 1.5):
        with pytest.raises(ValueError, match=f'client={k}.*0 to 5'): personal.predict(BYTES.x_test, client=k)

def test_predict_takes_what_a_task_takes(personal):
    right = personal.predict(BYTES.x_test)
    assert torch.equal(personal.predict(BYTES.x_test.numpy()), right)
    assert torch.equal(personal.predict([row for row in BYTES.x_test]), right)
    floats = BYTES.x_test.float()/255 # images between 0 and 1 are the same images
    torch.testing.assert_close(personal.logits(floats), personal.logits(BYTES.x_test), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r'a sample of x has shape \(1, 7, 8\), .* trained on \(1, 8, 8\)'):
        personal.predict(BYTES.x_test[:, :, 1:])
    with pytest.raises(ValueError, match='x has shape'): personal.predict(BYTES.x_test[0, 0, 0])

def test_predict_goes_with_the_file(personal, tmp_path):
    personal.save(tmp_path/'run')
    back = Run.load(tmp_path/'run')
    for client in (None, 3):
        assert torch.equal(back.logits(BYTES.x_test, client), personal.logits(BYTES.x_test, client))
    assert back.settings['labels'] == list(BYTES.labels)
    del back.settings['input'] # a file from before this version
    with pytest.raises(ValueError, match='does not say how its samples were normalised; pass task='):
        back.predict(BYTES.x_test)
    assert torch.equal(back.predict(BYTES.x_test, task=BYTES), personal.predict(BYTES.x_test))

def test_a_column_that_is_nan_in_every_round_goes_with_the_file(tmp_path):
    ask = lambda rounds, **kw: federate(build('mlp', BYTES, seed=0), BYTES, CLIENTS, FedAvg(), rounds, Local(epochs=1),
                                        progress=False, metrics=dict(never=lambda z, y: math.nan), **kw)
    run = ask(2)
    back = Run.load(run.save(tmp_path/'run'))
    pd.testing.assert_frame_equal(back.history, run.history)
    assert back.history.never.isna().all() and 'never' not in back.last
    ask(1, checkpoint=tmp_path/'half')
    assert list(ask(2, checkpoint=tmp_path/'half').history) == list(run.history)
    header, tensors = read_tensors(tmp_path/'run', FORMAT)
    for columns, words in ((None, 'columns'), ([3], 'no text'), ('ab', 'columns'),
                           (list(map(str, range(10**6))), 'cells')):
        write_tensors(tmp_path/'other', tensors, {**header, 'columns': columns})
        with pytest.raises(ValueError, match=words): Run.load(tmp_path/'other')

def test_another_normalisation_is_another_run(tmp_path):
    ask = lambda task, rounds: federate(build('mlp', BYTES, seed=0), task, CLIENTS, FedAvg(), rounds, Local(epochs=1),
                                        progress=False, checkpoint=tmp_path/'run')
    ask(BYTES, 1)
    with pytest.raises(ValueError, match='another normalisation'): ask(replace(BYTES, mean=(0.,)), 2)
    assert len(ask(replace(BYTES, labels=None), 2).history) == 2

def test_the_metrics_of_a_federation_are_tried_once():
    calls = []
    def counted(logits, y):
        calls.append(len(y))
        return 0.
    go(metrics=dict(counted=counted), rounds=2)
    assert calls == [359]*4 # tried, before the first round, after each
    assert 'metrics' not in go(rounds=1).settings and Federation(None, None, [], None).metrics is None

def test_a_metric_cannot_be_called_like_a_column_of_the_method():
    pytest.importorskip('dp_accounting')
    net = build('mlp', TASK, seed=0)
    with pytest.raises(ValueError, match="'epsilon' is a column of DP"):
        federate(net, TASK, CLIENTS, DP(), 1, Local(epochs=1), metrics=dict(epsilon=lambda z, y: 1.), progress=False)

# ---- what is undefined for a client ----

def auc(logits, y): return (logits[:, 1] - logits[:, 0]).mean() if len(y.unique()) > 1 else math.nan

def few(test_owner):
    "Four clients, of whom the third has ones only; each is a domain, and `test_owner` says whose the test samples are."
    gen = torch.Generator().manual_seed(0)
    x, owner = torch.randn(300, 13, generator=gen), torch.arange(240) % 4
    y = (x[:, 0] > 0).long()
    y[:240][owner == 2], y[240:][test_owner == 2] = 1, 1
    task = Task('heart', x[:240], y[:240], x[240:], y[240:], classes=2, domain_train=owner, domain_test=test_owner)
    return task, [(owner == k).nonzero()[:, 0] for k in range(4)]

def own(task, clients, **kw):
    return federate(build('mlp', task, seed=0), task, clients, FedPer(), 2, Local(epochs=1), progress=False, **kw)

def test_one_client_without_a_value_does_not_take_the_others():
    task, clients = few(torch.arange(60) % 4)
    with pytest.warns(UserWarning, match='`auc_personal` is undefined .* for client 2;') as said:
        run = own(task, clients, metrics=dict(auc=auc))
    assert len([w for w in said if 'undefined' in str(w.message)]) == 1
    each = run.per_client(task, running.tests_of(task, clients), dict(auc=auc))['auc_personal']
    assert each.isna().tolist() == [False, False, True, False]
    h = run.history.iloc[-1]
    assert h['auc_personal'] == pytest.approx(each.mean()) and h['auc_personal_sd'] == pytest.approx(each.std())
    assert run.last['auc_personal'] == h['auc_personal'] and run.best('auc_personal')
    assert run.history.filter(like='auc').notna().all(axis=None)

def test_a_client_without_test_samples_is_not_scored(tmp_path):
    task, clients = few(torch.arange(60) % 3) # of the last client there are none
    with pytest.warns(UserWarning, match='client 3 has no test samples') as said:
        run = own(task, clients, metrics=dict(hits=hits))
    assert len([w for w in said if 'client 3' in str(w.message)]) == 1
    tests = running.tests_of(task, clients)
    each = run.per_client(task, tests)['personal']
    assert each.isna().tolist() == [False, False, False, True]
    assert run.last['personal'] == run.last['hits_personal'] == pytest.approx(each.mean())
    assert run.last['personal_sd'] == pytest.approx(each.std())
    three = own(task, clients, tests=[*tests[:3], tests[0]]) # training is not touched by tests
    assert all(torch.equal(v, three.state.params[k]) for k, v in run.state.params.items())
    run.report(tmp_path/'run.html')

def test_a_task_without_test_samples_is_refused_before_training():
    task, clients = few(torch.arange(60) % 4)
    none = Task('heart', task.x_train, task.y_train, task.x_test[:0], task.y_test[:0], classes=2)
    with pytest.raises(ValueError, match='heart has no test samples'): own(none, clients)

def test_a_metric_that_comes_too_late_is_said(tmp_path):
    go(checkpoint=tmp_path/'run')
    with pytest.warns(UserWarning, match='run: hits was not measured before round 3'):
        late = go(checkpoint=tmp_path/'run', metrics=dict(hits=hits))
    assert 'hits' not in late.history
    with pytest.warns(UserWarning, match='run: hits was not measured before round 3'):
        assert go(rounds=3, checkpoint=tmp_path/'run', metrics=dict(hits=hits)).history['hits'].notna().sum() == 1
    go(rounds=4, checkpoint=tmp_path/'run')
    back = go(rounds=5, checkpoint=tmp_path/'run', metrics=dict(hits=hits)).history.iloc[-1]
    assert back['hits_before'] == pytest.approx(back['accuracy_before'])
