"Clients of several runs in one stack: each run is what it is alone."
import copy
from dataclasses import replace
import numpy as np, pytest, torch
from torch import nn
import federation as fed
from fedlit import data
from fedlit.batches import TaskBatches, batches_of
from fedlit.cohort import Broadcast
from fedlit.data import Task
from fedlit.engine.runs import kind_of, train_runs
from fedlit.ground.tape import Tapes
from fedlit import compare as run_module
from fedlit.local import AdamW, Between, Local
from fedlit.method import FedAvg, Method
from fedlit.methods import DPSGD, FedAvgM, FedDecorr, FedMD, FedProx, MOON
from fedlit.participation import Available
from fedlit.partition import dirichlet
from fedlit.round import local_phase
from fedlit.result import Run
from fedlit.run import SingleProcess
from fedlit.compare import experiment, run_together
from fedlit.server import aggregate
from fedlit.state import start

STEPS, SEEDS, CLIENTS = Local(epochs=3, batch_size=8, lr=.1, momentum=.9, weight_decay=.01), (0, 1, 2), 4

def task():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 1, 6, 6, generator=g, dtype=torch.double), torch.randint(0, 3, (90,), generator=g)
    return Task('small', x[:60], y[:60], x[60:], y[60:], classes=3)

TASK = task()

def begun(method, seed, local=STEPS, statistics='averaged', norm=True):
    "Other first weights and other clients for every seed; the second has a client less in every round."
    net = fed.model(norm, seed)
    clients = dirichlet(TASK.y_train, clients=CLIENTS, alpha=.7, seed=seed)
    who = [k for k in range(CLIENTS) if k != seed]
    return net, clients, who, start(method, net, CLIENTS, statistics, seed, local)

def rounds(method, together, local=STEPS, how='averaged', norm=True, n=2):
    "The states of all runs after `n` rounds."
    runs, shelf = [begun(method, s, local, how, norm) for s in SEEDS], [Tapes() for _ in SEEDS]
    states = [r[-1] for r in runs]
    for t in range(n):
        asks = [(Broadcast(method, net, state, local, proxy=fed.PROXY), who,
                 batches_of(TASK, clients, who, local, s, t, min_batch=2))
                for s, state, (net, clients, who, _) in zip(SEEDS, states, runs)]
        outs = train_runs(asks, shelf[0]) if together else [local_phase(*a, 'vmap', b) for a, b in zip(asks, shelf)]
        states = [aggregate(a[0], a[1], out, torch.ones(len(a[1]))) for a, out in zip(asks, outs)]
        states = [replace(s, round=t+1) for s in states]
    return states

@pytest.fixture
def double(monkeypatch):
    "Images in double precision, so that rounding is no excuse."
    images = TaskBatches._images
    monkeypatch.setattr(TaskBatches, '_images', lambda *args: images(*args).double())

def kind(method, seed=0, norm=True):
    net = fed.model(norm, seed)
    return kind_of(Broadcast(method, net, start(method, net, 4), STEPS))

ALL = [m for m in fed.METHODS + fed.SUMS if kind(m) and kind(m) == kind(m, seed=1)]

def test_runs_whose_fixed_tensors_differ_train_apart():
    assert kind(fed.FedBABU()) == kind(fed.FedBABU()) != kind(fed.FedBABU(), seed=1)

class Home(Method):
    "What it sends depends on the network that it is shown."
    def send(self, delta, client, model, params):
        first = dict(model.named_parameters())
        return {k: v - .1*(params[k] - first[k].detach()) for k, v in delta.items()}, client

def test_runs_whose_clients_look_at_other_networks_train_apart():
    assert kind(Home()) == kind(Home()) != kind(Home(), seed=1)
    assert kind(fed.DP(), norm=False) == kind(fed.DP(), seed=1, norm=False) is not None

@pytest.mark.slow
@pytest.mark.parametrize('method', ALL, ids=repr)
def test_a_run_in_a_stack_is_the_run_alone(method, double):
    assert max(map(fed.difference, rounds(method, True), rounds(method, False))) < 1e-8

@pytest.mark.parametrize('local, how', [(replace(STEPS, optimizer=AdamW(kept=True), momentum=0., lr=.01), 'averaged'),
                                        (replace(STEPS, epochs=Between(1, 4), equal_batches=True), 'home')], ids=str)
def test_whatever_the_optimiser_and_the_effort(local, how, double):
    assert max(map(fed.difference, *(rounds(MOON(), both, local, how=how) for both in (True, False)))) < 1e-8

def test_every_client_draws_what_it_would_draw_alone(double):
    noisy = DPSGD(clip=1., noise=1.)
    alone, together = rounds(noisy, False, norm=False), rounds(noisy, True, norm=False)
    assert max(map(fed.difference, alone, together)) < 1e-8 and fed.difference(together[0], together[1]) > .01

# --- federations that keep step ------------------------------------------------------------------------------------

MADE = experiment('digits', .3, clients=4, rounds=3, options=(('hidden', (16,)), ('features', 8), ('norm', 'batch')),
                  local=Local(epochs=1, batch_size=16, lr=.05), participation=.5)

def same(one, two, numbers=2e-3, tensors=1e-2): # two runs; how far they may be apart
    a, b = one.history.drop(columns=['seconds', 'peak_mb']), two.history.drop(columns=['seconds', 'peak_mb'])
    assert a.columns.equals(b.columns) and len(a) == len(b)
    known = a.select_dtypes('number').columns
    assert np.allclose(a[known].astype(float), b[known].astype(float), atol=numbers, equal_nan=True)
    assert fed.difference(one.state, two.state) < tensors # rounding, which training amplifies

@pytest.fixture
def exact(monkeypatch):
    "Federations in double precision, so that rounding is no excuse for them either."
    plain = data.standardise
    monkeypatch.setattr(data, 'standardise', lambda *args: plain(*args).double())
    def made(*asked):
        f = MADE(*asked)
        return replace(f, model=copy.deepcopy(f.model).double())
    return made

@pytest.mark.parametrize('method', [MOON() + FedDecorr(), fed.FedProto()], ids=repr)
def test_runs_together_are_the_runs(method, exact):
    asked = [exact(method, s) for s in range(3)]
    for one, two in zip([f.run() for f in asked], run_together(asked)): same(one, two, 1e-8, 1e-8)

def test_a_run_goes_on_from_its_checkpoint_among_others(tmp_path, exact):
    file = tmp_path/'one.safetensors'
    replace(exact(MOON(), 1, file), rounds=2).run()
    asked = [exact(MOON(), s, file if s == 1 else None) for s in range(3)]
    for one, two in zip([exact(MOON(), s).run() for s in range(3)], run_together(asked)): same(one, two, 1e-8, 1e-8)

def test_a_run_that_breaks_leaves_the_others_alone():
    asked, failures = [MADE(FedAvg(), s) for s in range(3)], []
    asked[1] = replace(asked[1], model=copy.deepcopy(asked[1].model))
    with torch.no_grad(): asked[1].model.head.weight.fill_(torch.inf)
    runs = run_together(asked, failures)
    assert [type(e) for e in failures] == [type(None), FloatingPointError, type(None)]
    for k in (0, 2): same(MADE(FedAvg(), k).run(), runs[k])
    assert runs[1] is None
    with pytest.raises(FloatingPointError, match='round 1'): run_together(asked)

class Seeded(Method):
    "Its hook wants the seed, which a stack of several runs has not."
    def loss(self, features, seed): return 0.*features.sum()*seed

def test_what_cannot_stand_in_one_stack_runs_alone(monkeypatch):
    calls = []
    def noted(asks, *tapes): return calls.append(len(asks)) or train_runs(asks, *tapes)
    monkeypatch.setattr(run_module, 'train_runs', noted)
    run_together([MADE(Seeded(), s) for s in range(2)])
    run_together([replace(MADE(FedAvg(), s), executor='loop') for s in range(2)])
    run_together([MADE(FedAvg(), 0), MADE(MOON(), 0)])
    assert not calls
    run_together([MADE(FedAvg(), s) for s in range(2)])
    assert calls == [2]*3
    assert run_together([]) == []

class Holding(nn.Module):
    "A network that keeps something besides parameters and buffers, and multiplies by it."
    def __init__(self, v):
        super().__init__()
        self.v, self.body, self.head = v, nn.Linear(64, 8), nn.Linear(8, 10)
    def factor(self):
        v = self.v
        return v(1.) if callable(v) else v[0] if isinstance(v, (list, tuple)) else v['a'] if isinstance(v, dict) else v
    def forward(self, x):
        z = self.body(x.flatten(1)).tanh()*torch.as_tensor(self.factor()).to(x)
        return z, self.head(z)

def with_a_hook(k):
    net = Holding(1)
    net.body.register_forward_hook(lambda module, args, out: out*k)
    return net

HELD = dict(
    number=lambda k: Holding(k), several=lambda k: Holding([k, 1]), named=lambda k: Holding(dict(a=k)),
    array=lambda k: Holding(np.full(1, k)), tensor=lambda k: Holding(torch.full((8,), float(k))),
    large=lambda k: Holding(torch.full((8, 32), float(k))[:, 0]),
    parameter=lambda k: Holding([nn.Parameter(torch.tensor(float(k)))]),
    function=lambda k: Holding(lambda v: v*k), hook=with_a_hook)

@pytest.mark.parametrize('made', HELD.values(), ids=HELD)
def test_networks_that_hold_something_else_train_apart(made):
    asked = [replace(MADE(FedAvg(), s), model=made(k), rounds=1) for s, k in ((0, 1), (1, 3))]
    for one, two in zip([f.run() for f in asked], run_together(asked)): same(one, two)
    alike = [replace(MADE(FedAvg(), s), model=made(2)).resolve().begin(SingleProcess(), False) for s in (0, 1)]
    kinds = {sim.kind(run.state) for sim, run in alike}
    assert len(kinds) == 1 and None not in kinds

def test_networks_of_other_precision_or_with_other_frozen_parts_are_of_another_kind():
    def kind(net): return kind_of(Broadcast(FedAvg(), net, start(FedAvg(), net, 4), STEPS))
    one, two, three = (fed.model(seed=s) for s in (0, 1, 2))
    assert kind(one) == kind(two)
    for net, layer in ((one, 'c1'), (two, 'n1')): # as many zeros
        nn.init.zeros_(getattr(net, layer).bias).requires_grad_(False)
    assert len({kind(one), kind(two), kind(three), kind(three.float())}) == 4

def test_each_run_ends_at_its_own_time_and_by_its_own_error(tmp_path):
    asked = [MADE(FedAvg(), s, tmp_path/f'{s}.safetensors') for s in range(3)]
    runs = run_together([replace(asked[0], minutes=0.), asked[1], replace(asked[2], minutes=60.)])
    assert [len(r.history) for r in runs] == [1, 3, 3]
    with pytest.raises(ValueError, match='is that of two runs'): run_together([asked[0], asked[0]])
    ones, failures = [torch.arange(1), torch.arange(1, 40)], []
    bad = [replace(MADE(FedAvg(), 0), clients=ones, participation=1.), MADE(MOON(), 0), MADE(MOON(), 1)]
    runs = run_together(bad, failures)
    assert [r is None for r in runs] == [True, False, False] and 'client 0' in str(failures[0])

def test_batches_of_all_the_data_are_as_wide_as_their_run():
    wide = [replace(MADE(FedAvg(), s), local=Local(epochs=1, batch_size=2000)) for s in range(2)]
    for one, two in zip([f.run() for f in wide], run_together(wide)): same(one, two)

def test_a_stack_that_fails_says_so(monkeypatch):
    def failing(*args): raise RuntimeError('no rule for it')
    monkeypatch.setattr(run_module, 'train_runs', failing)
    asked = [replace(MADE(FedAvg(), s), rounds=1) for s in range(2)]
    with pytest.warns(UserWarning, match='cannot train in one stack .no rule for it.'): runs = run_together(asked)
    for f, run in zip(asked, runs): same(f.run(), run)

def test_servers_that_remember_something_else_make_stacks_of_their_own(recwarn):
    "Two have nobody in their first round, and FedAvgM's server has no velocity before its first step."
    there = Available(1., ('1100', '0011'))
    asked = [replace(MADE(FedAvgM(), s), participation=there, without=(0, 1)*(s > 0)) for s in range(3)]
    for one, two in zip([f.run() for f in asked], run_together(asked)): same(one, two)
    assert not [w for w in recwarn if 'one stack' in str(w.message)]

def test_what_clients_end_with_is_kept_without_that_of_other_runs():
    runs = run_together([replace(MADE(FedAvg(), s), keep_locals=True, rounds=1) for s in range(3)])
    for run in runs:
        for v in (*run.locals['params'].values(), *run.locals['buffers'].values()):
            assert v.untyped_storage().nbytes() == v.nbytes

# --- Ctrl-C --------------------------------------------------------------------------------------------------------

@pytest.fixture
def pressed(monkeypatch):
    "Ctrl-C instead of so many calls of all clients' training."
    train = run_module._train_all
    def at(number):
        left = iter(range(number))
        def stopping(*args):
            if next(left, None) is None: raise KeyboardInterrupt
            return train(*args)
        monkeypatch.setattr(run_module, '_train_all', stopping)
    return at

def test_ctrl_c_leaves_every_run_after_its_last_round(pressed):
    asked = [MADE(FedAvg(), 0), MADE(FedAvg(), 1), MADE(MOON(), 0), replace(MADE(FedProx(), 0), rounds=2)]
    pressed(4)
    with pytest.raises(KeyboardInterrupt, match='2 of 4 runs are finished; .* sys.last_value.runs') as e:
        run_together(asked)
    *whole, part, none = e.value.runs
    for f, run in zip(asked, whole): same(f.run(), run)
    same(replace(asked[2], rounds=1).run(), part)
    assert none is None
    for run in (*whole, part):
        for k, v in run.model.state_dict().items(): assert torch.equal(v, {**run.state.params, **run.state.buffers}[k])

def test_ctrl_c_before_any_round_is_finished(pressed):
    pressed(0)
    with pytest.raises(KeyboardInterrupt, match='0 of 2 runs are finished') as e:
        run_together([MADE(FedAvg(), s) for s in range(2)])
    assert e.value.runs == [None, None]

def test_ctrl_c_ends_the_first_of_two_stacks(pressed, monkeypatch):
    monkeypatch.setattr(run_module, 'TOGETHER', 4) # a run in each
    pressed(4)
    with pytest.raises(KeyboardInterrupt, match='1 of 3') as e: run_together([MADE(FedAvg(), s) for s in range(3)])
    assert [run and run.state.round for run in e.value.runs] == [3, 1, None]

def test_ctrl_c_in_the_middle_of_a_test_is_after_the_round_before():
    calls = []
    def watch(*_):
        calls.append(1)
        if len(calls) == 4: raise KeyboardInterrupt # the second run in its second round
        return {}
    with pytest.raises(KeyboardInterrupt, match='0 of 2') as e:
        run_together([replace(MADE(FedAvg(), s), watch=watch) for s in range(2)])
    assert [(len(run.history), run.state.round) for run in e.value.runs] == [(2, 2), (1, 1)]

def test_a_comparison_that_ctrl_c_ends_has_what_is_finished(pressed, tmp_path):
    kw = dict(clients=4, rounds=2, seeds=2, local=Local(epochs=1), columns=('accuracy',))
    pressed(3)
    with pytest.raises(KeyboardInterrupt, match='2 of 4 runs are finished; .*; with folder=') as e:
        run_module.compare([FedAvg(), MOON()], **kw)
    seen = e.value.runs
    pressed(100)
    assert seen.equals(run_module.compare([FedAvg()], **kw)) and len(run_module.table(seen)) == 1
    pressed(0)
    with pytest.raises(KeyboardInterrupt, match='0 of 4 runs are finished; .* the same call goes on') as e:
        run_module.compare([FedAvg(), MOON()], folder=tmp_path, **kw)
    assert not len(e.value.runs)

def test_a_comparison_that_breaks_has_what_is_finished():
    kw = dict(clients=4, rounds=1, seeds=2, local=Local(epochs=1), columns=('accuracy',))
    with pytest.raises(FloatingPointError) as e, pytest.warns(UserWarning, match='2 of 6 runs are finished; .* e.runs'):
        run_module.compare([FedAvg(), FedProx(mu=1e9), MOON()], **kw)
    assert e.value.runs.equals(run_module.compare([FedAvg()], **kw))

def test_a_method_that_cannot_start_is_refused_before_another_trains(pressed):
    pressed(0)
    with pytest.raises(ValueError, match='FedMD.* with proxy=None'):
        run_module.compare([FedAvg(), FedMD()], clients=4, rounds=1, seeds=1)

def test_a_comparison_that_minutes_end_has_what_is_finished(tmp_path):
    kw = dict(clients=4, seeds=2, local=Local(epochs=1), columns=('accuracy',), folder=tmp_path)
    whole = run_module.compare([FedAvg()], rounds=2, **kw)
    with pytest.warns(UserWarning, match='2 of 4 runs are not finished; the same call goes on'):
        seen = run_module.compare([FedProx(mu=.1), FedAvg()], rounds=2, minutes=0, **kw)
    assert seen.equals(whole)
    with pytest.warns(UserWarning, match='2 of 2 runs are not finished'): # none of them was tested
        none = run_module.compare([MOON()], rounds=3, minutes=0, evaluate_every=3, **kw)
    assert len(none) == len(run_module.table(none)) == 0

def test_the_minutes_of_a_comparison_are_for_all_its_methods(tmp_path):
    "Once they are over, the methods that follow are only read from the folder."
    kw = dict(clients=4, seeds=2, local=Local(epochs=1), columns=('accuracy',), folder=tmp_path, rounds=2)
    whole, methods = run_module.compare([FedProx(mu=.1)], **kw), [FedAvg(), MOON(), FedProx(mu=.1)]
    with pytest.warns(UserWarning, match='4 of 6 runs are not finished'):
        assert run_module.compare(methods, minutes=0., **kw).equals(whole)
    files = [run_module.file_of(tmp_path, m, 0) for m in methods]
    assert [f.exists() and Run.load(f).state.round for f in files] == [1, False, 2]

def test_what_a_comparison_is_asked_is_not_lost_in_silence():
    kw = dict(clients=4, rounds=1, seeds=1, local=Local(steps=1))
    with pytest.raises(ValueError, match=r"alpha=0.1 belongs to the Dirichlet partition, but partition='iid\(\)'"):
        run_module.compare([FedAvg()], alpha=.1, partition='iid()', **kw)
    with pytest.raises(ValueError, match='alpha=.*must be a number; call once for each'):
        run_module.compare([FedAvg()], alpha=[.1, .5], **kw)
    with pytest.raises(ValueError, match='alpha=1 belongs'): run_module.experiment(alpha=1, partition='iid()')
    assert list(run_module.compare([FedAvg()], columns='accuracy', **kw)) == ['method', 'seed', 'accuracy']

def test_a_comparison_of_another_network_builds_it_as_it_is():
    "The options of a Setting are those of its own network."
    kw = dict(clients=3, rounds=1, seeds=1, local=Local(steps=1))
    plain, thin = (run_module.compare([FedAvg()], model='small_cnn', **more, **kw)
                   for more in ({}, dict(options=dict(channels=(2, 2)))))
    assert len(plain) == len(thin) == 1
    made = run_module.experiment(model='small_cnn', **{k: v for k, v in kw.items() if k != 'seeds'})(FedAvg(), 0)
    assert made.model.spec['options'] == {}
    with pytest.raises(TypeError, match='not from a Linear; .*register'):
        run_module.compare([FedAvg()], model=torch.nn.Linear(2, 2), **kw)

@pytest.mark.parametrize('column', ['personal_after', 'global_before', 'validation_personal', 'many_personal'])
def test_clients_have_tests_where_a_column_needs_them(column):
    kw = dict(clients=3, rounds=1, seeds=1, local=Local(steps=1), metrics=dict(many=lambda z, y: float(len(y))))
    seen = run_module.compare([FedAvg()], 'digits(validation=0.1)', columns=('accuracy', column), **kw)
    assert seen[column].notna().all()

def test_a_column_that_no_run_has_costs_none_of_them():
    kw = dict(clients=3, rounds=1, seeds=1, local=Local(steps=1))
    with pytest.warns(UserWarning, match="these runs have no 'losss'; there are round, train_loss"):
        seen = run_module.compare([FedAvg()], columns=('accuracy', 'f1', 'losss'), **kw)
    assert [*seen] == ['method', 'seed', 'accuracy']

def test_a_comparison_in_a_folder_of_longer_runs_shows_the_rounds_that_were_asked_for(tmp_path):
    kw = dict(clients=4, seeds=1, local=Local(steps=1))
    run_module.compare([FedAvg()], rounds=3, folder=tmp_path, **kw)
    for history in (False, True):
        with pytest.warns(UserWarning, match='this is the run after 3 .a comparison shows round 2'):
            got = run_module.compare([FedAvg()], rounds=2, folder=tmp_path, history=history, **kw)
        assert got.equals(run_module.compare([FedAvg()], rounds=2, history=history, **kw))
