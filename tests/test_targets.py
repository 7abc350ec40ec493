"Targets that are no classes: numbers, several labels, one yes or no, a class for each pixel or token."
import math, warnings
import numpy as np, pytest, torch
import torch.nn.functional as F
from torch import nn
from fedlit.batches import CRITERIA
from fedlit.compare import choose, compare, plot, table
from fedlit.data import TARGETS, Task, load
from fedlit.local import Local
from fedlit.measure import SCORED, UNITS, average_precision, evaluate, rounding
from fedlit.method import FedAvg
from fedlit.methods import DPSGD, FedDF, FedLC, FedPer, FedProx, FjORD, MOON, SOLO
from fedlit.models import Net, build
from fedlit.partition import dirichlet, iid, concept_shift
from fedlit.result import Run
from fedlit.run import federate
from fedlit import scores
from fedlit.server import network_for
from fedlit.parse import method as parse
from by_hand import averaged, drawn, sgd
from federation import METHODS, sites

GEN = torch.Generator().manual_seed(0)
X = torch.randn(260, 6, generator=GEN)
WAY = torch.randn(6, 2, generator=GEN)
IMAGES = torch.rand(120, 1, 6, 6, generator=GEN)

class PerPixel(nn.Module):
    "A class for each pixel, from its neighbourhood."
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
    def forward(self, x):
        z = self.body(x).relu()
        return z.mean((2, 3)), self.head(z)

def task_of(target):
    cut = lambda y, x=X, n=200: Task(target, x[:n], y[:n], x[n:], y[n:], target=target)
    if target == 'numbers': return cut(X @ WAY / 4)
    if target == 'labels': return cut((X[:, :3] > .5).long())
    if target == 'one': return Task('one', X[:200], X[:200, 0] > 0, X[200:], X[200:, 0] > 0, target='labels')
    maps = (IMAGES[:, 0]*3).long().clamp(max=2)
    maps[::7, 0] = -100 # not known
    return Task('dense', IMAGES[:90], maps[:90], IMAGES[90:], maps[90:], classes=3, target='dense')

NAMES = 'numbers', 'labels', 'one', 'dense'

def net_of(task):
    torch.manual_seed(0)
    return PerPixel() if task.target == 'dense' else build('mlp', task, seed=0, hidden=(16,), features=8)

LOCAL = Local(epochs=2, batch_size=16, lr=.1, momentum=.5)

def divided(task): return dirichlet(task.strata(), clients=3, alpha=1., seed=1, min_size=16)

def trained(task, method=None, rounds=3, clients=None, **kw):
    return federate(net_of(task), task, clients or divided(task), method or FedAvg(), rounds,
                    **dict(dict(local=LOCAL, progress=False), **kw))

PLAIN = dict(numbers=F.mse_loss, labels=F.binary_cross_entropy_with_logits,
             dense=lambda z, y: F.cross_entropy(z, y, ignore_index=-1))

def by_hand(task, clients, rounds):
    "FedAvg in a loop of plain PyTorch, on the batches that fedlit draws."
    net = net_of(task)
    for r in range(rounds):
        new = [sgd(net, drawn(task, clients, k, LOCAL, r), criterion=PLAIN[task.target], lr=LOCAL.lr,
                   momentum=LOCAL.momentum) for k in range(len(clients))]
        averaged(net, new, [*range(len(clients))], torch.tensor([len(c) for c in clients]))
    return net

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads'])
@pytest.mark.parametrize('name', NAMES)
def test_a_federation_is_a_plain_loop(name, executor):
    task = task_of(name)
    clients = divided(task)
    net, run = by_hand(task, clients, 3), trained(task, executor=executor)
    for k, v in net.named_parameters(): torch.testing.assert_close(run.state.params[k], v.data, atol=2e-5, rtol=2e-4)
    seen = evaluate(net, task.x_test, task.y_test, target=task.target)
    for k in SCORED[task.target]: assert run.last[k] == pytest.approx(seen[k], abs=1e-3, rel=1e-3)
    assert 'accuracy' not in run.history or task.target == 'dense'

@pytest.mark.parametrize('name', NAMES)
def test_something_is_learned(name):
    run = trained(task_of(name), rounds=8)
    assert run.last['loss'] < run.history['loss'].iloc[0]

@pytest.mark.parametrize('name', NAMES)
def test_what_the_last_bit_moves_is_the_main_score_of_the_task(name):
    task = task_of(name)
    go = lambda net: federate(net, task, divided(task), FedAvg(), 2, LOCAL, progress=False)
    seen = rounding(go, net_of(task), times=1)
    assert seen.name == SCORED[task.target][0] and str(seen).startswith(f'{seen.name} moves by ')
    assert len(seen.rounds) == 2 and seen.score == seen.rounds[-1] < .1

def test_scores_are_those_of_scikit_learn():
    metrics = pytest.importorskip('sklearn.metrics')
    z = torch.randn(300, 4, generator=GEN).round(decimals=1) # with ties
    y = (torch.rand(300, 4, generator=GEN) + .3*z > .7).float()
    y[:, 3] = 0 # a label that nobody has is left out
    best = metrics.average_precision_score(y[:, :3].numpy(), z[:, :3].numpy())
    assert average_precision(z, y) == pytest.approx(best)
    class Same(nn.Module):
        def forward(self, x): return x, x
    same = Same()
    same.p = nn.Parameter(torch.zeros(()))
    seen = evaluate(same, z, y, target='labels', batch=7)
    assert seen['f1'] == pytest.approx(metrics.f1_score(y.numpy(), z.numpy() > 0, average='micro'))
    assert seen['loss'] == pytest.approx(F.binary_cross_entropy_with_logits(z, y).item(), rel=1e-5)
    assert evaluate(same, z, y, target='numbers')['mse'] == pytest.approx(metrics.mean_squared_error(y, z), rel=1e-5)
    score = lambda y, target: evaluate(same, z[:, :1], y, dict(off=lambda z, y: (z - y).abs().mean()), target=target)
    for target in ('labels', 'numbers'): assert score(y[:, 0], target) == score(y[:, :1], target)
    maps, at = torch.randn(5, 3, 4, 4, generator=GEN), torch.randint(-1, 3, (5, 4, 4), generator=GEN)
    seen, known = evaluate(same, maps, at, target='dense', batch=2), at >= 0
    assert seen['accuracy'] == pytest.approx((maps.argmax(1)[known] == at[known]).float().mean().item())
    assert seen['loss'] == pytest.approx(F.cross_entropy(maps, at, ignore_index=-1).item(), rel=1e-5)

@pytest.mark.parametrize('shape', [(1, 5), (5, 1), (), (3,)])
def test_labels_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r'it must be \(5,\)'):
        CRITERIA['class'](torch.randn(5, 3), torch.zeros(shape).long())

def test_where_nothing_is_known_a_score_is_undefined_and_a_step_is_zero():
    nothing = torch.full((4, 3, 3), -1)
    z = torch.randn(4, 2, 3, 3, requires_grad=True)
    CRITERIA['dense'](z, nothing).backward()
    assert (z.grad == 0).all()
    assert math.isnan(average_precision(torch.randn(3, 2), torch.zeros(3, 2)))

@pytest.mark.parametrize('name', ['numbers', 'labels'])
@pytest.mark.parametrize('method', METHODS, ids=repr)
def test_every_method_trains_or_says_that_it_needs_classes(method, name):
    "And trains alike whatever the executor."
    task = task_of(name)
    clients = iid(task.strata(), 3, seed=0)
    net = build('mlp', task, seed=0, hidden=(48,), features=24, norm='batch')
    epochs = 3 if 'FedDecomp' in repr(method) else 1 # it needs them; elsewhere more let rounding grow to any size
    local = Local(epochs=epochs, batch_size=16, lr=.05, equal_batches=True)
    run = lambda executor: federate(net, task, clients, method, 2, local=local, progress=False, executor=executor,
                                    proxy=task.x_test[:20])
    try: a = run('loop')
    except (ValueError, TypeError) as e:
        assert 'class' in str(e) or 'DepthFL' in repr(method) or 'labels' in str(e), e
        return
    b = run('vmap')
    assert math.isfinite(a.last['loss'])
    near = .3 if 'FedCAC' in repr(method) else 1e-5 # it ranks entries, and rounding may swap two
    assert a.last['loss'] == pytest.approx(b.last['loss'], rel=near)

@pytest.mark.parametrize('name', NAMES)
def test_gradients_that_no_clip_reaches_are_those_of_sgd(name):
    task = task_of(name)
    if name == 'dense': task.y_train[:, 0] = -1 # in all of them: samples count equally, not their places
    a, b = (trained(task, m, 1) for m in (FedAvg(), DPSGD(clip=1e6, noise=0.)))
    for k, v in a.state.params.items(): torch.testing.assert_close(b.state.params[k], v, atol=1e-5, rtol=1e-4)

@pytest.mark.parametrize('name', NAMES)
def test_a_method_that_needs_classes_is_refused_by_name(name):
    task = task_of(name)
    for method in FedLC(), MOON() + FedLC(), FedDF(), FjORD():
        with pytest.raises(ValueError, match='every sample needs one class, but the targets are'):
            trained(task, method, proxy=task.x_test)

def test_what_a_tensor_is():
    cut = lambda y, **kw: Task('t', X[:200], y[:200], X[200:], y[200:], **kw)
    assert cut(torch.rand(260)).target == 'numbers' and cut(torch.rand(260)).y_train.shape == (200, 1)
    four = cut(torch.rand(260, 4).double())
    assert four.classes == 4 and four.y_train.dtype == torch.float32
    assert cut(X > 0).target == 'labels' and cut(X > 0).classes == 6
    assert cut((X[:, 0] > 0).long(), classes=2).target == 'class'
    assert cut((X[:, :3] > 0).tolist(), target='labels').y_test.dtype == torch.float32
    assert "2 quantities" in repr(task_of('numbers')) and "3 labels" in repr(task_of('labels'))

@pytest.mark.parametrize('y', [
    F.one_hot(X[:, :3].argmax(1)).float(), X.softmax(1).double(), (X > 0).float(), X[:, :4].argmax(1).float()],
    ids=['one-hot', 'soft', 'several', 'as floats'])
def test_floats_that_look_like_classes_are_a_regression_with_a_warning(y):
    cut = lambda **kw: Task('t', X[:200], y[:200], X[200:], y[200:], **kw)
    with pytest.warns(UserWarning, match='y_train is .* looks like classes, but .* regression.*y.argmax') as said:
        assert cut().subset(100).target == 'numbers'
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert cut(target='numbers').target == 'numbers'

@pytest.mark.parametrize('y, given, said', [
    (torch.rand(260), dict(classes=2), "classes=None makes a regression"),
    (torch.randint(0, 2, (260, 3)), dict(classes=3), "target='labels'"),
    (torch.randint(0, 2, (260,)), {}, 'classes=None, but it must be a whole number'),
    (torch.randint(0, 3, (260, 3)), dict(target='labels'), 'holds 2, but each label must be 0 or 1'),
    (torch.full((260,), math.nan), dict(target='numbers'), 'holds .nan. for sample 0; leave such samples out'),
    (torch.rand(260, 2), dict(classes=3, target='numbers'), "2 quantities, but classes=3"),
    (torch.randint(0, 5, (260, 3)), dict(classes=3, target='dense'), 'labels must lie in 0..2, and be negative'),
    (torch.rand(260, 3), dict(classes=3, target='dense'), 'a class for each place is int64'),
    (torch.rand(260), dict(target='regression'), "target='regression', but it must be one of 'class', 'dense'")])
def test_what_a_tensor_cannot_be(y, given, said):
    with pytest.raises(ValueError, match=said): Task('t', X[:200], y[:200], X[200:], y[200:], **given)

def test_a_network_of_the_wrong_width_is_told_what_would_be_right():
    task = task_of('numbers')
    with pytest.raises(ValueError, match='returns 3 logits, but the task has 2 quantities'):
        federate(net_of(task_of('labels')), task, divided(task), FedAvg(), 1, progress=False)
    dense = task_of('dense')
    flat = Net(nn.Flatten(), nn.Linear(36, 3))
    with pytest.raises(ValueError, match=r'must be \(N, 3, 6, 6\)'):
        federate(flat, dense, iid(dense.strata(), 3, seed=0), FedAvg(), 1, progress=False)

@pytest.mark.parametrize('name', NAMES)
def test_strata_divide_and_match(name):
    task = task_of(name)
    for part in 'train', 'test':
        s = task.strata(part)
        assert s.dtype == torch.int64 and len(s) == len(getattr(task, f'y_{part}')) and s.min() >= 0
    if name == 'numbers':
        assert task.strata().bincount().tolist() == [20]*10 # tenths
        first = task.y_train[:, 0]
        assert all(first[task.strata() == k].max() <= first[task.strata() == k+1].min() for k in range(9))
    elif name != 'numbers':
        half = task.subset(len(task.y_train)//2).strata().bincount(minlength=11)
        assert (task.strata().bincount(minlength=11)/2 - half).abs().max() <= 2
    held = task.validation(.2)
    assert len(held.y_val) == round(.2*len(task.y_train)) and held.target == task.target
    with pytest.raises(ValueError, match=r'task.strata\(\)'): dirichlet(task.y_train, clients=3)

@pytest.mark.parametrize('name', NAMES)
def test_tests_of_clients_validation_file_report_and_leaving_out(name, tmp_path):
    task = task_of(name).validation(.2)
    clients = iid(task.strata(), 3, seed=0)
    method = FedPer() if name != 'dense' else FedAvg()
    run = trained(task, method, clients=clients, tests=scores.tests_of(task, clients))
    first = SCORED[task.target][0]
    assert {first, f'{first}_before', 'personal', 'validation', 'validation_personal'} <= {*run.history}
    h = run.history['validation']
    assert run.best()['validation'] == (h.min() if first == 'mse' else h.max())
    assert run.rounds_to(run.last[first], column=first, lowest=first == 'mse') <= 3
    assert first.replace('_', ' ') in repr(run)
    run.plot()
    run.save(tmp_path/'run.safetensors')
    back = Run.load(tmp_path/'run.safetensors', model=net_of(task))
    said = back.predict(task.x_test)
    assert torch.equal(said, run.predict(task.x_test))
    assert said.dtype == dict(numbers=torch.float32, labels=torch.bool).get(task.target, torch.int64)
    assert said.shape == task.y_test.shape
    assert len(run.per_client(task, run.origin.tests)) == 3
    run.report(tmp_path/'run.html', again=False)
    assert first.replace('_', ' ') in (tmp_path/'run.html').read_text(encoding='utf-8')
    run.to_folder(tmp_path/'card')
    card = (tmp_path/'card'/'README.md').read_text(encoding='utf-8')
    assert dict(numbers='tabular-regression', dense='image-segmentation').get(name, 'tabular-classification') in card
    w = run.without(1)
    assert first.replace('_', ' ') in repr(w) and {first, 'without', 'difference'} <= {*w.history}

def test_a_comparison_of_errors_chooses_the_least():
    task = task_of('numbers').validation(.2)
    methods = [FedProx(mu=0.), FedProx(mu=9.)]
    runs = compare(methods, task, seeds=2, clients=3, rounds=3, local=LOCAL, partition='iid()', history=True)
    assert {'mse', 'validation', 'personal'} <= {*runs} and 'accuracy' not in runs
    last = runs.groupby(['method', 'seed'])['validation'].last().groupby('method').mean()
    assert repr(choose(methods, runs)) == last.idxmin()
    assert plot(runs).get_ylabel() == UNITS['mse'] and plot(runs, 'personal').get_ylabel() == 'personal'
    assert list(table(runs)['mse'].index) == list(map(repr, methods))

def test_metrics_of_ones_own_beside():
    f1 = lambda logits, y: 1.
    task = task_of('numbers')
    run = trained(task, metrics=dict(f1=f1, accuracy=lambda z, y: ((z - y).abs() < .1).float().mean()))
    assert {'f1', 'accuracy', 'mse'} <= {*run.history}
    with pytest.raises(ValueError, match="'mse' is a column"): trained(task, metrics=dict(mse=f1))
    with pytest.raises(ValueError, match="'f1' is a column"): trained(task_of('labels'), metrics=dict(f1=f1))

def test_a_criterion_of_ones_own():
    task = task_of('numbers')
    run = trained(task, criterion=nn.HuberLoss())
    assert math.isfinite(run.last['mse'])
    labels = task_of('labels')
    heavy = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3., 1., 1.]))
    assert math.isfinite(trained(labels, criterion=heavy).last['average_precision'])
    with pytest.warns(UserWarning, match='gradient of zero'):
        trained(task_of('one'), criterion=nn.CrossEntropyLoss())

@pytest.mark.parametrize('f, said', [
    (lambda z, y: (z[:, 0] - y).square().mean(), True), (lambda z, y: (z.squeeze(-1) - y).abs().mean(), True),
    (lambda z, y: (z - y).square().mean(), False), (lambda z, y: (z[:, 0] - y[:, 0]).square().mean(), False),
    (F.huber_loss, False), (lambda z, y: (z - y).square().mean(0).squeeze(), False),
    (lambda z, y: (z.mean() - y.mean()).square(), False)])
@pytest.mark.parametrize('asked', ['criterion', 'metric'])
def test_an_answer_that_is_compared_with_every_quantity_is_noticed(f, said, asked):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    task = Task('line', x[:40], 2*x[:40, 0], x[40:], 2*x[40:, 0])
    kw = dict(criterion=f) if asked == 'criterion' else dict(metrics=dict(mine=f))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        federate(build('mlp', task, seed=0), task, [[*range(40)]], FedAvg(), 1, Local(epochs=1), progress=False,
                 device='cpu', **kw)
    told = [str(w.message) for w in heard if 'compares every answer with all labels' in str(w.message)]
    assert len(told) == said and all(asked in t and '(N, 1)' in t for t in told)

@pytest.mark.parametrize('criterion', [None, nn.BCELoss(), F.binary_cross_entropy])
def test_labels_are_told_by_logits_and_no_probability_is_below_zero(criterion):
    task = task_of('labels')
    net = net_of(task)
    net.head = nn.Sequential(net.head, nn.Sigmoid())
    with pytest.warns(UserWarning, match='Net seems to end in a sigmoid: .* every label in every sample'):
        run = federate(net, task, divided(task), FedAvg(), 1, LOCAL, progress=False, criterion=criterion)
    assert run.predict(task.x_test).all()

def test_a_criterion_that_ignores_minus_100_hears_of_minus_1():
    for known in nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=-100):
        with pytest.raises(ValueError, match='places below zero become -1: ignore_index=-1$'):
            trained(task_of('dense'), criterion=known)

def test_a_batch_without_any_label_is_named_as_the_cause():
    y = (IMAGES[:, 0] > .5).long()
    y[:8] = -1 # eight pictures that nobody has labelled
    task = Task('places', IMAGES[:100], y[:100], IMAGES[100:], y[100:], classes=3, target='dense')
    with pytest.raises(FloatingPointError, match="client 0 has samples without any label, and over a batch of these"):
        federate(PerPixel(), task, [torch.arange(8), torch.arange(8, 100)], FedAvg(), 1, progress=False,
                 criterion=nn.CrossEntropyLoss(ignore_index=-1))

def test_networks_of_their_own():
    task = task_of('numbers')
    small, large = (build('mlp', task, seed=0, hidden=(h,)) for h in (8, 16))
    run = federate([small, large, large], task, iid(task.strata(), 3, seed=0), SOLO(), 2, local=LOCAL, progress=False)
    assert {'mse', 'mse 0', 'mse 1'} <= {*run.history} and 'mse' in repr(run)

def test_concepts_need_classes():
    with pytest.raises(ValueError, match='class'): concept_shift(task_of('numbers'), 2)

def test_classes_as_ever():
    task = load('digits')
    assert task.target == 'class' and task.strata() is task.y_train and [*TARGETS] == [*SCORED] == [*CRITERIA]
    assert evaluate(build('mlp', task, seed=0), task.x_test, task.y_test).keys() == {'accuracy', 'loss'}
    assert np.isfinite(evaluate(build('mlp', task, seed=0), task.x_test, task.y_test)['loss'])

@pytest.mark.parametrize('name', ['numbers', 'labels'])
def test_between_sites(name, tmp_path):
    "The model of the simulation."
    pytest.importorskip('flwr')
    import fedlit.flower as ff
    task = task_of(name)
    parts = iid(task.strata(), 3, seed=0)
    config = sites(tmp_path, task, parts, **{'method': 'FedProx(mu=0.1)', 'task.target': name, 'model.hidden': '(16,)',
                                             'model.features': 8, 'local.batch-size': 16})
    plan, nodes = ff.read_plan(config), [{'partition-id': k} for k in range(3)]
    run = ff.serve(ff.Rehearsal(ff.client_app(), config, nodes), ff.read_plan(config))
    other = federate(plan.model, task, parts, plan.method, 2, plan.local, executor='loop', progress=False)
    for k, v in other.state.params.items(): torch.testing.assert_close(run.state.params[k], v, atol=1e-6, rtol=1e-5)
    assert run.last[SCORED[name][0]] == pytest.approx(other.last[SCORED[name][0]], abs=1e-4)
    with pytest.raises(ValueError, match="task.target='dense', but between sites"):
        ff.read_plan({**config, 'task.target': 'dense'})

@pytest.mark.parametrize('method', ['PerFedAvg(alpha=0.01)', "FedBABU(steps=2, lr=0.01)", 'FedALA(layers=1, most=2)'])
def test_a_client_makes_its_own_network_with_the_criterion_of_the_federation(method):
    "Wherever it is tested, and not with the cross-entropy."
    task = task_of('numbers')
    clients = iid(task.strata(), 3, seed=0)
    huber = nn.HuberLoss(delta=.1)
    run = trained(task, parse(method), clients=clients, tests=scores.tests_of(task, clients), criterion=huber)
    data = task.normalise(task.x_train[clients[1]]), task.y_train[clients[1]]
    params, buffers = network_for(run.method, run.state, 1, data, run.model, huber)
    own = {k: v for k, v in run.network(1).named_parameters()}
    assert all(torch.equal(params[k], own[k]) for k in own)
    other = network_for(run.method, run.state, 1, data, run.model, CRITERIA['numbers'])[0]
    assert any(not torch.equal(params[k], other[k]) for k in own)
    at = run.origin.tests[1]
    seen = evaluate(run.model, task.x_test[at], task.y_test[at], state=(params, buffers), target='numbers')['mse']
    assert run.per_client(task, run.origin.tests)['personal'][1] == pytest.approx(seen, rel=1e-4)
