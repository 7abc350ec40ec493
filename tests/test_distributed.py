"Several processes: one answer for any number of ranks, sums, not clients, on the wire, an end that says how to go on."
import json, multiprocessing, os, signal, subprocess, sys, time
from datetime import timedelta
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
import pandas as pd, pytest, torch, torch.distributed as dist
import federation as fed
from fedlit.data import load
from fedlit.scale.torchrun import Ranks, balance
from fedlit.engine.guard import Guard, check_clients
from fedlit.method import asks_for, overrides, part_names
from fedlit.local import Adam, Decay, Local
from fedlit.methods import FedAvgM, FedBN, FedPer, MOON
from fedlit.models import build
from fedlit.participation import PowerOfChoice
from fedlit.partition import dirichlet
from fedlit.batches import Batches, cross_entropy
from fedlit.cohort import Broadcast
from fedlit.round import local_phase
from fedlit.server import aggregate
from fedlit.state import start
from fedlit.result import Run
from fedlit.run import federate
from conftest import THIRDS, in_third

STEPS = Local(lr=.1, momentum=.9, weight_decay=.01) # of fed.train
ALL, HARD = fed.METHODS + fed.SUMS, MOON() + FedBN() + FedAvgM()
SICK = 0, 2, 3                                      # clients without one sound number; one of them has most data
# a forked process has imported torch, and knows what `reference` has made
QUICK = 'fork' if sys.platform == 'linux' else 'spawn'

def launch(f, ranks, path, how=QUICK):
    "`f(rank, path)` in so many processes that know one another."
    start = multiprocessing.get_context(how).Process
    ps = [start(target=_enter, args=(f, rank, ranks, str(path))) for rank in range(ranks)]
    for p in ps: p.start()
    for p in ps: p.join(600)
    assert [p.exitcode for p in ps] == [0]*ranks

def _enter(f, rank, ranks, path):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{path}/store', rank=rank, world_size=ranks,
                            timeout=timedelta(minutes=5))
    f(rank, Path(path))
    dist.destroy_process_group()

def digits(rounds=4, method=HARD, sick=(), **kw):
    task = load('digits')
    clients = dirichlet(task.y_train, clients=6, alpha=.5, seed=0)
    if sick:
        task = replace(task, x_train=task.x_train.float().index_fill(0, torch.cat([clients[k] for k in sick]),
                                                                     float('nan')))
    return federate(build('mlp', task, seed=0, norm='batch'), task, clients, method, rounds,
                    Local(epochs=1, batch_size=64), participation=.7,
                    **{'executor': 'vmap', 'progress': False, 'device': 'cpu', **kw})

@cache
def reference(m): return fed.train(m, 'vmap')

@cache
def uninterrupted(): return digits()

@cache
def skipping(): return digits(3, sick=SICK, bad_clients='skip')

def apart(a, b):
    "Largest difference of two runs: of all tensors, and of all that the histories hold."
    rows = [r.history.drop(columns=['seconds', 'peak_mb']) for r in (a, b)]
    assert list(rows[0]) == list(rows[1]) and len(rows[0]) == len(rows[1])
    for k in {'bad_clients', 'why'} & {*rows[0]}: assert rows[0].pop(k).tolist() == rows[1].pop(k).tolist()
    return fed.difference(a.state, b.state), (rows[0]-rows[1]).abs().max().max()

# All methods, on 1, 2 and 4 ranks

def trained(method, ranks):
    "What `fed.train` does, on all ranks; the state, which is whole on rank 0."
    net = fed.model()
    def train(who, state):
        data, at = fed.batches(state.round), [fed.draw_cohort(state.round).index(k) for k in who]
        return check_clients(Guard(), who,
                    local_phase(Broadcast(method, net, state, STEPS, proxy=fed.PROXY), who,
                                Batches(data['x'].double(), data['y'], data['counts']).of(at), 'vmap'),
                    state)
    run = Run(method, pd.DataFrame(), start(method, net, fed.CLIENTS), {})
    sim = SimpleNamespace(train=train, steps=[3, 2, 3, 1, 2, 3], failures={}, federation=SimpleNamespace(proxy=None))
    if ranks.follows: return ranks.follow(sim, run).state
    team = ranks.begin(sim, run)
    for r in range(3):
        run.state = aggregate(Broadcast(method, net, run.state, STEPS, proxy=fed.PROXY), fed.draw_cohort(r),
                              team.train(fed.draw_cohort(r), run.state), fed.SIZES, team.sums)
    ranks.end(run)
    return run.state

def some(ranks, third): # alone there are no messages to go wrong
    return [m for m in (ALL if ranks > 1 else ALL[::4]) if in_third(f'ranks {m!r}', m, third)]

def everything(third, rank, path):
    gaps, traffic = {}, {}
    for m in some(dist.get_world_size(), third):
        with Ranks('cpu') as ranks: state = trained(m, ranks)
        gaps[repr(m)] = (max((v-w).abs().max().item()
                             for v, w in zip(state.params.values(), reference(m).params.values()))
                         if rank else fed.difference(state, reference(m)))
        traffic[repr(m)] = ranks.traffic
    (path/f'seen{rank}').write_text(json.dumps(dict(gaps=gaps, traffic=traffic)), encoding='utf-8')
    digits(2, executor='torchrun:vmap', checkpoint=path/'run')
    again = digits(executor='torchrun:vmap', checkpoint=path/'run') # goes on
    again.history.to_json(path/f'history{rank}')
    digits(3, sick=SICK, bad_clients='skip', executor='torchrun:vmap', checkpoint=path/'skipping')

@pytest.mark.filterwarnings('ignore:client . left finite numbers')
@pytest.mark.slow
@pytest.mark.parametrize('third', THIRDS)
@pytest.mark.parametrize('ranks', [1, 3])
def test_every_method_has_one_answer(ranks, third, tmp_path):
    "And so have runs: one that goes on, and one that skips clients."
    ours = some(ranks, third)
    for m in ours: reference(m)
    uninterrupted(), skipping()
    launch(partial(everything, third), ranks, tmp_path)
    seen = [json.loads((tmp_path/f'seen{rank}').read_text(encoding='utf-8')) for rank in range(ranks)]
    for gaps in (s['gaps'] for s in seen):
        assert len(gaps) == len(ours) and max(gaps.values()) < 1e-9, {k: v for k, v in gaps.items() if not v < 1e-9}
    for m in ours: # only servers that ask for clients get them
        sent, state = seen[0]['traffic'][repr(m)], reference(m)
        # what stays at home has come home
        asks = asks_for(m, 'merge', 'trained') or overrides(m, 'combine')
        means = {'FedAS', 'FedProto', 'IFCA', 'FedExP'} & {*part_names(m)} # what each client sends, one at a time
        assert ('rows' in sent) == bool(means or asks and set(state.personal) < {*state.params, *state.buffers}), m
        assert ('home' in sent) == bool(state.personal or any(state.client.values())), m
    for name, alone in (('run', uninterrupted()), ('skipping', skipping())):
        state, history = apart(Run.load(tmp_path/name, model=alone.model), alone)
        assert state < 1e-5 and history < 1e-5, name
    assert skipping().history.bad.max() >= 2
    histories = [pd.read_json(tmp_path/f'history{rank}').drop(columns=['seconds', 'peak_mb']) for rank in range(ranks)]
    assert all(h.equals(histories[0]) for h in histories) and len(histories[0]) == 4

def ways(executor='vmap', **kw):
    "Adam whose means stay with the client, a rate for every round, uneven steps, and clients of the largest loss."
    tests = [torch.arange(0), *torch.arange(100).split(20)] # the first client has none
    task = load('digits').subset(300, seed=0)
    clients, local = dirichlet(task.y_train, clients=6, alpha=.5, seed=0), Local(
        steps=(2, 5, 1, 7, 3, 4), batch_size=32, lr=Decay(.01, .8), optimizer=Adam(kept=True))
    return federate(build('mlp', task, seed=0), task, clients, FedPer() + FedAvgM(), 4, local, executor=executor,
                    participation=PowerOfChoice(.5, candidates=5), progress=False, device='cpu', tests=tests, **kw)

def ways_on_ranks(rank, path):
    ways('torchrun:vmap', checkpoint=path/'run')

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:client 0 has no test samples')
def test_local_training_participation_and_tests_on_ranks(tmp_path):
    launch(ways_on_ranks, 2, tmp_path)
    alone = ways()
    there = Run.load(tmp_path/'run', model=alone.model)
    assert max(apart(there, alone)) < 1e-5 and there.settings['participation'] == alone.settings['participation']
    taken = alone.state.client['optimizer']['.steps'][:]
    assert torch.equal(there.state.client['optimizer']['.steps'][:], taken) and taken.sum() > 0

# Shares

def test_the_longest_first():
    assert balance([5, 1, 4, 3, 3], 2) == [[0, 4], [1, 2, 3]] and balance([2, 2], 4) == [[0], [1], [], []]
    work = torch.randint(1, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    shares = balance(work, 7)
    loads = [sum(work[k] for k in s) for s in shares]
    assert sorted(sum(shares, [])) == list(range(200)) and max(loads) - min(loads) <= max(work)

# Errors

def faulty(rank, path):
    told = []
    # the same text everywhere, which asks where it is; the second is well while it is tried, on few samples
    wrong = lambda logits, y: cross_entropy(logits, y)*(float('inf') if dist.get_rank() else 1)
    worse = lambda logits, y: cross_entropy(logits, y)*(float('inf') if dist.get_rank() and len(y) > 16 else 1)
    for kw in (dict(criterion=wrong), dict(criterion=worse), dict(rounds=3+rank), dict(rounds=1-rank), dict(rounds=0),
               dict(checkpoint=path/'of another')):
        try: digits(executor='torchrun:loop', **kw)
        except Exception as e: told.append([type(e).__name__, str(e)])
    (path/f'told{rank}').write_text(json.dumps(told), encoding='utf-8')

def test_an_error_on_one_rank_is_that_of_all(tmp_path):
    digits(1, seed=1).save(tmp_path/'of another')
    launch(faulty, 2, tmp_path)
    told = [json.loads((tmp_path/f'told{rank}').read_text(encoding='utf-8')) for rank in range(2)]
    assert told[0] == told[1]
    (z, tried), (a, diverged), (b, differ), none, all_none, (c, other) = told[0]
    assert z == 'ValueError' and 'returned inf' in tried
    assert a == 'FloatingPointError' and 'produced NaN or infinity in round 1' in diverged
    assert b == 'ValueError' and 'rounds: 3 on rank 0, 4 on rank 1' in differ
    assert none == all_none == ['ValueError', 'rounds=0, but it must be a whole number, at least 1']
    assert c == 'ValueError' and 'checkpoint of another run (seed: 1 there, 0 here' in other

OTHER = dict(
    network=(dict(net=1), 'other first weights'),
    width=(dict(hidden=(32,)), 'model: ', 'other first weights'),
    images=(dict(images=1), 'other images'),
    tested=(dict(tested=1), 'other test samples'),
    parts=(dict(parts=1), 'another partition'),
    tests=(dict(tests=1), 'other test samples of clients'),
    factor=(dict(factor=2.), 'another criterion'),
    operation=(dict(plus=True), 'another criterion'),
    proxy=(dict(proxy=1), 'what the server has: [2, 1, 8, 8] ', 'on rank 0'))

def unlike(rank, path):
    "Rank 1 is given something else, each time another thing."
    told = {}
    for name, (kw, *_) in OTHER.items():
        change, task = kw if rank else {}, load('digits')
        clients = dirichlet(task.y_train, clients=6, alpha=.5, seed=0)
        if 'parts' in change: clients[0], clients[1] = clients[1], clients[0]
        if 'images' in change:
            task = replace(task, x_train=task.x_train.clone())
            task.x_train[7, 0, 3, 3] += 1
        if 'tested' in change: task = replace(task, y_test=task.y_test.flip(0))
        tests = [torch.arange(5) + k + ('tests' in change) for k in range(6)]
        factor = change.get('factor', 1.)
        criterion = ((lambda logits, y: cross_entropy(logits, y) + factor) if 'plus' in change
                     else (lambda logits, y: cross_entropy(logits, y) * factor))
        try:
            net = build('mlp', task, seed=change.get('net', 0), hidden=change.get('hidden', (64,)), features=64)
            federate(net, task, clients, FedAvgM(), 1, Local(epochs=1), criterion=criterion, tests=tests,
                     proxy=task.x_test[:2] + change.get('proxy', 0), executor='torchrun:loop', progress=False,
                     device='cpu', threads=1 + rank) # which may differ
        except ValueError as e: told[name] = str(e)
    (path/f'told{rank}').write_text(json.dumps(told), encoding='utf-8')

def test_ranks_that_were_given_something_else_are_refused_before_the_first_round(tmp_path):
    launch(unlike, 2, tmp_path, how='spawn') # a forked process waits for ever for the threads that its parent had
    told = [json.loads((tmp_path/f'told{rank}').read_text(encoding='utf-8')) for rank in range(2)]
    assert told[0] == told[1] and set(told[0]) == set(OTHER)
    for name, (_, *words) in OTHER.items():
        assert told[0][name].startswith('all ranks must be asked for the same run') and len(told[0][name]) < 2000
        assert all(w in told[0][name] for w in words) and 'threads' not in told[0][name], told[0][name]

def unbelievable(rank, path):
    "Client 3 has images in another unit: what one process makes of it, and what two ranks do."
    task = load('digits')
    clients = dirichlet(task.y_train, clients=6, alpha=.5, seed=0)
    x = task.x_train.float().index_fill(0, clients[3], 0.)
    x[clients[3]] = task.x_train[clients[3]].float()*3e4 # with three clients on a rank or two, that rank has no say
    go = lambda **kw: federate(build('mlp', task, seed=0, norm='batch'), replace(task, x_train=x), clients[:4], MOON(),
                               2, Local(epochs=1, batch_size=64), progress=False, device='cpu', **kw)
    run = go(bad_clients='skip', executor='torchrun:vmap')
    said = []
    try: go(executor='torchrun:vmap')
    except FloatingPointError as e: said.append(str(e))
    if rank == 0:
        one = go(bad_clients='skip', executor='vmap')
        gaps = [(one.state.params[k] - v).abs().max().item() for k, v in run.state.params.items()]
        said += [max(gaps), run.history.bad_clients.tolist(), one.history.bad_clients.tolist()]
    (path/f'told{rank}').write_text(json.dumps(said), encoding='utf-8')

@pytest.mark.filterwarnings('ignore:client . returned')
def test_who_is_beyond_belief_does_not_depend_on_the_number_of_ranks(tmp_path):
    launch(unbelievable, 2, tmp_path)
    said, gap, ranks, one = json.loads((tmp_path/'told0').read_text(encoding='utf-8'))
    assert ranks == one == ['3', '3'] and gap < 1e-5
    assert json.loads((tmp_path/'told1').read_text('utf-8')) == [said]
    assert 'client 3 returned' in said and 'in round 1' in said

def absent(rank, path):
    "The ranks have found each other; then one of them is silent until the other has given up."
    if rank:
        while not (path/'gave up').exists(): time.sleep(.1)
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    try:
        with pytest.raises(ConnectionError, match='rank 0 of 2 ended in round 1, because another rank died '
                                                  'or did not answer'):
            digits(executor='torchrun:vmap')
    finally: (path/'gave up').touch()

def test_a_rank_that_does_not_answer_ends_the_run(tmp_path): launch(absent, 2, tmp_path)

def closed(tensor): raise RuntimeError('Connection closed by peer')

def killed_while_parting(rank, path):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    with pytest.raises(ConnectionError, match='ended in round 1, because another rank died'):
        with Ranks('cpu') as ranks: ranks._do(closed, torch.empty(1))
    for expected in ([], [1]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == expected

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='Windows has no SIGTERM that a process could answer')
def test_the_end_that_torchrun_sends_does_not_cut_off_what_a_rank_says(tmp_path):
    launch(killed_while_parting, 1, tmp_path)

# torchrun

def torchrun(ranks, *argv, **env):
    return subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone',
                           f'--nproc-per-node={ranks}', *map(str, argv)],
                          capture_output=True, text=True, timeout=600,
                          env={**os.environ, 'OMP_NUM_THREADS': '1',
                               'PYTHONPATH': os.pathsep.join([str(Path(__file__).parent),
                                                              str(Path(__file__).parents[1])]), **env})

DIES = """
import functools, os, signal, sys
import test_distributed as t
@functools.wraps(t.cross_entropy) # by whose name a checkpoint knows it
def criterion(logits, y, seen=[]):
    seen.append(1)
    if os.environ['RANK'] == '1' and len(seen) == 18: os.kill(os.getpid(), signal.SIGKILL)
    return t.cross_entropy(logits, y)
t.digits(executor='torchrun:loop', record=False, checkpoint=sys.argv[1], criterion=criterion)
"""

def resumed(rank, path): digits(executor='torchrun:vmap', checkpoint=path/'run')

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='Windows has no SIGKILL')
def test_a_rank_is_killed_and_others_go_on(tmp_path):
    script, file = tmp_path/'dies.py', tmp_path/'run'
    script.write_text(DIES, encoding='utf-8')
    end = torchrun(2, script, file)
    said = end.stderr.split('ConnectionError: ')[-1]
    assert end.returncode and said.startswith('rank 0 of 2 ended in round '), end.stderr[-3000:]
    assert (f'{file} holds the rounds before' in said
            and f'torchrun --nproc-per-node=2 {script} {file}` goes on from there' in said)
    done = Run.load(file, model=uninterrupted().model)
    assert 0 < done.state.round < 4 and f'in round {done.state.round+1},' in said
    seen = done.settings['fingerprint'] # the code of the criterion that kills is another one
    done.settings['fingerprint'] = {k: v for k, v in seen.items() if not k.startswith('criterion in')}
    for ranks in (1, 2, 3):
        path = tmp_path/str(ranks)
        path.mkdir()
        done.save(path/'run')
        launch(resumed, ranks, path)
        assert max(apart(Run.load(path/'run', model=done.model), uninterrupted())) < 1e-5

@pytest.mark.slow
def test_the_command_on_two_ranks_prints_once(tmp_path):
    ask = ['run', '--clients', '4', '--rounds', '2', '--epochs', '1', '--quiet']
    both = [torchrun(2, '-m', 'fedlit', *ask, '--json', tmp_path/'ranks'),
            subprocess.run([sys.executable, '-m', 'fedlit', *ask, '--json', tmp_path/'one'],
                           capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})]
    assert ([e.returncode for e in both] == [0, 0]
            and [e.stdout.count('Run of FedAvg()') for e in both] == [1, 1]), both[0].stderr[-3000:]
    ranks, one = (json.loads((tmp_path/k).read_text(encoding='utf-8')) for k in ('ranks', 'one'))
    assert ranks['settings']['executor'] == 'torchrun:vmap x 2'
    assert all(abs(a[k]-b[k]) < 1e-5
               for a, b in zip(ranks['history'], one['history']) for k in ('accuracy', 'loss', 'train_loss', 'drift'))
