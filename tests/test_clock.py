"Answers that come late: the timetable and the server's steps against loops written by hand, resumed, refused."
import copy, math
import numpy as np, pytest, torch
from itertools import islice
from torch import nn
from fedlit.data import load
from fedlit.engine.inputs import least_batch
from fedlit.local import Between, Local
from fedlit.method import Method
from fedlit.methods import DP, FedAsync, FedAvg, FedBuff, FedDecorr, FedPer, HeteroFL, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.parse import value
from fedlit.participation import Clock
from fedlit.partition import dirichlet
from fedlit.result import Run
from fedlit.run import federate
from fedlit.ground.tree import leaves
from by_hand import drawn, sgd
from fedlit.after.report import took_part

TASK = load('digits').subset(240, seed=0)
CLIENTS = dirichlet(TASK.y_train, 5, .5, seed=0)
LOCAL = Local(epochs=1, batch_size=16, lr=.1, momentum=0.)
PACES = (1, 2, 3, 7, 2)

def net(norm='none'): return build('mlp', TASK, seed=0, hidden=(8,), features=4, norm=norm)

CLOCK = Clock(answers=2, paces=PACES)

def go(method=None, clock=CLOCK, rounds=6, norm='none', **kw):
    return federate(net(norm), TASK, CLIENTS, method or FedAvg(), rounds, **{'local': LOCAL, **kw},
                    participation=clock, progress=False)

def steps_of(k, round=0): return -(-len(CLIENTS[k])//16)

def by_hand(clock, n, rounds, steps, paces):
    "All clients at work; a plain list of jobs, searched for the next at every event."
    jobs, now, out = {k: (paces[k]*steps(k, 0), 0) for k in range(n)}, 0, []
    for r in range(rounds):
        came, begun = [], now
        goal = clock.answers or len(jobs)
        while jobs and len(came) < goal:
            end, k = min((end, k) for k, (end, _) in jobs.items())
            if came and clock.deadline and end > begun + clock.deadline:
                now = max(now, begun + clock.deadline)
                break
            now = end
            came.append((k, jobs.pop(k)[1]))
        out.append((sorted(came), now, {v for _, v in jobs.values()}))
        for k, _ in came: jobs[k] = (now + paces[k]*steps(k, r+1), r+1)
    return out

@pytest.mark.parametrize('given', [{}, dict(answers=1), dict(answers=2), dict(answers=5), dict(deadline=9),
                                   dict(deadline=1), dict(answers=3, deadline=6)], ids=repr)
def test_the_timetable_is_that_of_a_list_searched_at_every_event(given):
    clock = Clock(paces=PACES, **given)
    for a, (came, now, left) in zip(clock.rounds(5, 0, steps_of), by_hand(clock, 5, 40, steps_of, PACES)):
        assert list(zip(a.who, a.began)) == came and a.time == now and a.pending == left

def test_a_share_is_at_work_and_whoever_has_answered_is_replaced_at_once():
    clock, n = Clock(.3, answers=2), 20
    busy, last = set(), 0.
    for r, a in enumerate(islice(clock.rounds(n, 3, lambda k, r: 1), 60)):
        assert len(a.who) == 2 and len(set(a.who)) == 2 and max(a.pending, default=0) <= r
        assert last <= min(a.at) and max(a.at) == a.time # in this round
        last = a.time
        busy |= set(a.who)
    assert busy == set(range(n)) # nobody is forgotten

def test_waiting_for_all_is_a_uniform_draw_bit_for_bit():
    for share in (1., .6):
        timed, plain = go(clock=Clock(share)), go(clock=share)
        assert all(torch.equal(v, plain.state.params[k]) for k, v in timed.state.params.items())
        assert timed.history['staleness'].eq(0).all() and timed.state.past == {}
        paces = Clock().seconds(5, 0)
        assert timed.history['time'].is_monotonic_increasing
        if share == 1.:
            assert np.isclose(timed.history['time'][0], max(p*steps_of(k) for k, p in enumerate(paces)))
    assert 'time' not in plain.history and 'staleness' not in plain.history

def one_client(model, k, sent, version):
    "Plain PyTorch: what client `k` ends with."
    model = copy.deepcopy(model)
    model.load_state_dict(sent)
    return sgd(model, drawn(TASK, CLIENTS, k, LOCAL, version, least_batch(model)), lr=LOCAL.lr).state_dict()

def server_by_hand(clock, norm, rule, rounds=6):
    "An asynchronous server: versions of the network in a list; `rule(now, sent, end, tau, p)` is an answer's step."
    model, versions = net(norm), []
    versions.append({k: v.clone() for k, v in model.state_dict().items()})
    for r, (came, _, _) in enumerate(by_hand(clock, 5, rounds, steps_of, PACES)):
        total = sum(len(CLIENTS[k]) for k, _ in came)
        now, new = versions[r], {k: v.clone() for k, v in versions[r].items()}
        for k, v in came:
            end, p = one_client(model, k, versions[v], v), len(CLIENTS[k])/total
            for name in new:
                if not end[name].is_floating_point(): continue
                learns = name in dict(model.named_parameters())
                new[name] += rule(now[name], versions[v][name], end[name], r - v, p, learns)
        versions.append(new)
    return versions[-1]

RULES = {
    'FedAvg': (FedAvg(), lambda now, sent, end, tau, p, learns: p*((end - sent) if learns else end - now)),
    'FedBuff': (FedBuff(power=.5, lr=.8), lambda now, sent, end, tau, p, learns:
                .8*p*(end - sent)/math.sqrt(1 + tau) if learns else p*(end - now)),
    'FedAsync': (FedAsync(alpha=.6), lambda now, sent, end, tau, p, learns:
                 p*(.6*(1 + tau)**-.5 if learns else 1)*(end - now)),
    'FedAsync, hinge': (FedAsync(alpha=.5, form='hinge', a=2., b=1.), lambda now, sent, end, tau, p, learns:
                        p*((.5 if tau <= 1 else .5/(2*(tau - 1) + 1)) if learns else 1)*(end - now))}

@pytest.mark.parametrize('norm', ['none', 'batch'])
@pytest.mark.parametrize('name', RULES)
def test_the_server_takes_the_steps_of_a_loop_by_hand(name, norm):
    method, rule = RULES[name]
    for clock in (CLOCK, Clock(answers=1, paces=PACES), Clock(deadline=9, paces=PACES)):
        run, hand = go(method, clock, norm=norm), server_by_hand(clock, norm, rule)
        assert run.history['staleness'].max() > 0
        for k, v in {**run.state.params, **run.state.buffers}.items():
            if v.is_floating_point(): assert (v - hand[k]).abs().max() < 2e-5, k
            if k.endswith('running_var'): assert (v > 0).all()

@pytest.mark.parametrize('executor', ['loop', 'threads', 'vmap'])
def test_every_executor_takes_the_same_steps(executor):
    one, other = (go(MOON() + FedBuff(), norm='batch', executor=how) for how in ('loop', executor))
    for a, b in zip(leaves(one.state.params), leaves(other.state.params)): assert (a - b).abs().max() < 1e-4

@pytest.mark.parametrize('method', [FedBuff(), FedAsync() + FedDecorr(), SCAFFOLD(), MOON() + FedPer()], ids=repr)
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(method, tmp_path):
    whole = go(method, norm='batch')
    go(method, norm='batch', rounds=3, checkpoint=tmp_path/'a')
    there = Run.load(tmp_path/'a')
    assert there.state.past and all(int(r) < 3 for r in there.state.past)
    again = go(method, norm='batch', checkpoint=tmp_path/'a')
    assert len(whole.state.past) and whole.state.past.keys() == again.state.past.keys()
    for k in ('params', 'buffers', 'server', 'past'):
        for a, b in zip(leaves(getattr(whole.state, k)), leaves(getattr(again.state, k))): assert torch.equal(a, b)
    assert (whole.history['time'] == again.history['time']).all()

def test_only_what_somebody_is_at_work_on_is_kept():
    clock = Clock(answers=1, paces=PACES)
    pending = [a.pending for a in islice(clock.rounds(5, 0, steps_of), 12)]
    for rounds in (1, 5, 12):
        state = go(clock=clock, rounds=rounds).state
        assert {int(r) for r in state.past} == pending[rounds - 1] and len(state.past) < 5
        assert all(v.keys() == {'params', 'buffers', 'server'} for v in state.past.values())

class Saw(Method):
    "Writes down what the server offers."
    def weigh(self, weights, staleness):
        SEEN['weigh'] = staleness.tolist()
        return weights
    def combine(self, deltas, weights, received, staleness, params):
        SEEN.update(combine=staleness.tolist(), received={k: v.clone() for k, v in received.items()})
        return deltas, weights
    def merge(self, delta, server, received, staleness):
        SEEN['merge'] = staleness.tolist()
        return delta, server

SEEN = {}

def test_hooks_are_told_how_stale_an_answer_is_and_what_its_client_was_sent():
    clock = CLOCK
    *_, last = islice(clock.rounds(5, 0, steps_of), 6)
    run = go(Saw(), clock)
    tau = [5 - b for _, b in sorted(zip(last.who, last.began), key=lambda kb: (kb[1], kb[0]))]
    assert SEEN['weigh'] == SEEN['combine'] == SEEN['merge'] == tau and max(tau) > 0
    assert all(len(v) == 2 for v in SEEN['received'].values()) and SEEN['received'].keys() == run.state.params.keys()
    go(Saw(), 1.)
    assert SEEN['weigh'] == [0]*5

def test_in_rounds_without_a_clock_everybody_was_sent_the_servers_network():
    run = go(Saw(), 1., rounds=1)
    first = net().state_dict()
    assert all(torch.equal(v, first[k].expand_as(v)) for k, v in SEEN['received'].items())
    assert run.state.past == {}

def test_sub_models_catch_up_where_they_trained():
    "An entry that no client of the round trained stays, however stale the answers are."
    run = go(HeteroFL(rates=(1., .5)) + FedBuff(), Clock(answers=1, paces=PACES), rounds=8)
    assert all(v.isfinite().all() for v in run.state.params.values())
    half = go(HeteroFL(rates=(.5,)), Clock(answers=1, paces=PACES), rounds=8)
    begun = net().state_dict()
    still = [(half.state.params[k] == begun[k]) for k in half.state.params if half.state.params[k].dim() == 2]
    assert any(s.any() for s in still) and not all(s.all() for s in still)

def test_without_a_client_the_timetable_of_the_others_stays():
    whole, left = go(), go(without=(2,))
    assert (whole.history['time'] == left.history['time']).all()
    assert left.history['participants'].sum() < whole.history['participants'].sum()

def test_a_bad_late_answer_is_skipped():
    class Poison(Method):
        def done(self, client, params, number): return client, {}
        def send(self, delta, client, number):
            return {k: torch.where(number == 3, math.nan, v) for k, v in delta.items()}, client
    with pytest.warns(UserWarning, match='client 3 produced NaN'):
        run = go(Poison(), CLOCK, rounds=8, bad_clients='skip')
    assert all(v.isfinite().all() for v in run.state.params.values())
    assert '3' in ' '.join(run.history['bad_clients'])
    late = run.history[run.history['bad_clients'] == '3']
    assert late['why'].str.startswith('client 3 produced NaN').all() # also where it began in an earlier round

def test_work_that_differs_from_round_to_round_is_counted():
    local = Local(epochs=Between(1, 4), batch_size=16)
    run = go(clock=Clock(paces=PACES), rounds=4, local=local)
    for r, t in enumerate(np.diff([0, *run.history['time']])):
        assert t == max(p*local.length(steps_of(k), k, 0, r) for k, p in enumerate(PACES))

@pytest.mark.parametrize('drop_last', [False, True])
def test_time_passes_for_the_steps_that_are_taken(drop_last):
    class Count(Method):
        def done(self, client, steps): return client, dict(steps=steps)
        def merge(self, delta, server, uploads): return delta, dict(steps=uploads['steps'][:])
    run = go(Count(), Clock(paces=PACES), rounds=1, local=Local(epochs=3, batch_size=16, drop_last=drop_last))
    assert run.history['time'][0] == max(p*n for p, n in zip(PACES, run.state.server['Count']['steps'].tolist()))

@pytest.mark.parametrize('given,said', [
    (dict(share=0), r'share=0.0, but it must be in \(0, 1\]'), (dict(answers=-1), 'answers=-1'),
    (dict(answers=1.5), 'answers=1.5'),
    (dict(deadline=0), 'deadline=0.0, but it must be None or a positive number'), (dict(pace=0), 'pace=0'),
    (dict(spread=-1), 'spread=-1'), (dict(delay=math.inf), 'delay=inf'), (dict(paces=(1, 0)), r'paces=\(1, 0\)')])
def test_what_is_no_clock_is_refused(given, said):
    with pytest.raises(ValueError, match=said): Clock(**given)

def test_a_clock_that_does_not_suit_the_clients_is_refused():
    with pytest.raises(ValueError, match='paces has 2 numbers, but there are 5 clients'): go(clock=Clock(paces=(1, 2)))
    with pytest.raises(ValueError, match='answers=6, but there are 5 clients'): go(clock=Clock(answers=6))
    with pytest.raises(ValueError, match='ranks do not keep'): go(executor='torchrun')

def test_a_clock_prints_as_the_call_that_makes_it():
    for clock in (Clock(), Clock(.5, answers=2, deadline=3., paces=(1, 2.5))): assert value(repr(clock)) == clock

def test_nobody_is_hidden_by_a_clock():
    pytest.importorskip('dp_accounting')
    run = go(DP(clip=.1, noise=1.), CLOCK, rounds=2)
    assert run.history['epsilon'].eq(math.inf).all() # who answers when depends on how much data it has

def test_a_report_knows_who_answered():
    clock = CLOCK
    assert took_part(go(clock=clock)) == [a.who for a in islice(clock.rounds(5, 0, steps_of), 6)]

def test_what_stays_at_home_is_tested_with_late_clients_too():
    "Personal tensors of a late client are its own: nobody has touched them meanwhile."
    run = go(FedPer(), CLOCK, norm='batch', tests=[torch.arange(20)]*5)
    assert run.history['personal'].notna().all() and isinstance(run.model, nn.Module)
