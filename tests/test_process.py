"Afterwards the process is as it was: threads, modes, backend, classes, memory; and two threads are two runs."
import gc, os, random, subprocess, sys, threading, warnings, weakref
import numpy as np, pytest, torch
from torch import nn
from fedlit.ground.axes import find_axes
from fedlit.method import Method
from fedlit.methods import FedAvg, HeteroFL, MOON
from fedlit.models import build
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.partition import iid
from fedlit.round import fed_round
from fedlit.run import Federation
from fedlit.state import start
import test_draws
from test_networks import EXECUTORS, TASK, go, same

def test_the_search_for_axes_leaves_other_threads_alone():
    done, errors, nets = threading.Event(), [], [build('mlp', TASK, seed=0), build('small_cnn', TASK, seed=0)]
    def search():
        while not done.is_set():
            try: [find_axes(n) for n in nets]
            except Exception as e: errors.append(e)
    alone = [go(build('mlp', TASK, seed=0), m) for m in (FedAvg(), HeteroFL(rates=(1., .5)))]
    other = threading.Thread(target=search)
    other.start()
    try: beside = [go(build('mlp', TASK, seed=0), m) for m in (FedAvg(), HeteroFL(rates=(1., .5)))]
    finally:
        done.set()
        other.join()
    assert not errors and all(map(same, alone, beside))

def test_rounds_that_are_left_early_give_the_threads_back():
    old = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = Federation(build('mlp', TASK, seed=0), TASK, iid(TASK.y_train, 3), FedAvg(), progress=False).run_rounds()
        next(runs)
        assert torch.get_num_threads() == 1 # in a small network's rounds
        runs.close()
        assert torch.get_num_threads() == 2
    finally: torch.set_num_threads(old)

@pytest.mark.parametrize('executor', [
    'threads', 'vmap', *(pytest.param(e, marks=pytest.mark.slow) for e in ('loop', 'extract'))])
def test_two_federations_in_two_threads_do_not_disturb_each_other(executor):
    "With dropout, which draws from the one generator of the process."
    net = test_draws.net()
    def ask(seed):
        return go(net, HeteroFL(rates=(1., .5)) if seed % 2 else MOON(), executor, seed=seed)
    torch.manual_seed(1)
    alone, beside, errors = [ask(s) for s in range(3)], [None]*3, []
    def work(s):
        try: beside[s] = ask(s)
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    before = torch.get_rng_state()
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and all(map(same, alone, beside)) and torch.equal(torch.get_rng_state(), before)

def world():
    import matplotlib
    return (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state().tolist(),
            random.getstate(), np.random.get_state()[1].tolist(), list(warnings.filters), matplotlib.get_backend(),
            dict(os.environ), os.getcwd(), torch.are_deterministic_algorithms_enabled())

class Breaks(Method):
    def done(self, client, round):
        if round == 1: raise RuntimeError('it breaks')
        return client, {}

@pytest.mark.parametrize('executor', [
    *(pytest.param(e, marks=pytest.mark.slow) for e in EXECUTORS[:3]), 'extract'])
def test_the_process_is_as_it_was(executor):
    torch.set_num_threads(2)
    net, before = build('mlp', TASK, seed=0, norm='batch'), world()
    go(net, MOON(), executor)
    assert world() == before
    with pytest.raises(RuntimeError, match='it breaks'): go(net, Breaks(), executor)
    assert world() == before

def test_measuring_and_reporting_leave_the_process_as_it_was(tmp_path, capsys):
    from fedlit.papers import catalogue
    from fedlit.papers.settings import Setting, run_setting
    import matplotlib
    torch.set_num_threads(2)
    matplotlib.use('svg')
    try:
        before = world()
        run_setting(Setting(rounds=1, clients=2, local=Local(epochs=1)))
        assert world() == before
        with pytest.raises(FileNotFoundError): catalogue.report(out=str(tmp_path))
        assert world() == before
    finally: matplotlib.use('agg')

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('method', [FedAvg(), Breaks()], ids=lambda m: m.name)
def test_the_mode_of_a_network_stays(executor, method):
    "Some layers train and some test, and so they do afterwards, whatever happened."
    net = build('mlp', TASK, seed=0, norm='batch').train()
    next(m for m in net.modules() if isinstance(m, nn.BatchNorm1d)).eval()
    modes = [m.training for m in net.modules()]
    x = TASK.normalise(TASK.x_train[:16]).reshape(2, 2, 4, *TASK.x_train.shape[1:])
    data = dict(x=x, y=TASK.y_train[:16].reshape(2, 2, 4), counts=torch.ones(2, 2, dtype=torch.long)*4)
    state = start(method, net, 2)
    for r in range(2):
        try: state = fed_round(Broadcast(method, net, state, Local()), [0, 1], data, torch.ones(2), executor)
        except RuntimeError as e: assert 'it breaks' in str(e) and r == 1
        assert [m.training for m in net.modules()] == modes

def test_classes_made_in_a_loop_are_not_kept():
    made = []
    for _ in range(8):
        class Mine(Method):
            mu: float = .1
            def loss(self, features): return self.mu*features.square().mean()
        go(build('mlp', TASK, seed=0), Mine() + MOON(), rounds=1)
        made.append(weakref.ref(Mine))
    del Mine
    gc.collect()
    assert sum(c() is not None for c in made) <= 1      # an exception's frame or a printed one may hold the last

MEMORY = '''if True:
    import gc, resource, torch
    from torch import nn
    from fedlit.data import load
    from fedlit.methods import FedAvg
    from fedlit.models import build
    from fedlit.partition import iid
    from fedlit.local import Local
    from fedlit.run import federate, federating
    task = load('digits').subset(40, test=10)
    clients, kw = iid(task.y_train, 2, seed=0), dict(local=Local(epochs=1, momentum=0.), progress=False)
    def own(): # MiB, without pages of files, of which the system maps now more, now fewer
        _, resident, shared, *_ = map(int, open('/proc/self/statm').read().split())
        return (resident - shared)*resource.getpagesize()/2**20
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 200_000), nn.Linear(200_000, 10)
        def forward(self, x):
            z = self.a(x.flatten(1)).relu()
            return z, self.b(z)
    small = build('mlp', task, seed=0)
    gc.disable() # it would come at another moment in every version of Python
    federate(small, task, clients, FedAvg(), 1, **kw)
    before = own()
    for run in federating(small, task, clients, FedAvg(), 2, **kw): mine = torch.ones(100_000_000)
    run = federate(Big(), task, clients, FedAvg(), 1, executor='loop', **kw)
    there = own()
    del run, mine
    gc.collect()
    print(there - before, own() - before)'''

@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason="glibc's store")
def test_memory_goes_back_when_a_run_is_forgotten():
    out = subprocess.run([sys.executable, '-c', MEMORY], capture_output=True, text=True, check=True).stdout
    there, left = map(float, out.split())
    assert there > 450 and left < 30, out       # MiB

def test_networks_that_are_built_in_two_threads_are_those_of_their_seeds():
    alone, built = [build('mlp', TASK, seed=s).state_dict() for s in (0, 1)], [[], []]
    before = torch.get_rng_state()
    threads = [threading.Thread(target=lambda s=s: built[s].extend(build('mlp', TASK, seed=s) for _ in range(60)))
               for s in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert all(torch.equal(v, alone[s][k]) for s in (0, 1) for net in built[s] for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)
