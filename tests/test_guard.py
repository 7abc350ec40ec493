"Broken numbers: found wherever they are, named, and skipped as if the client had not been drawn."
import math, re, warnings
from dataclasses import replace
import pytest, torch
from fedlit.cli import main
from fedlit.data import load
from fedlit.engine.guard import Guard, bad_rows, lengths, client_columns, check_server, check_clients
from fedlit.method import Method
from fedlit.methods import DP, DPSGD, FedAvg, FedAvgM, FedBN, FedPer, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.partition import dirichlet, iid
from fedlit.batches import Batches
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import local_phase
from fedlit.server import aggregate
from fedlit.state import State, start
from fedlit.result import Run
from fedlit.run import federate
from fedlit.ground.tree import rows
from federation import CLIENTS, METHODS, PROXY, SIZES, batches, difference, model, draw_cohort

TASK = load('digits')
PARTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
FAST = dict(local=Local(epochs=1, batch_size=64), progress=False)
ids = lambda m: repr(m)

def net(**kw): return build('mlp', TASK, seed=0, hidden=(16,), features=8, **kw)
def poisoned(*clients, factor=math.nan):
    x = TASK.x_train.float().clone()
    for k in clients: x[PARTS[k]] *= factor
    return replace(TASK, x_train=x)
def quietly(f, *args, **kw):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        return f(*args, **kw), [str(w.message) for w in said]
def sifted(guard, who, out, *more):
    "Who is left, what is left, and what the history says."
    left = check_clients(guard, who, out, *more)
    return left['who'].tolist(), left, client_columns(guard, who, left)

def bad(out, sent): return bad_rows(Guard(), range(len(out['loss'])), out, sent, 1.)[0]
def same(a, b): return all(torch.equal(v, b.state.params[k]) for k, v in a.state.params.items())

# ---- every method ----

@pytest.mark.parametrize('m', {type(m): m for m in METHODS}.values(), ids=ids)
def test_a_skipped_client_was_not_drawn(m):
    "One of four clients has data that are not numbers; the server makes of the round what it makes of the other three."
    rest, local, n = [0, 2, 3], Local(lr=.1, momentum=.9), model()
    state, data, ks = start(m, n, CLIENTS), batches(0), draw_cohort(0)
    def end(rows, sick=None):
        x = data['x'][rows, :1].double()
        if sick is not None: x[sick] = math.nan
        sent = Broadcast(m, n, state, local, proxy=PROXY)
        out = local_phase(sent, [ks[i] for i in rows], Batches(x, data['y'][rows, :1], data['counts'][rows, :1]))
        (left, out, seen), said = quietly(sifted, Guard('skip'), [ks[i] for i in rows], out, state)
        return left, seen, said, aggregate(sent, left, out, SIZES[rest])
    left, seen, said, one = end([0, 1, 2, 3], sick=1)
    assert left == [ks[i] for i in rest] and seen['bad'] == 1 and seen['bad_clients'] == str(ks[1])
    assert len(said) == 1 and f'client {ks[1]} produced NaN or infinity in round 1, first in ' in said[0]
    assert difference(one, end(rest)[-1]) < 1e-12
    assert check_server(Guard(), state, one, seen)[0] is one

# ---- what is found ----

def out_of(K=3):
    "A healthy result of K clients: two layers, a running mean, an upload and a memory."
    g = torch.Generator().manual_seed(0)
    sent = dict(a=torch.randn(4, 3, generator=g), b=torch.randn(4, generator=g))
    near = lambda: {k: v + .1*torch.randn(K, *v.shape, generator=g) for k, v in sent.items()}
    out = dict(params=near(), buffers=dict(mean=torch.zeros(K, 4), seen=torch.ones(K, dtype=torch.long)),
               uploads=dict(M=dict(u=torch.zeros(K))), client=dict(M=dict(c=near())), mask={},
               steps=torch.ones(K), loss=torch.ones(K))
    return State(sent, {}, {}, {}, {}, K), out

@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('place,name', [(('params', 'b'), 'b'),
                                        (('buffers', 'mean'), 'mean'),
                                        (('uploads', 'M', 'u'), 'uploads/M/u'),
                                        (('client', 'M', 'c', 'a'), 'client/M/c/a'),
                                        (('loss',), 'the loss')])
def test_one_bad_number_is_found_and_named_wherever_it_is(value, place, name):
    sent, out = out_of()
    assert sifted(Guard(), [7, 8, 9], out, replace(sent, round=4))[0] == [7, 8, 9]
    tensor = out
    for k in place: tensor = tensor[k]
    tensor[1].reshape(-1)[-1:] = value
    with pytest.raises(FloatingPointError,
                       match=f'client 8 produced NaN or infinity in round 5, first in {name};'):
        check_clients(Guard(), [7, 8, 9], out, replace(sent, round=4))
    (left, kept, seen), said = quietly(sifted, Guard('skip'), [7, 8, 9], out, replace(sent, round=4))
    assert left == [7, 9] and seen['bad_clients'] == '8' and len(said) == 1 and math.isfinite(seen['drift'])
    assert (torch.equal(kept['params']['a'], out['params']['a'][[0, 2]])
            and kept['client']['M']['c']['b'].shape == (2, 4))
    (left, kept, seen), said = quietly(sifted, Guard('report'), [7, 8, 9], out, replace(sent, round=4))
    assert left == [7, 8, 9] and kept['params'] is out['params'] and seen['bad'] == 1 and len(said) == 1

@pytest.mark.parametrize('K', [1, 2, 5])
def test_an_absurd_update_is_found_for_any_number_of_clients(K):
    sent, out = out_of(K)
    size = lengths({k: v[None] for k, v in sent.params.items()}, {k: 0*v for k, v in sent.params.items()}).item()
    direction = torch.zeros(4, 3).index_fill_(0, torch.tensor([2]), 3**-.5)
    out['params']['a'][0] = sent.params['a'] + direction*size*9e3
    assert not bad(out, sent).any()
    out['params']['a'][0] = sent.params['a'] + direction*size*1.1e4
    assert bad(out, sent).tolist() == [True] + [False]*(K-1)
    with pytest.raises(FloatingPointError, match='client 0 made an update of length .* in round 1, '
                                                 'most of it in a, to a network'):
        check_clients(Guard(), list(range(K)), out, sent)
    assert sifted(Guard(update=math.inf), list(range(K)), out, sent)[0] == list(range(K))

def test_what_stays_at_home_is_measured_from_where_the_client_began():
    "The server's copy of it stands still, so that the distance from there would grow in every round."
    m, n, ks, local = FedPer(), model(), draw_cohort(0), Local(lr=.1)
    state, data = start(m, n, CLIENTS), Batches(**{**batches(0), 'x': batches(0)['x'].double()})
    for _ in range(2):
        sent = Broadcast(m, n, state, local)
        out = local_phase(sent, ks, data)
        began = {k: state.personal[k][ks] if k in state.personal else v for k, v in state.params.items()}
        moved = torch.stack([torch.cat([(out['params'][k] - v)[i].flatten() for k, v in began.items()]).norm()
                             for i in range(len(ks))])
        torch.testing.assert_close(check_clients(Guard(), ks, out, state)['drift'], moved)
        state = aggregate(sent, ks, out, SIZES)
    out['params'][(home := [*state.personal][-1])][1] += 1e9
    with pytest.raises(FloatingPointError, match=f'client {ks[1]} made .* most of it in {home}, to a network'):
        check_clients(Guard(), ks, out, state)

@pytest.mark.parametrize('K', [1, 2, 5])
def test_a_network_that_starts_at_zero_may_move(K):
    sent, out = out_of(K)
    assert not bad(out, replace(sent, params={k: 0*v for k, v in sent.params.items()})).any()

def test_an_exploding_loss_is_found_and_a_criterion_without_classes_is_free():
    sent, out = out_of()
    out['loss'][2] = 250.
    with pytest.raises(FloatingPointError, match='client 2 had a mean loss of 250 in round 1, '
                                                 'more than 100 times what a guess costs; .* a smaller lr'):
        check_clients(Guard(), [0, 1, 2], out, sent, math.log(10))
    assert (sifted(Guard(), [0, 1, 2], out, sent)[0] == [0, 1, 2]
            and sifted(Guard(loss=200), [0, 1, 2], out, sent, math.log(10))[0] == [0, 1, 2])

@pytest.mark.parametrize('kw,word', [(dict(then='drop'), "then='drop'.*stop, skip"), (dict(update=0), 'update=0'),
                                     (dict(loss=math.nan), 'loss=nan'), (dict(then=None), 'then=None.*stop, skip')])
def test_a_guard_refuses(kw, word):
    with pytest.raises(ValueError, match=word): Guard(**kw)

# ---- numbers that are finite, and no training's ----

BIG = {'running_mean': 1e38, 'running_var': 2e18, 'upload': 1e10, 'memory': 1e12}

def of_many(K=5):
    "As `out_of`, with BatchNorm's statistics, which were sent too."
    sent, out = out_of(K)
    stats = {'n.running_mean': torch.zeros(4), 'n.running_var': torch.ones(4), 'n.num_batches_tracked': torch.tensor(0)}
    out['buffers'] = {'n.running_mean': torch.randn(K, 4), 'n.running_var': torch.rand(K, 4) + .5,
                      'n.num_batches_tracked': torch.full((K,), 20)}
    return replace(sent, buffers=stats), stats, out

@pytest.mark.parametrize('K', [1, 2, 3, 5])
@pytest.mark.parametrize('what', BIG)
def test_a_number_that_no_training_makes_is_found_wherever_it_is(what, K):
    sent, stats, out = of_many(K)
    assert not bad(out, sent).any()
    place, name = dict(upload=(out['uploads']['M']['u'], 'uploads/M/u'),
                       memory=(out['client']['M']['c']['b'], 'client/M/c/b')).get(
                           what, (out['buffers'].get(f'n.{what}'), f'n.{what}'))
    place[K//2].fill_(BIG[what])
    assert bad(out, sent).tolist() == [k == K//2 for k in range(K)]
    said = re.escape(f"client {K//2} returned {BIG[what]:.3g} in {name} in round 1,")
    with pytest.raises(FloatingPointError, match=said):
        check_clients(Guard(), list(range(K)), out, sent)
    left = quietly(sifted, Guard('skip'), list(range(K)), out, sent)[0][0]
    assert left == [k for k in range(K) if k != K//2]
    assert sifted(Guard(beyond=math.inf), list(range(K)), out, sent)[0] == list(range(K))

def test_what_all_clients_say_is_no_clients_fault():
    "A table with income in it: no network was made for it, but the clients agree, and one of two is no judge."
    sent, stats, out = of_many(5)
    out['buffers']['n.running_mean'] *= 1e7
    out['buffers']['n.running_var'] *= 1e14
    assert not bad(out, sent).any()
    pair = rows(out, [0, 1])
    assert not bad(pair, sent).any()
    out['buffers']['n.running_mean'][3] *= 1e6
    assert bad(out, sent).tolist() == [False]*3 + [True, False]
    # what the server has sent is no client's fault either, nor what stays at home
    stats['n.running_mean'] = torch.full((4,), 1e20)
    assert not bad(out, sent).any()
    out['buffers']['at home'] = torch.tensor([1., 1, 1, 1, 1e30])
    assert not bad(out, replace(sent, personal={'at home': None})).any()
    out['buffers']['at home'][3] = math.inf
    assert bad(out, replace(sent, personal={'at home': None})).tolist() == [False]*3 + [True, False]

def test_a_variance_below_zero_is_bad_where_none_was_sent():
    sent, stats, out = of_many(3)
    out['buffers']['n.running_var'][1, 2] = -.5
    assert bad(out, sent).tolist() == [False, True, False]
    with pytest.raises(FloatingPointError, match=r'client 1 returned a variance of -0\.5 in n\.running_var'):
        check_clients(Guard(), [0, 1, 2], out, sent)
    stats['n.running_var'][2] = -1. # FedAvgM(form='released') makes such
    assert not bad(out, sent).any()

def test_half_of_the_clients_do_not_move_the_middle():
    sent, stats, out = of_many(5)
    out['uploads']['M']['u'][:2] = 1e9
    assert bad(out, sent).tolist() == [True, True, False, False, False]

def test_buffers_of_other_kinds_are_no_fault():
    "A mask of minus infinity, booleans, complex numbers: as they were sent."
    sent, stats, out = of_many(3)
    more = dict(mask=torch.full((2,), -math.inf), flag=torch.tensor([True]), wave=torch.ones(2, dtype=torch.cfloat))
    stats.update(more)
    out['buffers'].update({k: v.expand(3, *v.shape).clone() for k, v in more.items()})
    assert not bad(out, sent).any()
    assert sifted(Guard(), [0, 1, 2], out, sent)[0] == [0, 1, 2]
    out['buffers']['mask'][1, 0] = 0.
    assert not bad(out, sent).any()
    out['buffers']['wave'][2, 0] = 1e30
    assert bad(out, sent).tolist() == [False, False, True]

def test_images_of_another_unit_under_batchnorm_are_found():
    "Ten thousand million times too large: no weight and no loss says so, since BatchNorm divides it away."
    bad = poisoned(1, factor=1e10)
    with pytest.raises(FloatingPointError, match=r'client 1 returned \S+ in \S+running_\w+ in round 1, '
                                                 r'where the server sent'):
        federate(net(norm='batch'), bad, PARTS, FedAvg(), rounds=1, **FAST)
    run, _ = quietly(federate, net(norm='batch'), bad, PARTS, FedAvg(), rounds=2, bad_clients='skip', **FAST)
    rest, _ = quietly(federate, net(norm='batch'), poisoned(1), PARTS, FedAvg(), rounds=2, bad_clients='skip', **FAST)
    assert same(run, rest) and run.history.bad_clients.tolist() == ['1', '1']
    assert all(torch.equal(v, rest.state.buffers[k]) for k, v in run.state.buffers.items())

def test_a_guard_with_another_limit_says_so_and_one_without_prints_as_before():
    assert repr(Guard()) == "Guard(then='stop', update=10000.0, loss=100.0)"
    assert repr(Guard('skip', beyond=50.)) == "Guard(then='skip', update=10000.0, loss=100.0, beyond=50.0)"
    with pytest.raises(ValueError, match='beyond=-1'): Guard(beyond=-1)

# ---- runs ----

def test_a_run_stops_at_the_first_bad_client():
    with pytest.raises(FloatingPointError,
                       match=r"client 2 produced NaN or infinity in round 1, first in body.1.weight; "
                             r"so is 1 more of 6 clients; .*bad_clients='skip'"):
        federate(net(), poisoned(2, 4), PARTS, FedAvg(), rounds=2, **FAST)

@pytest.mark.parametrize('m,kw', [(FedAvg(), {}),
                                  (SCAFFOLD() + FedAvgM(), {}),
                                  (FedPer(), {}),
                                  (FedBN(), dict(norm='batch')),
                                  (FedAvg(), dict(norm='batch', statistics='recomputed'))], ids=str)
def test_a_run_that_skips_is_a_run_without_the_client(m, kw):
    "Clients 2 and 4 are bad; weights, memories, tensors at home, statistics and the table are those of the other four."
    statistics, norm = kw.get('statistics', 'averaged'), kw.get('norm', 'none')
    go = lambda task, rounds=2, **more: federate(net(norm=norm), task, PARTS, m, rounds=rounds, statistics=statistics,
                                                 executor='loop', **FAST, **more)
    run, said = quietly(go, poisoned(2, 4), bad_clients='skip')
    assert (run.history.bad_clients.tolist() == ['2 4', '2 4'] and run.history.bad.tolist() == [2, 2]
            and run.history.participants.tolist() == [4, 4])
    assert len(said) == 2 and all(torch.isfinite(v).all() for v in run.state.params.values())
    for table in [*(v for part in run.state.client.values() for v in part.values() if hasattr(v, 'written')),
                  *run.state.personal.values()]:
        assert table.written() == [0, 1, 3, 5]

def test_a_sound_run_is_the_same_under_every_choice():
    runs = [federate(net(), TASK, PARTS, MOON(), rounds=2, bad_clients=c, **FAST)
            for c in ('stop', 'skip', Guard('report', update=50, loss=20))]
    assert all(same(runs[0], r) for r in runs) and 'bad' not in runs[0].history
    assert all(r.history.bad.tolist() == [0, 0] and r.history.bad_clients.tolist() == ['', ''] for r in runs[1:])

@pytest.mark.parametrize('m', [FedAvg(), FedPer()], ids=str)
def test_a_round_of_bad_clients_only_changes_nothing(m):
    run, said = quietly(federate, net(), poisoned(*range(6)), PARTS, m, rounds=2, bad_clients='skip', **FAST)
    first = start(m, net(), 6)
    assert all(torch.equal(v, first.params[k]) for k, v in run.state.params.items()) and run.state.round == 2
    assert (run.history.participants.tolist() == [0, 0] and run.history.bad.tolist() == [6, 6]
            and len(said) == 2 and '5 more of 6' in said[0])

def test_reported_clients_are_used():
    run, said = quietly(federate, net(), poisoned(1), PARTS, FedAvg(), rounds=1, bad_clients='report', **FAST)
    assert (run.history.bad_clients.tolist() == ['1'] and run.history.participants.tolist() == [6]
            and not torch.isfinite(run.state.params['head.weight']).all())
    assert sum('client 1 produced NaN' in s for s in said) == 1 and not any("server's step" in s for s in said)

def test_a_learning_rate_that_is_too_large_is_seen_in_its_first_round():
    "Nothing is infinite yet, in any weight."
    go = lambda bad_clients: federate(net(), TASK, PARTS, FedAvg(), rounds=1, local=Local(epochs=2, lr=10.),
                                      progress=False, bad_clients=bad_clients)
    assert all(torch.isfinite(v).all() for v in quietly(go, 'report')[0].state.params.values())
    with pytest.raises(FloatingPointError, match=r'client \d (had a mean loss|made an update) .* in round 1.*'
                                                 r'a smaller lr'):
        go('stop')

def test_the_history_and_the_choice_survive_a_file(tmp_path):
    file = tmp_path/'c.safetensors'
    whole, _ = quietly(federate, net(), poisoned(2), PARTS, MOON(), rounds=3, bad_clients='skip', **FAST)
    quietly(federate, net(), poisoned(2), PARTS, MOON(), rounds=2, bad_clients='skip', checkpoint=file, **FAST)
    assert (Run.load(file).history.bad_clients.tolist() == ['2', '2']
            and "then='skip'" in Run.load(file).settings['bad_clients'])
    again, _ = quietly(federate, net(), poisoned(2), PARTS, MOON(), rounds=3, bad_clients='skip', checkpoint=file,
                       **FAST)
    assert same(whole, again) and again.history.bad_clients.tolist() == ['2']*3

def test_a_stopped_run_goes_on_by_skipping(tmp_path):
    "A run that skips, that stops where it is asked to, and goes on under the first choice."
    file, bad = tmp_path/'c.safetensors', poisoned(0)
    quietly(federate, net(), bad, PARTS, FedAvg(), rounds=1, checkpoint=file, bad_clients='skip', **FAST)
    with pytest.raises(FloatingPointError, match='round 2'):
        federate(net(), bad, PARTS, FedAvg(), rounds=2, checkpoint=file, **FAST)
    run, _ = quietly(federate, net(), bad, PARTS, FedAvg(), rounds=2, checkpoint=file, bad_clients='skip', **FAST)
    assert run.history.participants.tolist() == [5, 5] and run.history.bad_clients.tolist() == ['0', '0']

# ---- half precision, and the server ----

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_an_overflow_of_half_precision_is_named(executor):
    "A first layer 1e5 times too large, a second as much too small: the same function, which float16 cannot compute."
    def go(precision):
        n = net()
        first, second = [m for m in n.modules() if isinstance(m, torch.nn.Linear)][:2]
        with torch.no_grad():
            first.weight.mul_(1e5)
            first.bias.mul_(1e5)
            second.weight.mul_(1e-5)
        return federate(n, TASK, PARTS, FedAvg(), rounds=1, local=Local(epochs=1, lr=1e-12), precision=precision,
                        executor=executor, progress=False)
    for precision in ('float32', 'bfloat16'):
        assert go(precision).history.train_loss.iloc[0] == pytest.approx(math.log(10), abs=.2)
    with pytest.raises(FloatingPointError, match="produced NaN or infinity in round 1.*"
                                                 "or precision='float32' instead of 'float16'"):
        go('float16')

class Reckless(Method):
    "A server that multiplies the average step."
    by: object = 1e30 # or NaN
    def merge(self, delta, server): return {k: v*self.by for k, v in delta.items()}, server

@pytest.mark.parametrize('by,word', [(math.nan, 'produced NaN or infinity in round 1, first in body.1.weight'),
                                     (1e8, 'was of length .* in round 1')])
def test_the_servers_step_is_looked_at_too(by, word):
    with pytest.raises(FloatingPointError, match=f"the server's step {word}.*though every update that it av.*"):
        federate(net(), TASK, PARTS, Reckless(by), rounds=1, **FAST)
    run, said = quietly(federate, net(), TASK, PARTS, Reckless(by), rounds=2, bad_clients='skip', **FAST)
    assert (run.history.bad_clients.tolist() == ['server', 'server'] and run.history.bad.tolist() == [0, 0]
            and run.state.round == 2)
    assert all(torch.equal(v, dict(net().named_parameters())[k]) for k, v in run.state.params.items())
    run, said = quietly(federate, net(), TASK, PARTS, Reckless(by), rounds=1, bad_clients='report', **FAST)
    assert run.history.bad_clients.tolist() == ['server'] and any("server's step" in s for s in said)

def test_from_the_command_line(capsys):
    args = ['run', '--quiet', '--rounds', '1', '--epochs', '1', '--lr', '1e20']
    with pytest.raises(SystemExit, match=r'client 0 .* in round 1.*a smaller lr'): main(args)
    _, said = quietly(main, [*args, '--bad-clients', 'skip'])
    assert 'bad_clients' in capsys.readouterr().out and any('client 0' in s for s in said)

@pytest.mark.parametrize('factor, said', [(1e3, 'warned'), (1e6, 'skipped')])
def test_images_in_another_unit_do_not_pass_without_a_word(factor, said):
    task = load('digits').subset(300, seed=0)
    parts, x = iid(task.y_train, 5, seed=0), task.x_train.float().clone()
    x[parts[3]] *= factor
    run = lambda: federate(build('mlp', task, seed=0, norm='batch'), replace(task, x_train=x), parts, FedAvg(), 1,
                           Local(epochs=1), bad_clients='skip', progress=False)
    with pytest.warns(UserWarning, match='client 3 (returned|made) .*another unit'): done = run()
    assert done.history['bad_clients'].tolist() == ['3' if said == 'skipped' else '']

@pytest.mark.parametrize('method, more', [(DP(noise=50.), 'clients'), (DPSGD(noise=500.), 'samples')], ids=lambda m: m)
def test_noise_that_breaks_a_run_is_named(method, more):
    said = rf'{type(method).__name__} may add too much noise: less noise, a smaller clip or more {more} at once'
    with pytest.raises(FloatingPointError, match=said): federate(net(), TASK, PARTS, method, 10, **FAST)

def test_a_short_last_batch_is_named_and_so_is_the_remedy():
    "Three layers with BatchNorm, and clients whose epoch ends with a batch of two: what helps is not another unit."
    task = load('digits').subset(400, seed=0)
    parts = list(torch.arange(400).split([66]*6 + [4])[:6])
    def run(**kw):
        net = build('mlp', task, seed=0, hidden=(64,)*3, features=64, norm='batch')
        return quietly(federate, net, task, parts, FedAvg(), 2, Local(epochs=10, lr=.5, **kw), bad_clients='report',
                       progress=False)[1]
    said = [w for w in run() if w.startswith('client')]
    assert said and all('ends with a batch of 2' in w and 'equal_batches=True' in w for w in said)
    assert not any('ends with a batch' in w for w in run(equal_batches=True))
