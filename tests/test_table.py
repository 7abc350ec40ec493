"Tables: what a tensor would say, versions that stay, memory and disk that come back, files, and growth."
import copy, errno, io, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import pytest, torch
from fedlit.data import load
from fedlit.methods import FedPer, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.server import network_for
from fedlit.result import Run
from fedlit.run import federate
from fedlit.ground import table as tables
from fedlit.ground.table import Row, Store, Table, free_memory, pack, unpack
from fedlit.ground.tree import flatten, put, rows, unflatten
from federation import same

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
FAST = dict(local=Local(epochs=1, batch_size=64), progress=False)
ALL = MOON() + SCAFFOLD() + FedPer()
BUDGETS = [10**9, 0, 100] # all in memory, all on disk, both

def net(): return build('mlp', TASK, seed=0, hidden=(8,), features=8)
def on_disk(folder):
    "Open files of `folder` that have no name there."
    where = [os.readlink(p) for f in os.listdir('/proc/self/fd') if os.path.islink(p := f'/proc/self/fd/{f}')]
    return [p for p in where if p.startswith(f'{folder}/') and p.endswith('(deleted)')]
linux = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')

# ---- as a tensor ----

@pytest.mark.parametrize('budget', BUDGETS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.double, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize('shape', [(), (3,), (2, 3), (0,)])
def test_reads_and_writes_as_a_tensor(budget, dtype, shape):
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 2, (n, *shape), generator=g).to(dtype)
    v = draw(1)[0]
    table, tensor = Table(v, 300, Store(budget)), v.repeat(300, *[1]*len(shape))
    for ks in ([3], [0, 299, 130], [-1, 5], slice(2, 5), torch.tensor([4, 3]), [k for k in range(300) if k % 7 == 0]):
        new = draw(len(torch.arange(300)[ks]))
        table, tensor = put(table, ks, new), put(tensor, ks, new)
    mask = torch.arange(300) % 5 == 0
    for i in (0, -1, 7, [7], [3, 4, 5], [], slice(None), slice(3, 60, 4), mask, torch.tensor([1, 2]), torch.tensor(5)):
        assert torch.equal(table[i], tensor[i]) and table[i].dtype == dtype, i
    if shape:
        assert (torch.equal(table[:, 0:1], tensor[:, 0:1])
                and torch.equal(table[[1, 3], ..., :1], tensor[[1, 3], ..., :1])
                and torch.equal(table[3, :1], tensor[3, :1]))
    assert (len(table), table.shape, table.dtype, table.device) == (300, tensor.shape, dtype, tensor.device)
    assert len(list(table)) == 300
    for i in (300, -301, [1, 300]):
        with pytest.raises(IndexError): table[i]

def test_arithmetic_and_torch_functions():
    table = put(Table(torch.ones(2), 4), [1], torch.tensor([[2., 3.]]))
    tensor = table[:]
    assert ((table-table).abs().max() == 0 and torch.equal(table*2, tensor*2)
            and torch.equal(1-tensor, tensor.new_ones(())-table))
    assert (torch.equal(torch.cat([table, tensor]), torch.cat([tensor, tensor])) and (table == tensor).all()
            and table.tolist() == tensor.tolist() and table.numel() == 8)
    with pytest.raises(AttributeError, match='no_such_thing'): print(table.no_such_thing)

def test_older_versions_stay():
    a = Table(torch.zeros(2), 500, Store(48)) # room for six rows
    states, tensors = [a], [a[:]]
    for r in range(20):
        ks = [(37*r+j*11) % 500 for j in range(4)]
        new = torch.randn(4, 2, generator=torch.Generator().manual_seed(r))
        states.append(put(states[-1], ks, new))
        tensors.append(put(tensors[-1], ks, new))
    assert all(torch.equal(s[:], t) for s, t in zip(states, tensors))
    # two futures of one past
    left, right = put(states[5], [1], torch.ones(1, 2)), put(states[5], [1], -torch.ones(1, 2))
    assert left[1].tolist() == [1, 1] and right[1].tolist() == [-1, -1] and torch.equal(states[5][:], tensors[5])

def test_what_was_written_is_a_copy():
    new, first = torch.ones(2, 3), torch.zeros(3)
    table = put(Table(first, 5), [0, 1], new)
    new.fill_(7)
    first.fill_(7)
    assert table[0].tolist() == [1]*3 and table[4].tolist() == [0]*3
    kept = copy.deepcopy(table)
    kept[0] = torch.zeros(3)
    assert table[0].sum() == 3 and not put(table, [2], torch.ones(1, 3, requires_grad=True))[2].requires_grad

# ---- memory and disk ----

@pytest.mark.parametrize('budget', BUDGETS)
def test_200_rounds_hold_one_row_a_client(budget):
    "Neither memory nor the file keep what no version refers to; two versions are alive while a round writes."
    store, g = Store(budget), torch.Generator().manual_seed(0)
    table = Table(torch.zeros(5), 40, store)
    for _ in range(200):
        table = put(table, torch.randperm(40, generator=g)[:10].tolist(), torch.randn(10, 5, generator=g))
    assert len(table.written()) == 40 and store.used <= budget and store.end <= 50*20
    assert store.used//20 + store.end//20 - sum(map(len, store.free.values())) == 40
    held = {k: table[k].untyped_storage().nbytes() for k in table.written()}
    assert max(held.values()) <= 20 or budget == 0
    del table
    assert store.used == 0 and sum(map(len, store.free.values()))*20 == store.end

@linux
def test_the_file_has_no_name_and_vanishes(tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    table = put(Table(torch.zeros(4), 9, Store(0)), [1, 2], torch.ones(2, 4))
    older = table
    table = put(table, [1], torch.zeros(1, 4))
    assert len(on_disk(tmp_path)) == 1 and not list(tmp_path.iterdir()) and older[1].sum() == 4
    del table
    assert older[2].sum() == 4
    del older
    assert not on_disk(tmp_path)

@linux
@pytest.mark.parametrize('end', ['pass', 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)'])
def test_nothing_is_left_after_the_end(tmp_path, end):
    code = ("import torch; from fedlit.ground.table import *; t = Table(torch.zeros(9), 9, Store(0)); "
            f"t[[1]] = torch.ones(1, 9); assert t.store.end == 36\n{end}")
    subprocess.run([sys.executable, '-W', 'error', '-c', code],
                   env={**os.environ, 'TMPDIR': str(tmp_path)}, stderr=subprocess.DEVNULL)
    assert not list(tmp_path.iterdir())

@linux
def test_a_forked_process_reads_and_does_not_write():
    table = put(Table(torch.zeros(4), 9, Store(0)), [1], torch.ones(1, 4))
    pid = os.fork()
    if not pid:
        try: table[[2]] = torch.ones(1, 4)
        except RuntimeError: os._exit(int(table[1].sum()))
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4 and table[1].sum() == 4

def test_the_budget_is_kept(monkeypatch):
    monkeypatch.setenv('FEDLIT_MEMORY', '1e3')
    store = Store()
    assert store.budget == 1000
    kept = [Row(store, torch.zeros(60)) for _ in range(9)]
    assert store.used == 960 and [r.at is None for r in kept] == [True]*4 + [False]*5

@pytest.mark.parametrize('limit, free', [('max', 8e9), ('6000000000', 3e9), ('99000000000', 8e9), ('2000000000', 0)])
def test_what_a_container_keeps_of_files_is_free(monkeypatch, limit, free):
    "Whoever reads a large data set fills a container to its limit, and whoever needs the room gets it."
    held = dict(meminfo=f'MemTotal: 9000000 kB\nMemAvailable: {8*10**9//1024} kB', max=limit, current='5000000000',
                stat='anon 3000000000\nfile 2000000000\ninactive_file 1500000000\nactive_file 500000000')
    monkeypatch.setattr(tables, 'open', lambda p: io.StringIO(held[p.split('/')[-1].removeprefix('memory.')]),
                        raising=False)
    assert free_memory() == pytest.approx(free)

# ---- runs and files ----

@pytest.mark.parametrize('budget', ['0', '3e4'])
def test_the_budget_does_not_change_a_run(budget, monkeypatch):
    go = lambda: federate(net(), TASK, CLIENTS, ALL, rounds=3, participation=.5, **FAST)
    a = go()
    monkeypatch.setenv('FEDLIT_MEMORY', budget)
    b = go()
    ends = [run.state.personal['head.weight'].store.end for run in (a, b)]
    assert same(a, b) and ends[1] > 0 == ends[0]

@pytest.mark.parametrize('budget', ['1e9', '0'])
def test_save_load_and_resume(tmp_path, budget, monkeypatch):
    monkeypatch.setenv('FEDLIT_MEMORY', budget)
    go = lambda rounds, file=None: federate(net(), TASK, CLIENTS, ALL, rounds=rounds, participation=.34,
                                            checkpoint=file, **FAST)
    half = go(2, tmp_path/'c.safetensors')
    back = Run.load(tmp_path/'c.safetensors')
    mine, theirs = (s.client['MOON']['params']['head.weight'] for s in (half.state, back.state))
    assert same(half, back) and theirs.written() == mine.written() and 0 < len(mine.written()) < 6
    whole, resumed = go(4), go(4, tmp_path/'c.safetensors')
    assert same(whole, resumed)
    assert all(torch.equal(a, b) for k in range(6)
               for a, b in zip(*(network_for(ALL, r.state, k)[0].values() for r in (whole, resumed))))

def test_a_file_holds_the_written_rows_only(tmp_path):
    def size(clients):
        parts = [torch.arange(8*k, 8*k+8) for k in range(clients)]
        run = federate(net(), TASK, parts, MOON(), rounds=1, participation=2/clients, **FAST)
        run.settings = {}
        return run.save(tmp_path/f'{clients}.safetensors').stat().st_size
    assert abs(size(150)-size(15)) < 200

def test_pack_and_unpack():
    table = put(Table(torch.ones(2, dtype=torch.double), 9), [8, 1], torch.zeros(2, 2))
    held, numbers = pack(table)
    assert numbers.tolist() == [1, 8] and held.shape == (3, 2) and torch.equal(unpack(held, numbers, 9)[:], table[:])
    assert torch.equal(unpack(*pack(Table(torch.ones(2), 3)), 3)[:], torch.ones(3, 2)) # nobody has written
    assert (unflatten(flatten(dict(a=dict(b=table))))['a']['b'] is table
            and torch.equal(rows(dict(a=table), [8])['a'], table[[8]]))

# ---- growth ----

GROWTH = '''
import time, torch
from fedlit.data import load
from fedlit.method import FedAvg
from fedlit.methods import FedPer, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.ground.memory import peak_mb
from fedlit.round import fed_round
from fedlit.state import start
torch.set_num_threads(1)
task = load('digits')
model = build('mlp', task, hidden=(128,), features=64)
x, y = task.normalise(task.x_train[:320]).unflatten(0, (10, 1, 32)), task.y_train[:320].view(10, 1, 32)
for n in 100, 10_000:
    for method in FedAvg(), FedPer(), MOON(), SCAFFOLD():
        state, times = start(method, model, n), []
        for r in range(12):
            who = [(97*r+j) % n for j in range(10)]
            began = time.process_time()
            sent = Broadcast(method, model, state, Local())
            state = fed_round(sent, who, dict(x=x, y=y), [1.]*10, executor='vmap')
            times.append(time.process_time()-began)
        print(method.name, min(times[2:]), peak_mb('cpu'))
'''

def test_rounds_do_not_grow_with_the_clients_that_exist():
    "Dense memories of 10,000 clients took 500 ms of the processor a round instead of 20, and 1.3 GB more."
    out = subprocess.run([sys.executable, '-c', GROWTH], capture_output=True, text=True, check=True).stdout
    seen = [(name, float(t), float(mb)) for name, t, mb in map(str.split, out.splitlines())]
    few, many = seen[:4], seen[4:]
    for (name, t, _), (_, t2, _) in zip(few, many, strict=True): assert t2 < 3*t + .01, (name, t, t2)
    assert many[-1][2]-few[-1][2] < 150, (few, many)

def test_a_system_that_cannot_read_at_a_place(monkeypatch):
    "Windows has neither pread nor pwrite."
    for name in ('pread', 'pwrite'): monkeypatch.delattr(os, name, raising=False)
    t, rows = Table(torch.zeros(3), 50, Store(budget=24)), torch.randn(20, 3)
    t[list(range(20))] = rows
    assert t.store.end >= 17*12 and torch.equal(t[list(range(20))], rows)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(v, rows[k % 20]) for k, v in enumerate(pool.map(lambda k: t[k % 20], range(400))))

def test_a_call_may_write_and_read_less_than_it_was_asked_for(monkeypatch):
    "Linux takes at most 2 GiB a call."
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, 'pwrite', lambda file, data, at: write(file, data[:100], at))
    monkeypatch.setattr(os, 'pread', lambda file, n, at: read(file, min(n, 70), at))
    store, v = Store(budget=0), torch.arange(123.)
    assert torch.equal(store.read(store.write(v), v), v)

def test_a_full_disk_is_said_to_be_full(monkeypatch):
    def write(file, data, at):
        if at >= 200: raise OSError(errno.ENOSPC, 'No space left on device')
        return len(data[:200])
    monkeypatch.setattr(os, 'pwrite', write)
    with pytest.raises(OSError, match='is full; TMPDIR names another folder'): Store(budget=0).write(torch.arange(123.))
