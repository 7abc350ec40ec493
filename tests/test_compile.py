"What is compiled does what would have run, up to rounding; what cannot be is played, and one sentence says so."
import os, warnings
import pytest, torch
from torch import nn
from fedlit.data import load
from fedlit.ground import tape
from fedlit.ground.tape import Tapes, compile_step, no_compiler
from fedlit.local import Adam, AdamW, Decay, Local
from fedlit.method import Method
from fedlit.methods import FedAvg, FedDecorr, FedProx, HeteroFL, MOON
from fedlit.models import Net, build
from fedlit.partition import iid
from fedlit.run import federate, federating
from conftest import SELDOM
from federation import HALVES, METHODS, SUMS, difference, train

compiler = pytest.mark.skipif(bool(no_compiler()), reason='no compiler of C++')

@pytest.fixture
def as_written(monkeypatch):
    "In the compiler's place the graph itself, which is run operation by operation; how many there were."
    made = []
    def build(module, examples):
        made.append(module)
        return module
    monkeypatch.setattr(tape, '_compile_graph', build)
    monkeypatch.setattr(tape, 'no_compiler', lambda: '')
    return made

def sentences(seen): return [str(w.message) for w in seen if 'played from the tape' in str(w.message)]

WAYS = [('vmap', True), *(pytest.param(e, n, marks=SELDOM) for e, n in (('loop', False), ('threads', True)))]

@pytest.mark.parametrize('executor,norm', WAYS, ids=['vmap', 'loop', 'threads'])
@pytest.mark.parametrize('m', METHODS + SUMS, ids=repr)
def test_the_graph_is_the_step(m, executor, norm, as_written):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        got = train(m, executor, norm=norm, tapes=Tapes(compiles=True))
    assert difference(got, train(m, executor, norm=norm)) < 1e-9 and not sentences(seen)

def small(method=None, how='compile', rounds=3, **kw):
    task = load('digits').subset(160, seed=0)
    net, clients = build('mlp', task, seed=0, hidden=(8,), features=8), iid(task.y_train, 3, seed=0)
    given = dict(local=Local(epochs=1), device='cpu', progress=False, executor='vmap', record=how)
    return federate(net, task, clients, method or FedAvg(), rounds=rounds, **{**given, **kw})

def weights(run): return run.model.state_dict()
def same(a, b): return all(torch.equal(v, weights(b)[k]) for k, v in weights(a).items())

@pytest.mark.parametrize('optimizer', [dict(), dict(optimizer=Adam()), dict(optimizer=AdamW(), weight_decay=.1),
                                       dict(momentum=0.)], ids=str)
def test_a_rate_that_changes_is_compiled_once(optimizer, as_written):
    local = Local(epochs=2, lr=Decay(.01, .5), **optimizer)
    one, other = small(local=local), small(local=local, how=False)
    assert len(as_written) == 1
    assert all((v - weights(other)[k]).abs().max() < 1e-6 for k, v in weights(one).items())

def test_where_nothing_can_change_kernels_are_compared_once_and_it_does_not_show(as_written, monkeypatch):
    "`federating` compares in every round, `federate` in the first."
    def rounding_otherwise(module, examples):
        def run(*inputs):
            out = module(*inputs)
            inputs[0].mul_(1 + 2**-22)
            return out
        return run
    monkeypatch.setattr(tape, '_compile_graph', rounding_otherwise)
    calls, compare = [], Tapes._compare
    monkeypatch.setattr(Tapes, '_compare', lambda self, *args: (calls.append(1), compare(self, *args))[1])
    task = load('digits').subset(160, seed=0)
    given = dict(local=Local(epochs=2), device='cpu', progress=False, executor='vmap', record='compile')
    def net(): return build('mlp', task, seed=0, hidden=(8,), features=8, norm='batch')
    ends = []
    for go in (federate, lambda *args, **kw: [*federating(*args, **kw)][-1]):
        calls.clear()
        ends += [go(net(), task, iid(task.y_train, 3, seed=0), MOON() + FedDecorr(), rounds=4, **given), len(calls)]
    assert same(ends[0], ends[2]) and ends[1] < ends[3]

def test_short_batches_are_played_and_the_same_seed_gives_the_same_bits(tmp_path, as_written):
    runs = [small(rounds=4) for _ in range(2)]
    assert same(*runs) and len(as_written) == 2 # three clients have batches of 32, and then of 21 and 22
    small(rounds=2, checkpoint=tmp_path/'run.pt')
    assert same(runs[0], small(rounds=4, checkpoint=tmp_path/'run.pt'))

def test_without_a_compiler_one_sentence_and_the_tape(monkeypatch):
    monkeypatch.setenv('CXX', '/nowhere/g++')
    with pytest.warns(UserWarning) as seen: run = small()
    assert sentences(seen) == ["a step cannot be compiled (there is no compiler /nowhere/g++ on this machine), "
                               "so steps are played from the tape or run as they are"]
    assert same(run, small(how=True))

def test_a_run_that_waits_for_kernels_says_so_where_progress_is_shown(as_written, capsys):
    small()
    assert 'kernels' not in capsys.readouterr().err
    small(progress=True)
    assert capsys.readouterr().err.count("record='compile': the first steps wait for their kernels") == 1
    small(how=True, progress=True)
    assert 'kernels' not in capsys.readouterr().err

def breaks(module, examples): raise NotImplementedError('no kernel for this\nand more lines')

def trips(module, examples): raise RuntimeError('C++ compile error\n\n/tmp/a.cpp:3:1: error: no such type\nmore')

def forgets(module, examples): return lambda *inputs: [] # does nothing

def spoils(change):
    "A compiler whose step is followed by `change(written, as it was)` of each of its inputs."
    def build(module, examples):
        def run(*inputs):
            before = [v.clone() for v in inputs]
            out = module(*inputs)
            for v, b in zip(inputs, before):
                if v.is_floating_point(): change(v, b)
            return out
        return run
    return build

drifts = spoils(lambda v, b: v.mul_(1.01))
exaggerates = spoils(lambda v, b: v.add_(v - b, alpha=.08)) # what is written moves too far by eight in a hundred
stands_still = spoils(lambda v, b: v.dim() == 3 and v.copy_(b)) # the matrices

@pytest.mark.parametrize('local', [Local(epochs=1), Local(epochs=1, lr=1e-4, momentum=0.)], ids=['usual', 'slow'])
@pytest.mark.parametrize('build', [exaggerates, stands_still], ids=['exaggerates', 'stands still'])
def test_kernels_that_are_a_little_wrong_are_not_trusted(build, local, as_written, monkeypatch):
    monkeypatch.setattr(tape, '_compile_graph', build)
    with pytest.warns(UserWarning, match='does not do what the step does'): run = small(local=local)
    assert same(run, small(how=True, local=local))

@pytest.mark.parametrize('build,why', [
    (trips, 'RuntimeError: /tmp/a.cpp:3:1: error: no such type'),
    (breaks, 'NotImplementedError: no kernel for this'),
    (forgets, 'ArithmeticError: the compiled step does not do what the step does'),
    (drifts, 'ArithmeticError: the compiled step does not do what the step does')])
def test_what_fails_or_does_something_else_is_not_trusted(build, why, as_written, monkeypatch):
    monkeypatch.setattr(tape, '_compile_graph', build)
    with pytest.warns(UserWarning) as seen: run = small()
    assert sentences(seen) == [f"a step cannot be compiled ({why}), so steps are played from the tape "
                               "or run as they are"]
    assert same(run, small(how=True))

def test_the_compiler_may_write_to_the_environment(as_written, monkeypatch):
    "As Inductor does where nobody has named a folder for its kernels."
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '/nowhere') # so that it is put back
    del os.environ['TORCHINDUCTOR_CACHE_DIR']
    build = tape._compile_graph
    def writes(*args):
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp/kernels'
        return build(*args)
    monkeypatch.setattr(tape, '_compile_graph', writes)
    with warnings.catch_warnings(record=True) as seen: small() # as errors they would be caught where it compiles
    assert len(as_written) == 1 and not [str(w.message) for w in seen]

class Counts(nn.CrossEntropyLoss):
    calls = 0
    def forward(self, x, y):
        self.calls += 1
        return super().forward(x, y)

def test_a_step_that_remembers_is_not_compiled(as_written):
    with pytest.warns(UserWarning, match='a step changes what Python remembers'): run = small(criterion=Counts())
    assert not as_written and same(run, small(criterion=Counts(), how=False))

class Phases(Method):
    def loss(self, features, step): return (step % 2)*features.square().mean()

class Peeks(Method):
    def loss(self, features): return features.square().mean() if float(features.mean().detach()) > 0 else 0.

def drops(): return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(.5)), nn.Linear(8, 10))

SAID = "; so with record='compile' steps are played from the tape or run as they are"

@pytest.mark.parametrize('kw,why', [
    (dict(method=Phases()), 'Phases() asks for what changes with the step'),
    (dict(executor='extract', method=HeteroFL(rates=HALVES)),
     "executor='extract' trains networks of many sizes"),
    (dict(executor='loop', local=Local(epochs=1, batch_size=64)),
     'no client has the 64 samples of a full batch')], ids=lambda v: '')
def test_what_will_not_be_compiled_is_said_before_the_first_round(kw, why, as_written):
    with pytest.warns(UserWarning) as seen: run = small(**kw)
    assert sentences(seen) == [why + SAID]
    assert not as_written and same(run, small(**kw, how=True))

def test_what_cannot_be_recorded_is_not_compiled(as_written):
    task = load('digits').subset(160, seed=0)
    clients = iid(task.y_train, 3, seed=0)
    def go(how, net, method):
        torch.manual_seed(0)
        return federate(net(), task, clients, method, rounds=2, local=Local(epochs=1), device='cpu', progress=False,
                        executor='loop', record=how)
    for net, method in (drops, FedAvg()), (lambda: build('mlp', task, seed=0), Peeks()):
        with pytest.warns(UserWarning) as seen: run = go('compile', net, method)
        assert sentences(seen) == ['a step cannot be compiled (it draws random numbers or looks at the numbers in a '
                                   'tensor), so steps are played from the tape or run as they are']
        assert same(run, go(True, net, method))

def test_steps_with_inputs_laid_out_otherwise(as_written):
    "What was compiled for one layout takes another, unless it is to be written."
    def f(w, r, x):
        w.add_(x @ r)
        return dict(sum=w.sum())
    w, r, x = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    bind = compile_step(f, (w, r, x), steady=2)
    for mine in (w.clone(), w.T.contiguous().T):
        other = mine.clone()
        out = bind(mine, r.T.contiguous().T)(x.T.contiguous().T)
        assert torch.equal(out['sum'], f(other, r, x)['sum']) and torch.equal(mine, other)

@compiler
@pytest.mark.slow
def test_compiled_steps(monkeypatch, tmp_path):
    "With the compiler itself, once."
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '/nowhere') # so that it is put back
    del os.environ['TORCHINDUCTOR_CACHE_DIR']                 # Inductor sets it itself:
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))    # others may compile for another processor
    local, built, tried = Local(epochs=2, lr=Decay(.05, .5)), tape._compile_graph, []
    monkeypatch.setattr(tape, '_compile_graph', lambda *args: tried.append(1) or built(*args))
    with warnings.catch_warnings(record=True) as seen: one = small(local=local)
    other = small(local=local, how=True)
    start = build('mlp', load('digits').subset(160, seed=0), seed=0, hidden=(8,), features=8).state_dict()
    moved = max((v - start[k]).abs().max() for k, v in weights(other).items())
    assert len(tried) == 1 and not [str(w.message) for w in seen]
    assert max((v - weights(other)[k]).abs().max() for k, v in weights(one).items()) < 1e-5*moved

CASES = [(HeteroFL(rates=HALVES), 'loop'), (FedProx(mu=.1), 'vmap'), (FedAvg(), 'threads')]

@compiler
@pytest.mark.slow
@pytest.mark.parametrize('m,executor', CASES, ids=repr)
def test_compiled_convolutions_norms_masks_and_ragged_clients(m, executor):
    torch.set_num_threads(2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        got = train(m, executor, tapes=Tapes(compiles=True))
    assert difference(got, train(m, executor)) < 1e-11 and not sentences(seen)

@compiler
@pytest.mark.slow
def test_compiled_bfloat16():
    one, other = (small(how=h, precision='bfloat16', rounds=2) for h in ('compile', True))
    assert all((v - weights(other)[k]).abs().max() < .02 for k, v in weights(one).items())
