"What is the user's is not touched, and what surrounds a run does not reach into it."
import pickle, re, sys, threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
import pytest, torch
from torch import nn
from torch.nn import functional as F
from fedlit import models
from fedlit import run as runs
from fedlit.data import Task, load
from fedlit.measure import evaluate, features_of
from fedlit.method import Method
from fedlit.methods import (FedALA, FedAvg, FedBN, FedDF, FedET, FedPara, FedPer, HeteroFL, MOON, PerFedAvg, SCAFFOLD)
from fedlit.participation import PowerOfChoice
from fedlit.after.report import facts
from fedlit.batches import batches_of
from fedlit.compare import compare, run_together
from fedlit.laws import check
from fedlit.papers.interactions import interactions
from fedlit.networks import MixedRun
from fedlit.portrait import portrait
from fedlit.scale.capacity import traffic
from fedlit.local import Local
from fedlit.server import recompute
from fedlit.result import Run
from fedlit.run import federate, federating
from fedlit.state import start
from fedlit.ground.tree import leaves
from federation import difference, same

DIGITS = load('digits').subset(150, test=60)
ROWS = Task('rows', DIGITS.x_train.flatten(1), DIGITS.y_train, DIGITS.x_test.flatten(1), DIGITS.y_test, 10)
ENDS = 0, 33, 60, 101, 118, 150
CLIENTS = [torch.arange(a, b) for a, b in zip(ENDS, ENDS[1:])]
LOCAL = Local(epochs=1, batch_size=16)
OWN = dict(tests=runs.tests_of(ROWS, CLIENTS))

class Plain(nn.Module):
    "A network for rows of numbers."
    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = nn.Linear(64, 12), middle or nn.Identity(), nn.Linear(12, 10)
    def forward(self, x):
        z = self.middle(self.body(x).relu())
        return z, self.head(z)

class Subtracts(Plain):
    "Writes into its input."
    def forward(self, x): return super().forward(x.sub_(.5))

def go(method=None, net=None, rounds=2, task=ROWS, **kw):
    return federate(net or Plain(), task, CLIENTS, method or FedAvg(), rounds, LOCAL, progress=False,
                    **{'device': 'cpu', **kw})

# --- what is written into -----------------------------------------------------------------------------------------

TENSORS = 'x_train', 'y_train', 'x_test', 'y_test'
def untouched(task): return all(torch.equal(getattr(task, k), getattr(ROWS, k)) for k in TENSORS)

def spoils_labels(logits, y):
    y[:] = 0
    return 1.
def spoils_logits(logits, y):
    logits[:] = 0
    return 1.
def hits(logits, y): return (logits.argmax(1) == y).float().mean()

@pytest.mark.parametrize('spoils', [spoils_labels, spoils_logits])
def test_a_metric_writes_into_copies(spoils):
    task, metrics = deepcopy(ROWS), dict(spoils=spoils, hits=hits)
    run = go(FedPer(), task=task, metrics=metrics, **OWN)
    assert untouched(task)
    assert run.history['hits'].tolist() == pytest.approx(run.history['accuracy'].tolist())
    assert run.history['hits_personal'].tolist() == pytest.approx(run.history['personal'].tolist())
    assert same(run, go(FedPer(), metrics=dict(spoils=lambda logits, y: 1., hits=hits), **OWN))
    said = evaluate(run.model, task.x_test, task.y_test, metrics=metrics)
    assert said['hits'] == pytest.approx(said['accuracy']) and untouched(task)

@pytest.mark.filterwarnings("ignore:Subtracts's forward")
@pytest.mark.parametrize('method,kw', [
    (FedAvg(), {}), (FedAvg(), dict(executor='loop', record=False)), (FedPer(), OWN),
    (FedAvg(), dict(participation=PowerOfChoice(.5))), (MOON(), dict(executor='loop')),
    (FedAvg(), dict(net=Subtracts(nn.BatchNorm1d(12)), statistics='recomputed')),
    (PerFedAvg(), OWN)], ids=str)
def test_a_forward_that_writes_into_its_input_leaves_the_task_alone(method, kw):
    task = deepcopy(ROWS)
    run = go(method, task=task, **{'net': Subtracts(), **kw})
    assert untouched(task)
    x = ROWS.x_test.clone()
    for ask in (run.logits, run.predict, partial(features_of, run.model), partial(evaluate, run.model, y=ROWS.y_test)):
        ask(x)
        assert torch.equal(x, ROWS.x_test)
    run.per_client(task, **OWN, clients=CLIENTS)
    assert untouched(task)

@pytest.mark.filterwarnings("ignore:Subtracts's forward")
def test_a_forward_that_writes_into_its_input_is_asked_of_what_was_given():
    "Every evaluation sees the images as they are: the same numbers as from a network that makes a new tensor."
    class Makes(Plain):
        def forward(self, x): return super().forward(x - .5)
    for executor in ('loop', 'vmap'):
        assert same(go(net=Subtracts(), executor=executor, record=False),
                    go(net=Makes(), executor=executor, record=False))

def test_a_network_is_wrapped_on_a_copy_of_the_batch():
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        def forward(self, x): return self.head(self.body(x.sub_(.5)))
    x = ROWS.x_test.clone()
    models.wrap(Logits(), 'head', x)
    assert torch.equal(x, ROWS.x_test)

def test_a_criterion_writes_into_its_own():
    def spoils(logits, y):
        loss = F.cross_entropy(logits, y.clone())
        y[:] = 0
        return loss
    task = deepcopy(ROWS)
    kw = dict(participation=PowerOfChoice(.5), executor='loop', record=False)
    run = go(task=task, criterion=spoils, **kw)
    assert untouched(task)
    assert same(run, go(criterion=F.cross_entropy, **kw))

@pytest.mark.filterwarnings("ignore:Subtracts's forward")
@pytest.mark.parametrize('method', [FedDF(steps=2), FedET(steps=2)], ids=str)
def test_the_servers_own_inputs_are_not_written_into(method):
    proxy = torch.randn(20, 64), torch.arange(20) % 10
    kept = deepcopy(proxy)
    go(method, Subtracts(), proxy=proxy, executor='loop')
    assert all(map(torch.equal, proxy, kept))

# --- what a run hands out -----------------------------------------------------------------------------------------

class Counts(Method):
    "Remembers on the server and at the clients."
    def init(self, params): return params, dict(times=torch.zeros(3)), dict(times=torch.zeros(3))
    def done(self, client): return dict(times=client['times'] + 1), {}
    def merge(self, delta, server): return delta, dict(times=server['times'] + 1)

def spoil(state):
    "Write into everything of a state."
    for v in leaves(dict(a=state.params, b=state.buffers, c=state.server)): v.fill_(7)
    for v in leaves(dict(a=state.personal, b=state.client)):
        for k in (0, 4): v[k].fill_(7)
        v[2] = torch.full(v.shape[1:], 7.)

METHOD = FedPer() + MOON() + Counts()

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_what_is_done_to_a_round_does_not_reach_the_next(executor):
    kw = dict(participation=.6, executor=executor, statistics='home', **OWN)
    net, kept = Plain(nn.BatchNorm1d(12)), []
    alone = go(METHOD, net, 3, **kw)
    for run in federating(net, ROWS, CLIENTS, METHOD, 3, LOCAL, progress=False, device='cpu', **kw):
        kept.append(deepcopy(run))
        spoil(run.state)
        run.settings.clear()
        run.history['accuracy'] = 0.
        for p in run.model.parameters(): p.data.zero_()
    assert same(alone, kept[-1]) and alone.settings == kept[-1].settings
    assert difference(kept[0].state, kept[1].state) > 0

def test_a_run_that_is_kept_stays_as_it_was():
    each = list(federating(Plain(), ROWS, CLIENTS, METHOD, 3, LOCAL, progress=False, device='cpu'))
    before = deepcopy(each[0])
    spoil(each[2].state)
    assert same(before, each[0])

def test_what_watch_does_to_its_arguments_does_not_reach_the_run():
    def watch(network, task, state, locals):
        spoil(state)
        for v in (*network.parameters(), *network.buffers()): v.data.zero_()
        return {}
    assert same(go(METHOD, rounds=3, watch=watch, **OWN), go(METHOD, rounds=3, **OWN))

# --- what surrounds a run -----------------------------------------------------------------------------------------

@contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try: yield
    finally: torch.set_default_dtype(before)

AROUND = dict(autocast=partial(torch.autocast, 'cpu', torch.bfloat16), no_grad=torch.no_grad,
              inference=torch.inference_mode, double=partial(default, torch.double), half=partial(default, torch.half),
              meta=partial(torch.device, 'meta'))

def mood():
    return (torch.is_autocast_enabled('cpu'), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_default_dtype(), torch.empty(0).device)

PUBLIC = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
KINDS = dict(FedAvg=(FedAvg(), {}), loop=(MOON() + Counts(), dict(executor='loop', participation=PowerOfChoice(.5))),
             threads=(MOON(), dict(executor='threads', record=False)),
             extract=(HeteroFL(rates=(1., .5)), dict(executor='extract')),
             FedDF=(FedDF(steps=2), dict(proxy=PUBLIC)), FedPara=(FedPara(), OWN), PerFedAvg=(PerFedAvg(), OWN),
             recomputed=(FedAvg(), dict(net=Plain(nn.BatchNorm1d(12)), statistics='recomputed')),
             metrics=(FedAvg(), dict(metrics=dict(hits=hits))))

@cache
def alone_of(kind): return go(KINDS[kind][0], **{'executor': 'vmap', **KINDS[kind][1]})

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('around', AROUND)
def test_what_surrounds_a_run_does_not_reach_into_it(around, kind):
    method, kw = KINDS[kind]
    kw, alone, before = {'net': Plain(), 'executor': 'vmap', **kw}, alone_of(kind), mood()
    with AROUND[around]():
        inside = mood()
        run = go(method, **kw)
        assert mood() == inside != before
    assert mood() == before
    assert same(alone, run)
    for p in run.model.parameters(): p.data.add_(1.) # it is a usual tensor
    assert not any(p.is_inference() for p in run.model.parameters())

def test_where_there_is_no_accelerator_nobody_asks_which_one_it_is(monkeypatch):
    "In torch 2.6 that is an error, and one that PyTorch itself does not run into."
    there = torch.accelerator.current_accelerator
    def current(**kw):
        if sys._getframe(1).f_globals['__name__'].startswith('torch.'): return there(**kw)
        raise RuntimeError('Cannot access accelerator device when none is available.')
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: False)
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', current)
    assert len(go(FedAvg()).history) == 2

@pytest.mark.parametrize('around', AROUND)
def test_between_two_rounds_the_surroundings_are_the_callers(around):
    net = Plain()
    alone, before, seen = go(FedPara(), net), mood(), []
    with AROUND[around]():
        inside = mood()
        for run in federating(net, ROWS, CLIENTS, FedPara(), 2, LOCAL, progress=False, device='cpu'): # noqa: B007
            seen.append(mood())
        for _ in federating(net, ROWS, CLIENTS, FedPara(), 2, LOCAL, progress=False, device='cpu'): break
        assert mood() == inside
    assert seen == [inside]*2 and mood() == before and same(alone, run)
    assert run.state.params['body.bias'].dtype == torch.float32

def test_surroundings_that_begin_between_two_rounds_do_not_reach_the_next():
    alone, rounds = go(rounds=3), iter(federating(Plain(), ROWS, CLIENTS, FedAvg(), 3, LOCAL, progress=False,
                                                  device='cpu'))
    next(rounds)
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        next(rounds)
        assert torch.is_inference_mode_enabled()
    assert same(alone, next(rounds))
    assert not torch.is_autocast_enabled('cpu')

@pytest.mark.parametrize('net, given, inside', [
    (Plain(), {}, 1), (Plain(), dict(threads=2), 2), (Plain(), dict(executor='threads'), 3),
    (Plain(nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 3, 1), nn.Flatten())), {}, 3)],
    ids=['small', 'asked', 'clients', 'convolves'])
def test_a_run_has_the_threads_that_fit_and_gives_them_back(net, given, inside):
    during, between = [], []
    def look(*now):
        during.append(torch.get_num_threads())
        return {}
    torch.set_num_threads(3)
    try:
        for run in federating(net, ROWS, CLIENTS, FedAvg(), 2, LOCAL, device='cpu', progress=False,
                              watch=look, **given):
            between.append((torch.get_num_threads(), run.settings['threads']))
        after = torch.get_num_threads()
    finally: torch.set_num_threads(1)
    assert (during, between, after) == ([inside]*2, [(3, inside)]*2, 3)

def test_a_run_that_fails_leaves_the_surroundings_as_they_were():
    def fails(logits, y): raise RuntimeError('it fails')
    with torch.no_grad():
        with pytest.raises(ValueError, match='it fails'): go(criterion=fails, executor='loop')
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()

@pytest.mark.parametrize('around', ['no_grad', 'inference'])
@pytest.mark.parametrize('method', [PerFedAvg(), FedPara(), FedALA(most=3), FedPer()], ids=lambda m: m.name)
def test_a_run_is_asked_where_nothing_is_to_be_learned(method, around):
    "Many put `no_grad` around a prediction; a client whose network is trained first has it all the same."
    run = go(method, **OWN)
    ask = lambda: [run.logits(ROWS.x_test, client=k) for k in (None, 1)] + [
        torch.tensor(run.per_client(ROWS, **OWN)['personal'].tolist()), run.network(1)(ROWS.x_test)[1].detach()]
    said = ask()
    with AROUND[around](): assert all(map(partial(torch.allclose, atol=1e-5), said, ask()))

@pytest.mark.parametrize('kind', KINDS)
def test_a_network_and_a_task_that_were_made_where_nothing_is_learned(kind):
    (method, kw), alone = KINDS[kind], alone_of(kind)
    def world():
        net = Plain(nn.BatchNorm1d(12)) if kind == 'recomputed' else Plain()
        more = dict(proxy=PUBLIC.clone()) if 'proxy' in kw else {}
        task = Task('rows', *(getattr(ROWS, k).clone() for k in TENSORS), 10)
        return {'executor': 'vmap', **kw, 'net': net, 'task': task, **more}
    with torch.inference_mode():
        made = world()
        assert same(alone, go(method, **made))
    assert same(alone, go(method, **made))

def of_run(run):
    left = run.without(1)
    return dict(facts=facts(run), per_client=run.per_client(ROWS, **OWN), influence=run.influence([2]),
                without=(repr(left), left.clients(), left.classes()), newcomers=run.newcomers(steps=2))

def on_their_own(net):
    one = runs.Federation(net, ROWS, CLIENTS, FedAvg(), 1, LOCAL, progress=False)
    few = dict(rounds=1, clients=3, local=LOCAL, model='mlp', options=(('hidden', (8,)), ('features', 8)))
    return dict(portrait=portrait(MOON()).svg(), traffic=traffic(MOON(), net, (64,), 10, 2),
                together=run_together([one])[0].last['loss'],
                centralised=runs.train_centrally(net, ROWS, 1, LOCAL, progress=False).last['loss'],
                compare=compare([FedPer()], DIGITS, seeds=1, **few),
                interactions=interactions([FedPer(), MOON()], 1, task=DIGITS, progress=False, **few).runs)

@pytest.mark.parametrize('around', ['no_grad', 'autocast', *(
    pytest.param(k, marks=pytest.mark.slow) for k in AROUND if k not in ('no_grad', 'autocast'))])
@pytest.mark.filterwarnings('ignore')
def test_what_surrounds_a_question_does_not_reach_into_it(around):
    "The public functions that train, or score as a run does; a prediction heeds the caller's autocast."
    run, before = go(FedPer(), without=(4,)), torch.get_num_threads()
    net = Plain()
    told = lambda: repr({**of_run(run), **on_their_own(net)})
    alone = told()
    torch.set_num_threads(2)
    try:
        with AROUND[around](): said = told()
        assert said == alone and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)

def test_a_method_keeps_the_laws_where_nothing_is_learned():
    with torch.no_grad(): assert check(FedAvg()).ok

def test_a_federation_that_ends_leaves_the_default_type_to_another_at_work():
    "All threads share it; here one federation begins and ends while another measures."
    types, net = [], Plain()
    def another(logits, y):
        other = threading.Thread(target=go, args=(FedAvg(), net))
        other.start()
        other.join()
        types.append(torch.get_default_dtype())
        return 1.
    with default(torch.double):
        go(FedAvg(), net, metrics=dict(another=another))
        assert torch.get_default_dtype() == torch.double
    assert {*types} == {torch.float32}

# --- what would be dropped ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('register', [nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook])
def test_a_hook_on_a_parameters_gradient_is_refused(register):
    net = Plain()
    handle = register(net.head.weight, lambda g: None)
    with pytest.raises(ValueError, match=r"Plain has a hook on the gradient of head.weight.*remove\(\).*`grad`"):
        go(net=net)
    handle.remove()
    assert same(go(net=net), go())

class Scaled(nn.Module):
    "A criterion with a temperature."
    def __init__(self, learns=True):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.), learns)
    def forward(self, logits, y): return F.cross_entropy(self.scale*logits, y)

class Holds:
    "One that is no module."
    def __init__(self): self.inside = Scaled()
    def __call__(self, logits, y): return self.inside(logits, y)

def with_scale(logits, y, scale): return F.cross_entropy(scale*logits, y)
SCALE, NET = torch.tensor(2., requires_grad=True), Plain()

@pytest.mark.parametrize('criterion,shape', [
    (Scaled(), '()'), (Scaled().forward, '()'), (Holds(), '()'), (partial(with_scale, scale=SCALE), '()'),
    (lambda logits, y: F.cross_entropy(SCALE*logits, y), '()'),
    (lambda logits, y: F.cross_entropy(logits, y) + 1e-3*NET.head.weight.square().sum(),
     str(tuple(NET.head.weight.shape)))])
def test_a_criterion_with_something_to_train_is_refused(criterion, shape):
    with pytest.raises(ValueError, match=re.escape(f'depends on a parameter of shape {shape}, which clients never')):
        go(criterion=criterion)

CALLS = []
def counted(logits, y):
    CALLS.append(NET.training)
    return F.cross_entropy(logits, y)

@pytest.mark.parametrize('criterion', [
    Scaled(learns=False), nn.CrossEntropyLoss(weight=torch.ones(10)),
    lambda logits, y: F.cross_entropy(logits, y) if NET.training else F.cross_entropy(logits, y),
    lambda logits, y: F.cross_entropy(logits*SCALE.detach(), y)])
def test_a_criterion_with_nothing_to_train_is_taken(criterion):
    assert go(criterion=criterion, executor='loop').state.round == 2

# --- what is drawn ------------------------------------------------------------------------------------------------

class Always(nn.Module):
    "Drops out in evaluation too, as `F.dropout` does where nobody says otherwise."
    def forward(self, x): return F.dropout(x)

@pytest.mark.parametrize('layer,kw', [
    *((nn.Dropout(), dict(statistics=how, executor=e)) for how in ('recomputed', 'static') for e in ('loop', 'vmap')),
    (Always(), OWN), (Always(), dict(participation=PowerOfChoice(.5))), (Always(), dict(metrics=dict(hits=hits)))])
def test_whatever_a_network_draws_depends_on_the_seed_alone(layer, kw):
    net = Plain(nn.Sequential(layer, nn.BatchNorm1d(12)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run = go(net=net, **kw)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(run, go(net=net, **kw)) and not same(run, go(net=net, seed=1, **kw))

def test_what_a_client_draws_for_the_statistics_depends_on_nobody_else():
    "The statistics of two rounds' clients together are the mean of what each gives alone."
    net, method = Plain(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(12))), FedAvg()
    state = replace(start(method, net, 5, 'recomputed'), round=3)
    task, local = runs.normalise_once(ROWS), Local(epochs=1, batch_size=64)
    def seen(who): return recompute(method, net, state, batches_of(task, CLIENTS, who, local), who).buffers
    alone, n = [seen([k]) for k in (1, 4)], torch.tensor([float(len(CLIENTS[k])) for k in (1, 4)])
    for k, v in seen([4, 1]).items():
        if not v.is_floating_point(): continue
        torch.testing.assert_close(v, (n[0]*alone[0][k] + n[1]*alone[1][k])/n.sum())

# --- to another process -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('method', [FedAvg(), FedBN(), FedPer(), MOON(), SCAFFOLD(), FedPer() + MOON()],
                         ids=lambda m: m.name)
@pytest.mark.parametrize('memory', [None, 100], ids=['in memory', 'on disk'])
def test_a_run_can_be_pickled(method, memory, tmp_path, monkeypatch):
    "As it is or from a file, with its rows in memory or on disk: to the last bit, and it goes on."
    if memory: monkeypatch.setenv('FEDLIT_MEMORY', str(memory))
    run = go(method, Plain(nn.BatchNorm1d(12)), participation=.6, keep_locals=True)
    run.save(tmp_path/'run')
    read = Run.load(tmp_path/'run', Plain(nn.BatchNorm1d(12)))
    for one in (run, read):
        other = pickle.loads(pickle.dumps(one))
        assert same(one, other) and other.settings == one.settings and repr(other.method) == repr(one.method)
        assert torch.equal(one.predict(ROWS.x_test, 1), other.predict(ROWS.x_test, 1))
        for mine, its in zip(*(leaves(dict(a=r.state.personal, b=r.state.client)) for r in (one, other))):
            assert mine.written() == its.written() and len(mine) == len(its)
            its[0] = torch.ones(its.shape[1:])
        other.save(tmp_path/'again')
    other = pickle.loads(pickle.dumps(run))
    stores = {id(v.store) for v in leaves(dict(a=other.state.personal, b=other.state.client))}
    assert len(stores) <= 1 # the budget is for all tables together

def test_a_run_comes_back_from_a_pool():
    with ProcessPoolExecutor(1, get_context('spawn')) as pool: far = pool.submit(go, METHOD).result()
    assert same(far, go(METHOD))

class Twice(nn.Module):
    "One layer under two names, and another whose weight two layers share."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.again, self.like = self.b, nn.Linear(8, 8)
        self.like.weight = self.b.weight
    def forward(self, x):
        z = self.like(self.again(self.b(self.a(x.flatten(1)).tanh()).tanh()).tanh())
        return z, self.head(z)

@pytest.mark.parametrize('statistics', ['averaged', 'recomputed'])
def test_a_layer_with_two_names_keeps_its_own_tensors(statistics):
    task, net = load('digits').subset(60, seed=0, test=20), Twice()
    run = federate(net, task, [torch.arange(30), torch.arange(30, 60)], FedPer(), 2, Local(epochs=1), progress=False,
                   statistics=statistics)
    before = deepcopy(run.model.state_dict())
    run.logits(task.x_test, client=1)
    assert all(isinstance(v, nn.Parameter) and v.requires_grad for v in run.model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())
    assert run.model.like.weight is run.model.again.weight

def test_a_run_is_loaded_whatever_the_default_device(tmp_path):
    run, other = go(FedPer()), federate([Plain()]*5, ROWS, CLIENTS, FedPer(), 1, LOCAL, progress=False)
    run.save(tmp_path/'run')
    other.save(tmp_path/'several')
    with torch.device('meta'):
        one, several = Run.load(tmp_path/'run', model=run.model), MixedRun.load(tmp_path/'several', [run.model]*5)
    assert same(run, one) and same(other.runs[0], several.runs[0])
