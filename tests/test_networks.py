"Unusual networks: buffers that are no statistics, Python that remembers, activation checkpointing."
import io, itertools, math, os, random, types, warnings
from contextvars import ContextVar
from functools import lru_cache, partial
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from fedlit.data import load
from fedlit.methods import DepthFL, FedAvg, FedBN, FedPer, HeteroFL, MOON, SCAFFOLD # noqa: F401
from fedlit.partition import iid
from fedlit.batches import cross_entropy
from fedlit.local import Local
from fedlit.result import Run
from fedlit.run import federate
from fedlit.ground.tape import Tapes
from fedlit.engine.inputs import python_state
from test_distributed import launch

TASK = load('digits').subset(120, test=40)
CLIENTS = iid(TASK.y_train, 4, seed=0)
EXECUTORS = 'loop', 'threads', 'vmap', 'extract'
TWICE = dict(rounds=3, local=Local(epochs=1, batch_size=10), progress=False)

class Net(nn.Module):
    "A perceptron with whatever else it is given."
    def __init__(self, norm=False, **buffers):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)
        if norm: self.norm = nn.BatchNorm1d(16)
        for k, v in buffers.items(): self.register_buffer(k, v)
    def forward(self, x):
        z = self.a(x.flatten(1)).relu()
        if hasattr(self, 'norm'): z = self.norm(z)
        return z, self.b(z)

def go(model=None, method=None, executor='loop', clients=CLIENTS, **kw):
    return federate(model or Net(), TASK, clients, method or FedAvg(), executor=executor, **{**TWICE, **kw})

def same(a, b): return all(torch.equal(v, b.state.params[k]) for k, v in a.state.params.items())

# ---- buffers ----

BUFFERS = dict(flag=torch.tensor([True, False]), complex=torch.tensor([1+2j, -3.]),
               mask=torch.tensor([[0., -math.inf]]), hash=torch.tensor([2**63-1, 2**53+1, -2**63]),
               bytes=torch.tensor([3, 255], dtype=torch.uint8),
               both=torch.tensor([math.inf, -math.inf, 1.]), small=torch.tensor(-math.inf, dtype=torch.bfloat16))

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('method', [FedAvg(), MOON(), *(pytest.param(m, marks=pytest.mark.slow) for m in (
    SCAFFOLD(), FedBN(), HeteroFL(rates=(1., .5))))], ids=repr)
def test_buffers_that_are_no_statistics_are_carried(tmp_path, executor, method):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        run = go(Net(norm=True, **BUFFERS), method, executor)
    held = {**run.state.buffers, **dict(run.model.named_buffers())}
    assert all(torch.equal(held[k], v) and held[k].dtype == v.dtype for k, v in BUFFERS.items())
    assert same(run, go(Net(norm=True), method, executor))       # and nothing else is changed by them
    run.save(tmp_path/'r')
    back = Run.load(tmp_path/'r', model=Net(norm=True, **BUFFERS))
    assert all(torch.equal(back.state.buffers[k], v) for k, v in BUFFERS.items())

@pytest.mark.parametrize('guard', ['skip', 'report', 'stop'])
def test_an_infinity_that_was_not_sent_is_still_bad(guard):
    class Breaks(Net):
        def forward(self, x):
            self.both.add_(torch.tensor([0., 0., math.inf]))
            return super().forward(x)
    ask = lambda: go(Breaks(**BUFFERS), bad_clients=guard, rounds=1)
    if guard == 'stop':
        with pytest.raises(FloatingPointError, match='client 0 produced NaN.* in round 1, first in both'): ask()
        return
    with pytest.warns(UserWarning, match='first in both'): run = ask()
    assert run.history['bad'].tolist() == [4]

def test_what_clients_count_is_averaged_and_what_they_vote_on_is_decided():
    class Counts(Net):
        def forward(self, x):
            if not self.training: return super().forward(x)
            self.steps.add_(1)
            self.seen.logical_or_(x.flatten(1).sum() > -math.inf)
            self.wave.add_(1j)
            return super().forward(x)
    run = go(Counts(steps=torch.tensor(2**40), seen=torch.tensor(False), wave=torch.tensor(1+0j)),
             clients=[CLIENTS[0][:10], CLIENTS[1][:20], CLIENTS[2][:30]], weighting='uniform', rounds=2)
    assert run.state.buffers['steps'] == 2**40 + 2*2 and run.state.buffers['seen'] and run.state.buffers['wave'] == 1+4j

def test_complex_parameters_are_refused_by_name():
    class Complex(Net):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([1+1j]))
    with pytest.raises(ValueError, match='phase of Complex is a parameter of complex numbers'): go(Complex())

# ---- Python that remembers ----

CALLS, HELD = 0, types.SimpleNamespace(calls=0)
def warm(z, y, t): return cross_entropy(z, y)*(1. if t < 25 else .01)

def closure():
    calls = 0
    def criterion(z, y):
        nonlocal calls
        calls += 1
        return warm(z, y, calls)
    return criterion

def variable():
    global CALLS
    CALLS = 0
    def criterion(z, y):
        global CALLS
        CALLS += 1
        return warm(z, y, CALLS)
    return criterion

def attribute():
    def criterion(z, y):
        criterion.calls += 1
        return warm(z, y, criterion.calls)
    criterion.calls = 0
    return criterion

def thing():
    class Criterion:
        def __init__(self): self.calls = 0
        def __call__(self, z, y):
            self.calls += 1
            return warm(z, y, self.calls)
    return Criterion()

def of_class():
    class Criterion:
        calls = 0
        def __call__(self, z, y):
            Criterion.calls += 1
            return warm(z, y, Criterion.calls)
    return Criterion()

def module():
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = [dict(n=0)]
        def forward(self, z, y):
            self.seen[0]['n'] += 1
            return warm(z, y, self.seen[0]['n'])
    return Criterion()

def elsewhere():
    HELD.calls = 0
    def criterion(z, y):
        HELD.calls += 1
        return warm(z, y, HELD.calls)
    return criterion

def tensor():
    t = torch.zeros(())
    def criterion(z, y):
        t.add_(1)
        return cross_entropy(z, y)*torch.where(t < 25, 1., .01)
    return criterion

def of_random():
    random.seed(0)
    return lambda z, y: cross_entropy(z, y)*random.random()

def of_numpy():
    np.random.seed(0)
    return lambda z, y: cross_entropy(z, y)*float(np.random.rand())

def keeps(held, more, count):
    "A criterion that changes what it holds by `more`, which is then as `count` says."
    def criterion(z, y):
        more(held)
        return warm(z, y, count(held))
    return criterion

def times(draw): return lambda z, y: cross_entropy(z, y)*draw()

REMEMBER = dict(
    closure=closure, variable=variable, attribute=attribute, thing=thing, of_class=of_class, module=module,
    elsewhere=elsewhere, tensor=tensor, of_random=of_random, of_numpy=of_numpy,
    iterator=lambda: times(partial(next, itertools.count(1., -.01))),
    cycle=lambda: times(partial(next, itertools.cycle([1., .1, .5]))),
    generator=lambda: times(partial(next, (.99**n for n in range(10**6)))),
    own_numpy=lambda: times(np.random.default_rng(0).random), own_random=lambda: times(random.Random(0).random),
    listed=lambda: keeps([], lambda seen: seen.append(1), len),
    bytes_of_its_own=lambda: keeps(bytearray(), lambda seen: seen.append(1), len),
    last_of_many=lambda: keeps(np.zeros(5000, int), lambda seen: np.add.at(seen, -1, 1), lambda seen: seen[-1]),
    written=lambda: keeps(io.StringIO(), lambda text: text.write('x'), io.StringIO.tell))

@pytest.mark.parametrize('executor', ['loop', pytest.param('vmap', marks=pytest.mark.slow)])
@pytest.mark.parametrize('how', REMEMBER)
def test_a_criterion_that_remembers_is_run_every_time(how, executor):
    make = REMEMBER[how]
    plain = go(criterion=make(), executor=executor, record=False)
    with pytest.warns(UserWarning, match='a step changes what Python remembers'):
        recorded = go(criterion=make(), executor=executor)
    assert same(plain, recorded)

# in places that nobody looks at
def falling(z, y, calls): return cross_entropy(z, y)*.9**calls

def cached():
    @lru_cache
    def calls(key): return [0]
    def criterion(z, y):
        calls(0)[0] += 1
        return falling(z, y, calls(0)[0])
    return criterion

def context():
    calls = ContextVar('calls', default=0)
    def criterion(z, y):
        calls.set(calls.get() + 1)
        return falling(z, y, calls.get())
    return criterion

def environment():
    os.environ['FEDLIT_CALLS'] = '0'
    def criterion(z, y):
        os.environ['FEDLIT_CALLS'] = str(int(os.environ['FEDLIT_CALLS']) + 1)
        return falling(z, y, int(os.environ['FEDLIT_CALLS']))
    return criterion

@pytest.mark.parametrize('make', [cached, context, environment], ids=lambda f: f.__name__)
def test_what_changes_the_step_is_found_wherever_it_is_kept(make):
    plain = go(criterion=make(), record=False)
    with pytest.warns(UserWarning, match='no longer does what the step does'): recorded = go(criterion=make())
    assert same(plain, recorded)

def test_numbers_of_the_system_are_found():
    rng = random.SystemRandom()
    with pytest.warns(UserWarning, match='no longer does what the step does'):
        go(criterion=lambda z, y: cross_entropy(z, y)*rng.random())

def test_a_look_at_a_large_or_endless_object_ends():
    endless = []
    endless.append(endless)
    held = types.SimpleNamespace(large=np.zeros(10**8, np.int8), endless=endless, calls=0)
    held.me = held
    before, again = (python_state(held=held) for _ in range(2))
    held.calls += 1
    assert before == again != python_state(held=held)

@pytest.mark.filterwarnings('ignore:a step changes')
@pytest.mark.parametrize('executor', ['threads', 'extract'])
def test_and_on_threads(executor):
    torch.set_num_threads(2)
    counts = []
    for record in (False, True):
        seen = []
        def criterion(z, y, seen=seen):
            seen.append(1)
            return cross_entropy(z, y)
        go(criterion=criterion, executor=executor, record=record)
        counts.append(len(seen))
    assert counts[0] == counts[1] == 3*4*3 + 1  # rounds, clients, batches; and it is tried once beforehand

@pytest.mark.parametrize('criterion', [cross_entropy, F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=.1),
                                       lambda z, y: cross_entropy(2*z, y)], ids=['ours', 'torch', 'module', 'lambda'])
def test_what_does_not_remember_is_recorded_without_a_word(criterion, monkeypatch):
    kept, real = [], Tapes.__init__
    monkeypatch.setattr(Tapes, '__init__', lambda self, *args: (real(self, *args), kept.append(self))[0])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        go(criterion=criterion)
    assert any(callable(p) for p in kept[0].kept.values())

class Counter(Net):
    def __init__(self, how):
        super().__init__()
        self.how, self.n, self.held, self.rng = how, 0, [0], np.random.default_rng(0)
    def forward(self, x):
        z, logits = super().forward(x)
        if not self.training: return z, logits
        return z, logits*self.scale()
    def scale(self):
        if self.how == 'random': return random.random()
        if self.how == 'numpy': return float(np.random.rand())
        if self.how == 'own': return float(self.rng.random())
        if self.how == 'attribute': self.n += 1
        if self.how == 'list': self.held[0] += 1
        if self.how == 'elsewhere': HELD.calls += 1
        return 1. if (self.n, self.held[0], HELD.calls) < (25, 25, 25) else .01

DRAWS, CHANGES = 'random numbers of Python or NumPy', 'changes attributes'

@pytest.mark.parametrize('how, why', [('random', DRAWS), ('numpy', DRAWS), ('own', ''), ('attribute', CHANGES),
                                      ('list', ''), ('elsewhere', '')])
def test_a_forward_that_remembers_is_run_every_time(how, why):
    runs = []
    for record in (False, True):
        random.seed(0)
        np.random.seed(0)
        HELD.calls = 0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            runs.append(go(net := Counter(how), record=record))
        assert record == any('are not recorded' in str(w.message) and why in str(w.message) for w in said)
        assert net.n == net.held[0] == 0 # the user's own network is not touched
    assert how == 'elsewhere' or same(*runs)    # there the trial counts too

class First(Net):
    "It keeps what `what` makes of the first batch."
    kept = None
    def __init__(self, what):
        super().__init__()
        self.what = what
    def forward(self, x):
        if self.kept is None: self.kept = self.what(x)
        return super().forward(x + self.kept)

@pytest.mark.parametrize('what, said', [
    (lambda x: x.mean(0), True), (lambda x: x.new_ones(()), False), (lambda x: torch.tril(x.new_ones(8, 8)), False)])
def test_a_forward_may_keep_a_mask_but_not_the_mean_of_its_first_batch(what, said):
    with warnings.catch_warnings(record=True) as all_said:
        warnings.simplefilter('always')
        go(First(what), executor='loop')
    assert said == any('gives other results once it has run' in str(w.message) for w in all_said)

# ---- activation checkpointing ----

class Thrifty(Net):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
    def forward(self, x):
        z = checkpoint(lambda x: self.a(x).relu(), x.flatten(1), use_reentrant=self.reentrant)
        return z, self.b(z)

@pytest.mark.parametrize('executor', ['auto', *EXECUTORS])
@pytest.mark.parametrize('reentrant', [False, True])
def test_activation_checkpointing_is_refused(executor, reentrant):
    with pytest.raises(ValueError, match='activation checkpointing'): go(Thrifty(reentrant), executor=executor)

def _on_ranks(rank, path):
    run = go(Net(norm=True, **BUFFERS), MOON(), 'torchrun:loop')
    if rank == 0: run.save(path/'run')

def test_buffers_are_carried_on_two_ranks(tmp_path):
    launch(_on_ranks, 2, tmp_path)
    held = Run.load(tmp_path/'run').state.buffers
    assert all(torch.equal(held[k], v) for k, v in BUFFERS.items())

class Recurrent(nn.Module):
    "Its layer keeps a list of its parameters, and it keeps its last features."
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 10)
    def forward(self, x):
        self.last = self.rnn(x.flatten(1, 2))[0][:, -1]
        return self.last, self.head(self.last)

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kind', [nn.LSTM, nn.GRU, nn.RNN])
def test_what_is_made_of_parameters_is_no_memory(kind):
    "So they are recorded without a word, with the numbers of steps that are run; and they cannot be stacked."
    net = Recurrent(kind)
    plain, *others = [go(net, executor=e, record=r) for e, r in (('loop', False), ('loop', True), ('threads', True))]
    with pytest.warns(UserWarning, match="cannot be stacked by vmap .*; going on with executor='loop'"):
        others.append(go(net, executor='auto'))
    for run in others:
        assert max((run.state.params[k] - v).abs().max().item() for k, v in plain.state.params.items()) < 1e-6

# ---- buffers that forward writes ----

class Mean(Net):
    "Subtracts a running mean of its features, which it keeps in a buffer."
    def __init__(self, how):
        super().__init__(m=torch.zeros(16), n=torch.zeros((), dtype=torch.long))
        self.how = how
    def forward(self, x):
        z = self.a(x.flatten(1)).relu()
        new = .9*self.m + .1*z.mean(0)
        if self.training and self.how == 'assigned': self.m, self.n = new, self.n + 1
        if self.training and self.how == 'in place':
            self.m.copy_(new)
            self.n += 1
        return z, self.b(z - self.m)

@pytest.mark.parametrize('executor', EXECUTORS)
def test_a_buffer_may_be_assigned_or_written_in_place(executor):
    runs = [go(Mean(how), executor=executor) for how in ('assigned', 'in place')]
    assert same(*runs) and all(torch.equal(v, runs[1].state.buffers[k]) for k, v in runs[0].state.buffers.items())
    for run in runs:
        assert run.state.buffers['m'].any() and not run.state.buffers['m'].requires_grad
        assert int(run.state.buffers['n']) == 9

class Cache(Net):
    "Makes a mask that is as long as the batch, and keeps it."
    def __init__(self): super().__init__(ones=torch.ones(0))
    def forward(self, x):
        if len(self.ones) < len(x): self.ones = x.new_ones(len(x))
        z = self.a(x.flatten(1)).relu()*self.ones[:len(x), None]
        return z, self.b(z)

@pytest.mark.parametrize('executor', EXECUTORS)
def test_a_buffer_of_another_shape_is_made_anew_every_time(executor):
    run = go(Cache(), executor=executor)
    assert same(run, go(executor=executor)) and len(run.state.buffers['ones']) == 0

class Calls(Net):
    "Counts its calls, in evaluation too, and divides by their number."
    def __init__(self): super().__init__(n=torch.zeros(()))
    def forward(self, x):
        self.n += 1
        z = self.a(x.flatten(1)).relu()/(1 + .1*self.n)
        return z, self.b(z)

def test_what_forward_writes_in_evaluation_leaves_the_state_alone():
    run = go(Calls())
    assert torch.equal(run.logits(TASK.x_test), run.logits(TASK.x_test))
    assert same(run, go(Calls(), evaluate_every=3)) and run.state.buffers['n'] == 9
    looped, stacked = (go(Calls(), MOON(), executor).state.params for executor in ('loop', 'vmap'))
    assert all(torch.allclose(v, stacked[k], atol=1e-5) for k, v in looped.items())
