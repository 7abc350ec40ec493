"Runs: round by round, interrupted, in turn; warnings, memory, how clients are run, comparisons."
import contextlib, inspect, platform, subprocess, sys
from dataclasses import replace, fields
from functools import partial
from multiprocessing.pool import ThreadPool
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fedlit.data import load, recipe, Crop, Flip
from fedlit.ground import messages
from fedlit.method import FedAvg, Method
from fedlit.methods import HeteroFL, FedAvgM, FedDecorr, FedMD, FedProx, MOON
from fedlit.models import build
from fedlit.partition import dirichlet, iid
from fedlit.local import Local
from fedlit.participation import PowerOfChoice, RoundRobin, draw_clients
from fedlit.compare import choose, compare, plot, table
from fedlit.figure import against_rounds
from fedlit.measure import UNITS
from fedlit.result import Run
from fedlit.run import (SingleProcess, Federation, Simulation, train_centrally, choose_executor, federate,
                        federating)
from fedlit.state import start
from federation import same

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
FAST = dict(local=Local(epochs=1, batch_size=64), progress=False)
ALL = FedAvgM() + MOON() + FedDecorr()

def net(): return build('mlp', TASK, seed=0, norm='batch')

@pytest.mark.filterwarnings('ignore:.*hardly vary')
def test_executors_agree_with_batchnorm_and_augmentation():
    task = replace(TASK, augment=(Crop(padding=1), Flip()))
    m = build('small_cnn', task, seed=0, norm='batch')
    a, b = (federate(m, task, CLIENTS, ALL, rounds=2, participation=.5, executor=ex, **FAST) for ex in ('loop', 'vmap'))
    gap = max((v.double()-{**b.state.params, **b.state.buffers}[k].double()).abs().max().item()
              for k, v in {**a.state.params, **a.state.buffers}.items())
    assert gap < 1e-4, gap

def test_round_by_round_is_the_same_run(tmp_path):
    whole, seen = federate(net(), TASK, CLIENTS, ALL, rounds=3, participation=.5, **FAST), []
    for run in federating(net(), TASK, CLIENTS, ALL, 3, participation=.5, **FAST):
        params = {k: v.clone() for k, v in run.model.named_parameters()}
        assert all(torch.equal(v, run.state.params[k]) for k, v in params.items()) # the round's own, not the last one's
        seen.append(len(run.history))
    assert seen == [1, 2, 3] and same(whole, run)
    file = tmp_path/'ck.safetensors'
    next(federating(net(), TASK, CLIENTS, ALL, rounds=3, participation=.5, checkpoint=file, **FAST))
    more = [len(r.history)
            for r in federating(net(), TASK, CLIENTS, ALL, rounds=3, participation=.5, checkpoint=file, **FAST)]
    assert more == [2, 3]
    assert [len(r.history) for r in federating(net(), TASK, CLIENTS, ALL, rounds=3, participation=.5,
                                               checkpoint=file, **FAST)] == [3] # nothing to do

def test_a_run_that_goes_on_pads_batches_as_it_did(tmp_path):
    "Between rounds, FedMD's clients take steps of Adam, which make much of a last bit: a trial of them would refuse."
    asked = dict(participation=.5, proxy=TASK.normalise(TASK.x_train[:40]), local=Local(epochs=1, batch_size=16),
                 progress=False, seed=3)
    method, small = FedMD(samples=8, epochs=2, batch_size=4), build('mlp', TASK, seed=0, norm='batch', hidden=[16])
    clients = [c[:n] for c, n in zip(CLIENTS, (60, 61, 98, 71, 83, 50))]
    run = partial(federate, small, TASK, clients, method, **asked)
    whole = run(rounds=3)
    run(rounds=1, checkpoint=tmp_path/'run')
    again = run(rounds=3, checkpoint=tmp_path/'run')
    assert same(whole, again)

def test_a_run_that_goes_on_in_a_round_of_two_samples_pads_as_it_did(tmp_path):
    "In too small a batch nothing can be tried, so what an earlier round has tried must not count."
    clients = CLIENTS[0][:9], CLIENTS[1][:2]
    run = partial(federate, net(), TASK, clients, FedAvg(), local=Local(epochs=3), participation=RoundRobin(.5),
                  executor='vmap', progress=False)
    whole = run(rounds=2)
    run(rounds=1, checkpoint=tmp_path/'run')
    assert same(whole, run(rounds=2, checkpoint=tmp_path/'run'))

def test_clients_and_tests_may_come_one_by_one():
    tests = [torch.arange(20*k, 20*k + 20) for k in range(6)]
    one_by_one = federate(net(), TASK, iter(CLIENTS), FedAvg(), 1, tests=(t.tolist() for t in tests), **FAST)
    assert same(one_by_one, federate(net(), TASK, CLIENTS, FedAvg(), 1, tests=tests, **FAST))

def test_the_source_of_federate_has_every_argument_with_a_note():
    from fastcore.docments import docments
    names = list(inspect.signature(federate).parameters)
    assert len(names) > 25 and [*names, 'setting'] == [f.name for f in fields(Federation)]
    assert not [k for k in names if f'    {k}: ' not in inspect.getsource(federate)]
    assert not [k for k, note in docments(federate).items() if not note]

def test_round_by_round_takes_what_federate_takes():
    assert inspect.signature(federating).parameters == inspect.signature(federate).parameters
    with pytest.raises(TypeError, match='epochs'): next(federating(net(), TASK, CLIENTS, FedAvg(), epochs=3))
    with pytest.raises(ValueError, match='rounds=0'): next(federating(net(), TASK, CLIENTS, FedAvg(), rounds=0))

def test_the_clock_ends_a_run_after_its_round(tmp_path):
    runs = federating(net(), TASK, CLIENTS, FedAvg(), rounds=3, checkpoint=tmp_path/'c', minutes=0, **FAST)
    assert [len(r.history) for r in runs] == [1]

def test_ctrl_c_in_the_middle_of_a_step_keeps_the_run():
    "torch lends a network its parameters for a step; interrupted there, the network at work is no network any more."
    class Stopping(SingleProcess):
        def begin(self, simulation, run):
            self.sim, self.sums, self.test_clients = simulation, simulation.sums, simulation.test_clients
            return self
        def train(self, who, state):
            if not state.round: return self.sim.train(who, state)
            with torch.no_grad():
                for m in self.sim.model.modules(): m._parameters.clear()
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as e:
        Federation(net(), TASK, CLIENTS, ALL, rounds=3, **FAST).run(Stopping())
    one = federate(net(), TASK, CLIENTS, ALL, rounds=1, **FAST)
    assert same(one, e.value.run)
    left = e.value.run.model.state_dict()
    assert all(torch.equal(v, left[k]) for k, v in one.model.state_dict().items())

def test_two_runs_in_turn_do_not_disturb_each_other():
    alone = [federate(net(), TASK, CLIENTS, m, rounds=3, **FAST) for m in (ALL, FedProx())]
    both = [federating(net(), TASK, CLIENTS, m, rounds=3, **FAST) for m in (ALL, FedProx())]
    for _ in range(3): ends = [next(r) for r in both]
    assert all(same(a, b) for a, b in zip(alone, ends))

def test_warnings_point_at_the_users_line(tmp_path):
    file, wild = tmp_path/'c.safetensors', dict(FAST, local=Local(epochs=1, lr=1e20))
    federate(net(), TASK, CLIENTS, FedAvg(), rounds=2, checkpoint=file, **FAST)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning) as seen:
        federate(net(), TASK, CLIENTS, FedAvg(), rounds=1, bad_clients='report', **wild)
        for _ in federating(net(), TASK, CLIENTS, FedAvg(), rounds=1, bad_clients='skip', **wild): pass
        federate(net(), TASK, CLIENTS, FedAvg(), rounds=3, checkpoint=file, **FAST)
    said = ' '.join(str(w.message) for w in seen)
    assert all(word in said for word in ('produced NaN or infinity', 'test loss is nan', 'set aside'))
    assert {w.filename for w in seen} == {__file__}

def test_a_test_loss_that_is_not_a_number_is_told_once():
    task = replace(TASK, x_test=TASK.x_test*float('nan'))
    with pytest.warns(UserWarning) as seen: federate(net(), task, CLIENTS, FedAvg(), rounds=4, **FAST)
    assert sum('test loss is nan' in str(w.message) for w in seen) == 1

@contextlib.contextmanager
def nothing(): yield

mapping = lambda f: partial(pd.Series([0]).map, f)

@pytest.mark.parametrize('wrap', [nothing(), torch.no_grad(), mapping], ids=['contextlib', 'torch', 'pandas'])
def test_a_warning_shows_no_file_that_only_wraps_what_is_ours(wrap):
    ours = dict(__name__='fedlit.somewhere', warn=messages.warn)
    exec("def inner(*_): warn('look')", ours)
    with pytest.warns(UserWarning, match='look') as seen: wrap(ours['inner'])()
    assert [w.filename for w in seen] == [__file__]

def test_a_warning_from_a_thread_shows_no_file_of_python():
    with pytest.warns(UserWarning, match='look') as seen, ThreadPool(1) as pool:
        pool.apply(exec, ("warn('look')", dict(__name__='fedlit.somewhere', warn=messages.warn)))
    assert [w.filename.strip('<>') for w in seen] == ['sys'] # with or without, as the version has it

def freed(hold):
    "Bytes that a process owns more than at first, after tensors of 40 MB: before `release_memory`, and after."
    code = """if True:
        import resource, sys, torch, fedlit.run
        from fedlit.ground.memory import hold_memory, release_memory
        def own(): # without pages of files, of which the system maps now more, now fewer
            _, resident, shared, *_ = map(int, open('/proc/self/statm').read().split())
            return (resident - shared)*resource.getpagesize()
        if sys.argv[1] == 'True': hold_memory()
        torch.ones(10**5).sum() # starts the threads
        first = own()
        for _ in range(5): torch.ones(10**7)
        print(own() - first)
        release_memory()
        print(own() - first)
    """
    return [int(v) for v in subprocess.run([sys.executable, '-c', code, str(hold)],
                                           capture_output=True, text=True, check=True).stdout.split()]

@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='only glibc can be told')
def test_memory_is_held_and_given_back():
    (free, _), (held, after) = freed(False), freed(True)
    assert max(free, after) < 20e6 and held > 35e6

@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='elsewhere the system counts by itself')
def test_the_peak_of_a_process_is_not_that_of_who_started_it():
    code = """if True:
        import subprocess, sys
        large = b'1'*10**9
        asks = "from fedlit.ground.memory import peak_mb; print(peak_mb('cpu'))"
        subprocess.run([sys.executable, '-c', asks], check=True)
    """
    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert 10 < float(said) < 900

def test_a_checkpoint_with_more_rounds_than_were_asked_for_says_so(tmp_path):
    file = tmp_path/'c.safetensors'
    whole = federate(net(), TASK, CLIENTS, FedAvg(), rounds=3, checkpoint=file, **FAST)
    with pytest.warns(UserWarning, match='has 3 rounds, and rounds=2 asks for fewer; this is the run after 3'):
        assert same(whole, federate(net(), TASK, CLIENTS, FedAvg(), rounds=2, checkpoint=file, **FAST))

def test_kept_locals_are_those_of_the_last_round_or_missed_aloud(tmp_path):
    file, ask = tmp_path/'c.safetensors', dict(keep_locals=True, checkpoint=tmp_path/'c.safetensors', **FAST)
    first = federate(net(), TASK, CLIENTS, FedAvg(), rounds=3, **ask)
    assert Run.load(file).state.round == 2 # so that the same command makes them again
    again = federate(net(), TASK, CLIENTS, FedAvg(), rounds=3, **ask)
    assert all(torch.equal(v, again.locals['params'][k]) for k, v in first.locals['params'].items())
    first.save(file)
    with pytest.warns(UserWarning, match='has the last round, .* `locals` is None'):
        assert federate(net(), TASK, CLIENTS, FedAvg(), rounds=3, **ask).locals is None

def test_two_parts_with_one_column_are_refused_before_anybody_trains():
    class Count(Method):
        column: str = 'rounds_so_far'
        def grad(self, grads): raise AssertionError('it trains')
        def columns(self, round): return {self.column: round}
    with pytest.raises(ValueError, match=r"Count\(column='rounds_so_far'\) has a column 'rounds_so_far', and so has"):
        federate(net(), TASK, CLIENTS, Count() + FedProx() + Count(), rounds=1, **FAST)
    with pytest.raises(ValueError, match="has a column 'drift', and so has every history"):
        federate(net(), TASK, CLIENTS, Count('drift'), rounds=1, **FAST)
    with pytest.raises(AssertionError, match='it trains'):
        federate(net(), TASK, CLIENTS, Count() + Count('another'), rounds=1, **FAST)

class Views(torch.nn.Module):
    "Flattens as tutorials do; `view` refuses what does not lie in one piece."
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Linear(256, 10)
    def forward(self, x):
        z = self.conv(x).relu().view(-1, 256)
        return z, self.head(z)

def test_a_network_that_flattens_by_view_is_trained_in_the_usual_order():
    task = load('digits')
    def ask(model, **kw):
        return federate(model, task, iid(task.y_train, 4), FedAvg(), rounds=1, local=Local(epochs=1), progress=False,
                        device='cpu', executor='loop', **kw).settings['channels_last']
    assert ask(build('small_cnn', task, seed=0)) and not ask(Views())
    with pytest.raises(RuntimeError, match='view'): ask(Views(), channels_last=True)

def test_sampling():
    assert (len(draw_clients(100, .1, 0, 0)) == 10 and draw_clients(3, .01, 0, 0).__len__() == 1
            and draw_clients(5, 1., 0, 7) == list(range(5)))
    cnn = build('small_cnn', TASK)
    assert ([choose_executor(FedAvg(), n, d) for n, d in ((net(), 'cpu'), (cnn, 'cpu'), (cnn, 'cuda'))]
            == ['vmap', 'threads', 'vmap'])
    assert ([choose_executor(HeteroFL(), n, d) for n, d in ((net(), 'cpu'), (cnn, 'cpu'), (cnn, 'cuda'))]
            == ['vmap', 'extract', 'vmap'])

class Silent(list):
    "Clients of which one may ask for any, and not for all."
    asked = 0
    def __iter__(self):
        self.asked += 1
        return super().__iter__()

@pytest.mark.parametrize('participation', [.02, PowerOfChoice(.02)], ids=repr)
def test_a_round_looks_at_its_own_clients(participation):
    "Seconds of a round do not grow with the number of clients that exist."
    task, gen = load('digits').subset(400, seed=0), torch.Generator().manual_seed(0)
    clients = list(torch.randint(400, (100, 8), generator=gen))
    run = Federation(build('mlp', task, seed=0), task, clients, FedAvg(), rounds=3, local=Local(epochs=1), device='cpu',
                     participation=participation, progress=False).resolve()
    sim = Simulation(run)
    sim.federation = replace(run, clients=(quiet := Silent(clients)))
    state = start(run.method, sim.model, 100)
    for _ in range(2):
        steps, out = sim.one_round(state, sim), None
        with pytest.raises(StopIteration) as end:
            while True: out = sim.train(*steps.send(out))
        state = end.value.value[0]
    assert state.round == 2 and not quiet.asked

def test_a_comparison_keeps_every_round_and_is_drawn():
    given = dict(seeds=(0, 1), columns=('accuracy',), rounds=3, clients=3, evaluate_every=2, local=Local(epochs=1))
    every, last = (compare([FedAvg(), FedProx(mu=.1)], history=h, **given) for h in (True, False))
    assert every.columns.tolist() == ['method', 'seed', 'round', 'accuracy'] and len(every) == 12 and len(last) == 4
    assert table(every, FedAvg()).equals(table(last, FedAvg()))
    ax = plot(every, accent=FedProx(mu=.1))
    assert [line.get_xdata().tolist() for line in ax.lines] == [[2, 3]]*2 # the rounds that were tested
    assert {t.get_text() for t in ax.texts} == {'FedAvg', 'FedProx'}
    two = every.replace({'FedAvg()': 'FedProx(mu=0.2)'})
    assert {t.get_text() for t in plot(two).texts} == {'FedProx(mu=0.1)', 'FedProx(mu=0.2)'}
    for wrong, said in ((dict(runs=last), 'history=True'), (dict(runs=every, column='loss'), "no column 'loss'"),
                        (dict(runs=every, accent=FedProx(mu=1.)), 'none of the labels')):
        with pytest.raises(ValueError, match=said): plot(**wrong)

def drawn(ax): return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines]

def test_a_curve_is_drawn_at_the_rounds_that_were_tested():
    run = federate(net(), TASK, CLIENTS, FedAvg(), rounds=5, evaluate_every=2, **FAST)
    assert drawn(run.plot()) == [([2, 4, 5], run.history.accuracy[[1, 3, 4]].tolist())]
    part = plt.figure().subfigures(1, 2)[0].subplots()
    part.set_xscale('log')
    assert drawn(run.plot(part)) == drawn(run.plot())
    run.history = run.history[:2]
    assert run.plot().lines[0].get_marker() == '.' # else a single round would leave no trace
    run.history = run.history[:1]
    with pytest.raises(ValueError, match='nothing to draw: no round of this run was tested'): run.plot()

def test_methods_and_seeds_tested_in_other_rounds_are_drawn_where_they_were():
    rows = lambda m, seed, rounds: [dict(method=m, seed=seed, round=r, accuracy=r/10) for r in rounds]
    runs = pd.DataFrame([*rows('FedAvg()', 0, (4, 6, 8, 10)), *rows('FedAvg()', 1, (4, 8, 10)),
                         *rows('MOON()', 0, (6, 10))])
    assert drawn(plot(runs)) == [([4, 8, 10], [.4, .8, 1.]), ([6, 10], [.6, 1.])]
    with pytest.raises(ValueError, match="'a' has 2 values, but rounds has 3"):
        against_rounds({'a': [1., 2.]}, rounds=[1, 2, 3])

def test_an_axis_has_the_name_of_what_is_drawn():
    runs = pd.DataFrame(dict(method='FedAvg()', seed=0, round=[1, 2], accuracy=.5, loss=2., personal=.4, mine=5.))
    assert plot(runs).get_ylabel() == UNITS['accuracy']
    assert all(plot(runs, k).get_ylabel() == k for k in ('loss', 'personal', 'mine'))

def test_a_curve_is_named_without_the_parameters_of_its_method():
    one, two = (repr(m) for m in (HeteroFL(rates=(1., .5)) + FedProx(mu=.1), FedAvg()))
    runs = pd.DataFrame([dict(method=m, seed=0, round=r, accuracy=.5) for m in (one, two) for r in (1, 2)])
    assert {t.get_text() for t in plot(runs).texts} == {'HeteroFL + FedProx', 'FedAvg'}

def test_the_lines_of_a_grid_are_named_by_what_differs():
    grid = [FedAvg(), MOON(mu=1), MOON(mu=5), MOON(mu=1) + FedDecorr(), FedProx()]
    runs = pd.DataFrame([dict(method=repr(m), seed=0, round=r, accuracy=.5) for m in grid for r in (1, 2)])
    assert {t.get_text() for t in plot(runs, accent=grid[1]).texts} == {
        'FedAvg', 'MOON(mu=1.0)', 'MOON(mu=5.0)', 'MOON + FedDecorr', 'FedProx'}
    wide = HeteroFL(rates=(1, .5)), HeteroFL(rates=(1, .25))
    runs = pd.DataFrame([dict(method=repr(m), seed=0, round=r, accuracy=.5) for m in wide for r in (1, 2)])
    assert {t.get_text() for t in plot(runs).texts} == {'HeteroFL(rates=(1.0, 0.5))', 'HeteroFL(rates=(1.0, 0.25))'}

def test_a_comparison_takes_no_tests():
    with pytest.raises(ValueError, match="tests belong to one partition.*'personal' among columns"):
        compare([FedAvg()], tests=[[0]]*len(CLIENTS), seeds=1)

def test_a_comparison_uses_the_recipe_it_is_asked_for():
    given = dict(rounds=1, seeds=1, clients=3, columns=('accuracy', 'loss'), local=Local(epochs=1))
    raw = compare([FedAvg()], recipe(load('digits'), 'none'), **given)
    assert compare([FedAvg()], recipe='none', **given).equals(raw) and not compare([FedAvg()], **given).equals(raw)
    with pytest.raises(ValueError, match="no recipe 'nonsense'"): compare([FedAvg()], recipe='nonsense', **given)
    with pytest.raises(ValueError, match=r"task=fedlit.data.recipe\(task, 'none'\)"):
        compare([FedAvg()], TASK, recipe='none', **given)
    with pytest.raises(FileNotFoundError, match='nowhere'): compare([FedAvg()], 'cifar10', root='nowhere', **given)

@pytest.mark.parametrize('one, several', [(dict(seed=5), 'seeds='), (dict(method='MOON()'), 'methods='),
                                          (dict(checkpoint='c.safetensors'), 'folder=')], ids=str)
def test_a_comparison_takes_nothing_that_belongs_to_one_run(one, several):
    with pytest.raises(ValueError, match=f'belongs to a single run.*{several}'):
        compare([FedAvg()], rounds=1, seeds=1, clients=3, local=Local(epochs=1), **one)

def test_a_difference_is_that_of_the_seeds_both_have():
    runs = pd.DataFrame([dict(method=m, seed=s, accuracy=a) for m, s, a in (
        ('FedAvg()', 0, .5), ('FedAvg()', 1, .6), ('FedAvg()', 2, .1), ('FedProx(mu=0.1)', 1, .7),
        ('FedProx(mu=0.1)', 0, .6), ('FedProx(mu=0.5)', 7, .7))])
    seen = table(runs, against=FedAvg())['accuracy - FedAvg']
    assert seen['FedProx(mu=0.1)'].startswith('+0.100 ± 0.000') and seen['FedProx(mu=0.5)'] == ''

def test_a_comparison_of_nothing_or_with_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match='methods is empty'): compare([], rounds=1)
    runs = pd.DataFrame(dict(method=['FedAvg()']*2, seed=[0, 1], accuracy=[.5, .6]))
    with pytest.raises(ValueError, match=r'against=MOON\(.*, but these runs are of FedAvg'): table(runs, against=MOON())

def test_a_choice_is_made_over_the_seeds_that_all_have():
    runs = pd.DataFrame([dict(method=m, seed=s, validation=v) for m, s, v in (
        ('FedAvg()', 0, .1), ('FedAvg()', 1, .9), ('MOON(mu=1.0)', 1, .8))])
    with pytest.raises(ValueError, match=r'MOON.* has no run with seed 0, .* from runs\[runs.seed.isin\(\[1\]\)\]'):
        choose([FedAvg(), MOON()], runs.replace('MOON(mu=1.0)', repr(MOON())))
    one = runs[runs.seed == 1].replace('MOON(mu=1.0)', repr(MOON()))
    assert choose([FedAvg(), MOON()], one) == FedAvg()

@pytest.mark.parametrize('given', [dict(rounds=0), dict(rounds=1.), dict(epochs='3'), dict(epochs=3, rounds=2)])
def test_epochs_in_one_place_are_cut_into_whole_rounds(given):
    with pytest.raises(ValueError, match='must divide the .* epochs'):
        train_centrally(net(), TASK, **given)

def test_a_run_from_a_file_says_what_it_lacks(tmp_path):
    run = federate(net(), TASK, CLIENTS, FedAvg(), rounds=1, **FAST)
    run.settings['model'] = 'Mine'
    path = run.save(tmp_path/'run')
    with pytest.raises(ValueError, match='no network; Run.load'): Run.load(path).per_client(TASK, [[0]]*len(CLIENTS))
    with pytest.raises(ValueError, match='the run has no network; .*model='): Run.load(path).predict(TASK.x_test)
    with pytest.raises(ValueError, match="^device='cuda:99' cannot be used here"): Run.load(path, device='cuda:99')

def test_clients_are_tested_on_samples_given_in_any_form():
    task = load('digits').subset(60, test=20)
    run = federate(build('mlp', task, seed=0), task, [range(30), range(30, 60)], FedAvg(), 1, progress=False)
    tensors = run.per_client(task, [torch.arange(4), torch.arange(4, 9)])
    assert run.per_client(task, [list(np.arange(4)), range(4, 9)]).equals(tensors)
    with pytest.raises(ValueError, match=r'tests\[1\] has the index 20, but there are 20 samples'):
        run.per_client(task, [[0], [20]])
