"Local training: schedules, uneven work, optimisers, and what methods make of them."
import copy, json, pytest, torch
from dataclasses import replace
from fedlit import laws
from fedlit.cohort import Broadcast, check_local
from fedlit.data import load
from fedlit.ground import tape
from fedlit.local import (Adam, AdamW, Between, Cosine, Decay, Effort, Local, Milestones, Optimizer, Rates, Schedule,
                          SGD, Stragglers, Warmup)
from fedlit.batches import Batches, batches_of, plan
from fedlit.ground.tape import Tapes
from fedlit.methods import (FedALA, FedAvg, FedBN, FedDecomp, FedDSE, FedDyn, FedNova, FedProto, FedProx, FedRep,
                            HeteroFL, SCAFFOLD)
from fedlit.models import Net, build
from fedlit.partition import dirichlet
from fedlit.round import fed_round, local_phase
from fedlit.state import start
from fedlit.result import Run
from fedlit.run import federate
from fedlit.ground.tree import leaves
from fedlit.parse import ParseError, local
from fedlit.participation import draw_clients, Available
from fedlit.method import Method

TASK = load('digits').subset(240, seed=0)
WORLD = laws.small_world(bias=True)
CLIENTS = dirichlet(TASK.y_train, 5, .5, seed=0)
OPTIMISERS = [SGD(nesterov=True), Adam(), AdamW(), Adam(betas=(0., .9), eps=1e-6), SGD(kept=True), Adam(kept=True)]

def net(norm='batch'): return build('mlp', TASK, seed=0, hidden=(12,), features=6, norm=norm)

PLAIN, TWO = FedAvg(), Local(epochs=2, batch_size=16)

def trained(method=PLAIN, rounds=3, local=TWO, **kw):
    return federate(net(), TASK, CLIENTS, method, rounds, local, **{**dict(progress=False, executor='loop'), **kw})

def same(a, b): return all(torch.equal(u, v[:] if hasattr(v, 'pages') else v)
                           for u, v in zip(leaves(a.state.params), leaves(b.state.params)))

def gap(a, b): return max((u - v).abs().max().item() for u, v in zip(leaves(a.state.params), leaves(b.state.params)))

# ---- what is printed

OLD = 'Local(epochs=5, batch_size=32, lr=0.05, momentum=0.9, weight_decay=0.0, drop_last=False)'

def test_a_local_of_old_fields_prints_as_it_did():
    assert repr(Local()) == OLD
    assert 'epochs' not in repr(Local(steps=7)) and 'epochs=3' in repr(Local(epochs=3, steps=7)) # if they are not used
    assert Local().plain() == dict(epochs=5, batch_size=32, lr=.05, momentum=.9, weight_decay=0., drop_last=False)

VALUES = [Milestones(.1, at=(3, 5)), Decay(.1, .998), Decay(.1, .5, every=10), Cosine(.1, 50, to=.001),
          Rates((.1, .05)), Warmup(Cosine(.1, 50), 5), Warmup(.1, 5), Between(2, 5), Stragglers(20, .9), *OPTIMISERS]

@pytest.mark.parametrize('v', VALUES, ids=repr)
def test_a_value_prints_as_the_call_that_makes_it(v):
    assert eval(repr(v)) == v and hash(eval(repr(v))) == hash(v)

def test_a_local_prints_as_the_call_that_makes_it():
    local = Local(epochs=(.5, 2), lr=Warmup(Decay(.1, .9), 3), steps=Between(2, 4), optimizer=AdamW())
    assert eval(repr(local)) == local
    assert json.loads(json.dumps(local.plain())) == local.plain()

class Bare(Optimizer):
    "The two functions of an optimiser, and no more."
    def begin(self, local, params, *clients): return {}
    def step(self, local, params, state, grads):
        for k, v in params.items(): v.sub_(grads[k], alpha=local.lr*(1 - local.momentum))

def test_an_optimiser_needs_no_more_than_its_two_functions():
    one, two = (trained(local=replace(TWO, lr=.1, momentum=.5, optimizer=Bare()), record=r) for r in (True, False))
    assert same(one, two) and gap(one, trained(local=replace(TWO, momentum=0.))) < 1e-6

class Assigns(Optimizer):
    what = 'params'
    def begin(self, local, params, *clients): return dict(m={k: torch.zeros_like(v) for k, v in params.items()})
    def step(self, local, params, state, grads):
        tree = params if self.what == 'params' else state['m']
        for k in params: tree[k] = tree[k] - local.lr*grads[k]

class AssignsState(Assigns):
    what = 'state'

@pytest.mark.parametrize('optimizer', [Assigns(), AssignsState()])
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_an_optimiser_that_assigns_is_refused(optimizer, executor):
    with pytest.raises(ValueError, match=r"Assigns.*\.step must change `params` and `state` in place"):
        trained(local=replace(TWO, optimizer=optimizer), executor=executor)

@pytest.mark.parametrize('make,word', [
    *((lambda k=k, v=v: Local(**{k: v}), f'Local: {k}=.* but it must be') for k, v in (
        ('lr', '0.1'), ('lr', None), ('lr', lambda r: .1), ('lr', float('nan')), ('lr', float('inf')), ('lr', 0.),
        ('epochs', -1.5), ('epochs', '1'), ('epochs', 0), ('batch_size', 32.5), ('batch_size', True), ('batch_size', 0),
        ('momentum', 'a'), ('momentum', 1.), ('weight_decay', None), ('weight_decay', -1.), ('drop_last', 'no'))),
    (lambda: Local(epochs=0.), 'epochs=0,'), (lambda: Local(epochs=()), r'epochs=\(\)'),
    (lambda: Local(epochs=(1, -1)), r'epochs=\(1, -1\)'), (lambda: Local(epochs=float('nan')), 'epochs=nan'),
    (lambda: Local(steps=1.5), 'steps=1.5'), (lambda: Local(steps=0), 'steps=0'),
    (lambda: Local(lr='fast'), "lr='fast'"),
    (lambda: Local(optimizer='adam'), "optimizer='adam'.*Adam"), (lambda: Local(optimizer=Adam), 'optimizer='),
    (lambda: Local(optimizer=Adam(), momentum=.5), 'momentum=0.5.*betas'),
    (lambda: Milestones(.1, at=(5, 3)), r'Milestones: at=\(5, 3\)'), (lambda: Milestones(0, at=(5,)), 'lr=0'),
    (lambda: Decay(.1, -1), 'factor=-1'), (lambda: Cosine(.1, 10, to=.2), 'to=0.2'), (lambda: Rates(()), 'rates='),
    (lambda: Warmup('x', 3), "then='x'"), (lambda: Between(3, 2), 'high=2'), (lambda: Stragglers(3, 2), 'share=2'),
    (lambda: Adam(betas=(.9,)), 'betas='), (lambda: Adam(eps=0), 'eps=0'), (lambda: SGD(nesterov=1), 'nesterov=1'),
    (lambda: Local(lr=Cosine(.1, 5)).at(5), r'Cosine\(.*is 0.0 in round 6')])
def test_what_cannot_be_is_refused_by_name(make, word):
    with pytest.raises(ValueError, match=word): make()

# ---- schedules

class Own(Schedule):
    lr: float
    def __call__(self, round): return self.lr/(1 + round)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_a_schedule_is_every_round_with_its_own_rate_to_the_last_bit(executor):
    model, local, lr = net(), Local(epochs=2, batch_size=16), Own(.1)
    state = start(FedAvg(), model, 5)
    for r in range(4):
        batches = batches_of(TASK, CLIENTS, list(range(5)), local, 0, r, 2)
        state = fed_round(Broadcast(FedAvg(), model, state, replace(local, lr=.1/(1+r))), list(range(5)), batches,
                          [len(c) for c in CLIENTS], executor)
    for record in (True, False):
        run = trained(rounds=4, local=replace(local, lr=lr), executor=executor, record=record)
        assert all(torch.equal(v, run.state.params[k]) for k, v in state.params.items())

@pytest.mark.parametrize('optimizer', [SGD(), AdamW()], ids=repr)
def test_a_constant_schedule_is_the_number(optimizer):
    local = Local(epochs=2, batch_size=16, weight_decay=.01, optimizer=optimizer)
    assert same(trained(local=local), trained(local=replace(local, lr=Milestones(.05, at=(100,)))))

def test_a_new_rate_needs_no_new_recording(monkeypatch):
    made, record = [], tape.record
    monkeypatch.setattr(tape, 'record', lambda *a, **kw: made.append(1) or record(*a, **kw))
    counts = []
    for lr in (.05, Decay(.05, .9)):
        made.clear()
        tape._shelf.clear() # on which recordings outlive a run
        trained(rounds=6, local=Local(epochs=2, batch_size=16, lr=lr))
        counts.append(len(made))
    assert counts[0] == counts[1] > 0

def test_a_hook_that_asks_for_the_rate_sees_each_rounds():
    class Scaled(Method):
        def grad(self, grads, lr): return {k: g/lr for k, g in grads.items()}
    local = Local(epochs=2, batch_size=16, momentum=0., lr=Rates((.2, .05, .01)))
    assert gap(trained(Scaled(), local=local, rounds=4), trained(Scaled(), local=local, rounds=4, record=False)) == 0
    assert gap(trained(Scaled(), local=local, rounds=4), trained(local=replace(local, lr=1.), rounds=4)) < 1e-5

def test_a_schedule_survives_a_checkpoint(tmp_path):
    local, file = Local(epochs=1, batch_size=16, lr=Decay(.1, .5)), tmp_path/'run.safetensors'
    whole = trained(rounds=4, local=local)
    trained(rounds=2, local=local, checkpoint=file)
    assert same(trained(rounds=4, local=local, checkpoint=file), whole)
    assert Run.load(file).settings['local']['lr'] == 'Decay(lr=0.1, factor=0.5, every=1)'
    with pytest.raises(ValueError, match='another run.*local'):
        trained(rounds=5, local=replace(local, lr=Decay(.1, .6)), checkpoint=file)

# ---- how much

def test_steps_fractions_and_one_number_a_client():
    def lengths(**kw): return (plan(CLIENTS, range(5), Local(batch_size=8, **kw), 1, 2)[1] > 0).sum(1).tolist()
    whole = lengths(epochs=1)
    assert whole == [-(-len(c)//8) for c in CLIENTS]
    assert lengths(epochs=.5) == [max(1, int(n/2 + .5)) for n in whole]
    assert lengths(epochs=2.5) == [int(n*2.5 + .5) for n in whole]
    assert lengths(steps=7) == [7]*5
    assert lengths(steps=(1, 2, 3, 4, 50)) == [1, 2, 3, 4, 50]
    assert lengths(epochs=(1, 2, 1, 3, .5))[:2] == [whole[0], 2*whole[1]]

def test_a_part_is_the_beginning_of_the_whole():
    whole, _ = plan(CLIENTS, range(5), Local(batch_size=8, epochs=3), 1, 2)
    some, _ = plan(CLIENTS, range(5), Local(batch_size=8, steps=4), 1, 2)
    assert torch.equal(some, whole[:, :4])

def test_what_is_drawn_depends_on_seed_round_and_client_only():
    local = Local(epochs=Between(2, 5))
    every = [local.work(k, 3, r)[0] for k in range(30) for r in range(10)]
    assert set(every) == {2, 3, 4, 5} and abs(sum(every)/300 - 3.5) < .3
    assert every == [local.work(k, 3, r)[0] for k in range(30) for r in range(10)]
    assert every != [local.work(k, 4, r)[0] for k in range(30) for r in range(10)]
    index, counts = plan(CLIENTS, range(5), replace(local, batch_size=8), 3, 1)
    alone, mine = plan(CLIENTS, [2], replace(local, batch_size=8), 3, 1)
    assert torch.equal(counts[2][counts[2] > 0], mine[0]) and torch.equal(index[2, :len(mine[0])], alone[0])
    late = [Local(epochs=Stragglers(20, .5)).work(k, 0, 0)[0] for k in range(400)]
    assert .4 < sum(n < 20 for n in late)/400 < .58 and min(late) >= 1 and max(late) == 20

class Odd(Effort):
    def __call__(self, client, round, rng): return -1

@pytest.mark.parametrize('local,word', [
    (Local(steps=(3, 4)), 'steps has 2 numbers'), (Local(epochs=(1,)*4), 'epochs has 4 numbers.*5 clients'),
    (Local(steps=(1,)*6), 'steps has 6 numbers'), (Local(epochs=(1,)*6), 'epochs has 6 numbers'),
    (Local(steps=Odd()), 'client 0 -1 steps'), (Local(lr=Cosine(.1, 2)), 'in round 3')])
def test_what_does_not_fit_is_refused_before_the_first_round(local, word):
    with pytest.raises(ValueError, match=word): trained(local=local)

UNEVEN = [Local(steps=5, batch_size=16), Local(steps=(1, 9, 3, 4, 2), batch_size=16),
          Local(epochs=Between(1, 3), batch_size=16), Local(epochs=.4, batch_size=16, lr=Decay(.1, .7))]

@pytest.mark.slow
@pytest.mark.parametrize('local', UNEVEN, ids=repr)
@pytest.mark.parametrize('method', [FedAvg(), SCAFFOLD() + FedNova(), HeteroFL(rates=(1., .5))], ids=repr)
def test_uneven_work_is_one_in_all_executors(method, local):
    one, *others = [trained(method, local=local, rounds=2, executor=e, record=r)
                    for e, r in (('loop', False), ('loop', True), ('vmap', True), ('extract', False))]
    assert all(gap(one, r) < 2e-4 for r in others)

@pytest.mark.parametrize('local', [UNEVEN[1], Local(epochs=(1, 2, .5, 3, 1.4), batch_size=16)], ids=repr)
@pytest.mark.parametrize('method', [FedProto(), FedALA(layers=2, most=3), FedDSE(rates=(1., .5))], ids=repr)
def test_methods_that_look_at_all_data_take_uneven_work(method, local):
    one, *others = [trained(method, local=local, rounds=2, executor=e) for e in ('loop', 'vmap', 'extract')]
    assert all(laws.difference(one.state, r.state) < 5e-4 for r in others)

@pytest.mark.parametrize('local', [Local(steps=1), Local(steps=40), Local(epochs=.2), Local(epochs=(1, 2, .5, 3, 1))])
def test_all_data_are_an_epoch_of_them_whatever_is_trained(local):
    local = replace(local, batch_size=16)
    for who in ([0, 1, 2, 3, 4], [4, 2]):
        batches, whole = (batches_of(TASK, CLIENTS, who, l, 3, 1) for l in (local, Local(epochs=2, batch_size=16)))
        for i, k in enumerate(who):
            x, y = batches.data(i)
            assert all(map(torch.equal, (x, y), whole.data(i)))
            assert torch.equal(y.sort().values, TASK.y_train[CLIENTS[k]].sort().values)
            assert all(map(torch.equal, (x, y), batches.of([1, i]).data(1)))

class Known(Method):
    def done(self, client, labels, counts): return client, dict(labels=labels, counts=counts)

@pytest.mark.parametrize('local', [Local(steps=1), Local(epochs=.2), Local(epochs=1, drop_last=True)], ids=repr)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_labels_and_counts_are_those_of_all_samples_however_few_are_visited(local, executor):
    local, who = replace(local, batch_size=7), [4, 0, 2]
    batches = batches_of(TASK, CLIENTS, who, local, 3, 1, 2)
    out = local_phase(Broadcast(Known(), net(), start(Known(), net(), 5), local), who, batches, executor)
    has = torch.stack([TASK.y_train[CLIENTS[k]].bincount(minlength=10) for k in who])
    assert torch.equal(out['uploads']['Known']['counts'], has.float())
    assert torch.equal(out['uploads']['Known']['labels'], has > 0)
    seen = torch.stack([y[y >= 0].bincount(minlength=10) for y in batches.targets()])
    assert local.drop_last or not torch.equal(has > 0, seen > 0)

@pytest.mark.parametrize('epochs', [1, 1.4, 1.5, 2, 5, .5])
@pytest.mark.parametrize('per', range(1, 9))
def test_an_epoch_of_batches_that_are_given(epochs, per):
    steps = Local(epochs=epochs).length(per)
    data = Batches(torch.arange(steps)[None, :, None, None].float(), torch.zeros(1, steps, 1, dtype=torch.long))
    assert len(data.data(0, epochs)[1]) == min(per, steps) and len(data.data(0, None)[1]) == steps

@pytest.mark.parametrize('statistics', ['recomputed', 'static'])
def test_statistics_are_collected_over_all_data_however_little_is_trained(statistics):
    local = Local(steps=1, batch_size=16)
    assert trained(local=local, statistics=statistics, rounds=1).history['accuracy'].notna().all()

# ---- optimisers

@pytest.mark.slow
@pytest.mark.parametrize('optimizer', OPTIMISERS, ids=repr)
@pytest.mark.parametrize('method', [FedAvg(), FedDyn() + FedBN(), FedRep(), HeteroFL(rates=(1., .5))], ids=repr)
def test_an_optimiser_is_one_in_all_executors_recorded_or_not(method, optimizer):
    "Ragged clients, short batches, four of six, in double precision; what is kept is compared as well."
    local = Local(epochs=1, lr=.01, weight_decay=.01, optimizer=optimizer)
    one, *others = [laws.train(method, WORLD, e, 2, local=local, tapes=Tapes() if r else None)
                    for e, r in (('loop', False), ('loop', True), ('vmap', False), ('vmap', True), ('extract', True))]
    assert laws.difference(one, others[0]) == 0 and all(laws.difference(one, o) < 1e-8 for o in others)

TORCH = {SGD(nesterov=True): lambda ps: torch.optim.SGD(ps, .01, momentum=.9, weight_decay=.01, nesterov=True),
         Adam(): lambda ps: torch.optim.Adam(ps, .01, weight_decay=.01),
         AdamW(): lambda ps: torch.optim.AdamW(ps, .01, weight_decay=.01),
         SGD(kept=True): lambda ps: torch.optim.SGD(ps, .01, momentum=.9, weight_decay=.01),
         Adam(kept=True): lambda ps: torch.optim.Adam(ps, .01, weight_decay=.01)}

@pytest.mark.parametrize('optimizer', TORCH, ids=repr)
def test_rounds_of_ragged_clients_against_torch_optim(optimizer, executor='vmap'):
    "Each client with a network and an optimiser of PyTorch's; four of six a round, and they take three to one steps."
    local = Local(lr=.01, weight_decay=.01, optimizer=optimizer)
    state, opts, nets = start(FedAvg(), WORLD.model, 6, local=local), {}, [copy.deepcopy(WORLD.model) for _ in range(6)]
    for r in range(3):
        data, who, sent = WORLD.data(r), WORLD.cohort(r), {**state.params, **state.buffers}
        for at, k in enumerate(who):
            nets[k].load_state_dict(sent, strict=False)
            nets[k].train()
            if k not in opts or not optimizer.kept: opts[k] = TORCH[optimizer](nets[k].parameters())
            for x, y, n in zip(data['x'][at], data['y'][at], data['counts'][at].tolist()):
                if not n: break
                opts[k].zero_grad()
                torch.nn.functional.cross_entropy(nets[k](x[:n])[1], y[:n]).backward()
                opts[k].step()
        p, state = WORLD.sizes.double()/WORLD.sizes.sum(), fed_round(Broadcast(FedAvg(), WORLD.model, state, local),
                                                                     who, data, WORLD.sizes, executor)
        means = {k: sum(w*nets[c].state_dict()[k] for w, c in zip(p, who)) for k in state.params}
        assert max((v - means[k]).abs().max() for k, v in state.params.items()) < 1e-6

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('optimizer', TORCH, ids=repr)
def test_the_head_and_then_the_body_have_an_optimiser_each(optimizer, executor):
    "Adam corrects its means by the steps that a tensor has taken, not by those of the client."
    local, p = Local(epochs=2, lr=.01, weight_decay=.01, optimizer=optimizer), WORLD.sizes.double()/WORLD.sizes.sum()
    state = start(FedRep(), WORLD.model, 6, local=local)
    nets, opts, sent = [copy.deepcopy(WORLD.model) for _ in range(6)], {}, WORLD.model.state_dict()
    is_head = lambda k: k.startswith('head.')
    for r in range(3):
        data, who = WORLD.data(r), WORLD.cohort(r)
        for at, k in enumerate(who):
            nets[k].load_state_dict({n: v for n, v in sent.items() if not is_head(n)}, strict=False)
            nets[k].train()
            if k not in opts or not optimizer.kept:
                opts[k] = [TORCH[optimizer]([v for n, v in nets[k].named_parameters() if is_head(n) == head])
                           for head in (True, False)]
            sizes = [n for n in data['counts'][at].tolist() if n]
            for t, n in enumerate(sizes):
                nets[k].zero_grad()
                torch.nn.functional.cross_entropy(nets[k](data['x'][at, t, :n])[1], data['y'][at, t, :n]).backward()
                opts[k][2*t >= len(sizes)].step()
        sent = {n: sum(w*nets[k].state_dict()[n] for w, k in zip(p, who)) for n in sent}
        state = fed_round(Broadcast(FedRep(), WORLD.model, state, local), who, data, WORLD.sizes, executor)
    assert max((v - sent[k]).abs().max() for k, v in state.params.items() if not is_head(k)) < 1e-6
    assert max((v[k] - nets[k].state_dict()[n]).abs().max() for n, v in state.personal.items() for k in range(6)) < 1e-6

def test_the_kept_state_belongs_to_the_client(tmp_path):
    local, file = Local(epochs=1, batch_size=16, lr=.01, optimizer=Adam(kept=True)), tmp_path/'run.safetensors'
    asked = dict(local=local, participation=.4)
    whole = trained(rounds=5, **asked)
    taken = whole.state.client['optimizer']['.steps'][:]
    trained(rounds=3, checkpoint=file, **asked)
    again = trained(rounds=5, checkpoint=file, **asked)
    assert same(whole, again) and torch.equal(taken, again.state.client['optimizer']['.steps'][:])
    asked = [sum(k in draw_clients(5, .4, 0, r) for r in range(5)) for k in range(5)]
    per = [len([b for b in c.split(16) if len(b) > 1]) for c in map(torch.as_tensor, CLIENTS)]
    assert taken[:, 0].tolist() == [n*m for n, m in zip(asked, per)] and (taken == taken[:, :1]).all()
    assert gap(whole, trained(rounds=5, local=replace(local, optimizer=Adam()), participation=.4)) > 1e-4

def test_the_kept_state_may_be_larger_than_the_memory(monkeypatch):
    local = Local(epochs=1, batch_size=16, lr=.01, optimizer=Adam(kept=True))
    whole = trained(local=local)
    monkeypatch.setenv('FEDLIT_MEMORY', '1000')
    assert same(whole, trained(local=local))

class HalfPrecise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = torch.nn.Linear(64, 8).bfloat16(), torch.nn.Linear(8, 10)
    def forward(self, x):
        z = self.a(x.flatten(1).bfloat16()).relu().float()
        return z, self.head(z)

def test_bfloat16_does_not_stop_a_count_or_a_mean_of_losses():
    torch.manual_seed(0)
    local = Local(steps=600, batch_size=4, lr=1e-5, optimizer=Adam(kept=True))
    run = federate(HalfPrecise(), TASK, [torch.arange(240)], PLAIN, 1, local, progress=False, executor='loop')
    assert abs(run.history.train_loss[0] - 2.3) < .2
    assert (run.state.client['optimizer']['.steps'][:] == 600).all()

def test_a_state_without_room_for_what_is_kept_is_refused():
    local = Local(batch_size=16, optimizer=Adam(kept=True))
    batches = batches_of(TASK, CLIENTS, [0], local, 0, 0, 2)
    with pytest.raises(ValueError, match='local=local'):
        local_phase(Broadcast(FedAvg(), net(), start(FedAvg(), net(), 5), local), [0], batches)

@pytest.mark.parametrize('method,local,word', [
    (SCAFFOLD(), Local(optimizer=Adam()), 'SCAFFOLD reckons with.*Adam'),
    (FedProx() + FedNova(), Local(optimizer=AdamW()), 'FedNova reckons with.*AdamW'),
    (FedNova(), Local(optimizer=SGD(kept=True)), 'FedNova.*kept=False'),
    (SCAFFOLD() + FedNova(), Local(optimizer=Adam()), '^SCAFFOLD reckons with the length'),
    (SCAFFOLD() + FedRep(), Local(epochs=5), 'SCAFFOLD reckons with all steps.*FedRep'),
    (FedDecomp() + FedProx() + FedNova(), Local(epochs=5), 'FedNova reckons with all steps.*FedDecomp'),
    (FedRep(), Local(steps=3), 'FedRep.*steps=3'), (FedRep(), Local(epochs=Between(2, 3)), 'FedRep.*Between')])
def test_what_a_method_cannot_rely_on_is_refused_before_the_first_round(method, local, word):
    with pytest.raises(ValueError, match=word): trained(method, local=local)
    with pytest.raises(ValueError, match=word): check_local(method, local)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_scaffold_reads_the_gradient_under_nesterov(executor):
    "A loss whose gradient is constant: the control variate is that gradient, whatever SGD made of it."
    local = Local(lr=.1, weight_decay=.1, optimizer=SGD(nesterov=True))
    model = Net(torch.nn.Identity(), torch.nn.Linear(2, 1, bias=False)).double()
    data = dict(x=torch.tensor([1., 2.]).double().expand(2, 6, 1, 2), y=torch.zeros(2, 6, 1, dtype=torch.long),
                counts=torch.tensor([[1]*6, [1]*3 + [0]*3]))
    state = fed_round(Broadcast(SCAFFOLD(), model, start(SCAFFOLD(), model, 2), local,
                                criterion=lambda logits, y: logits.mean()), [0, 1], data, [1., 1.], executor)
    c = state.client['SCAFFOLD']['c']['head.weight'][:]
    assert torch.allclose(c, torch.tensor([1., 2.]).double().expand(2, 1, 2), atol=1e-9)

def test_fednova_normalises_by_the_length_under_nesterov():
    weights = FedNova().weigh(torch.tensor([.5, .5]), torch.tensor([3, 9]), .9, .1, True)
    def far(steps):
        w = torch.zeros(1, requires_grad=True)
        opt = torch.optim.SGD([w], .1, momentum=.9, nesterov=True)
        for _ in range(steps):
            w.grad = torch.ones(1)
            opt.step()
        return -w.item()/.1
    mean = (far(3) + far(9))/2
    assert torch.allclose(weights, torch.tensor([.5*mean/far(3), .5*mean/far(9)]), rtol=1e-5)

# ---- what cannot be meant

def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="momentum=0.0, but it must be .*not 0 where it is Nesterov's"):
        Local(momentum=0., optimizer=SGD(nesterov=True))
    Local(momentum=0., optimizer=SGD())

def test_words_that_are_no_values_are_not_taken_for_some():
    with pytest.raises(ParseError, match="^lr: no value is called 'fast'; there are Adam"): local(lr='fast')
    with pytest.raises(ParseError, match='did you mean Milestones'): local(lr='Milestone(.1, at=(3,))')

def test_arrays_are_tuples_of_numbers():
    import numpy as np
    assert Rates(np.array([.1, .2])) == Rates((.1, .2))
    assert Milestones(.1, at=np.array([3, 5])) == Milestones(.1, at=(3, 5))
    with pytest.raises(ValueError, match='Available: rows=.*texts of equal length'): Available(rows=np.ones((3, 5)))

def test_countless_rounds_and_clients_are_looked_at_in_their_turn():
    Local(lr=Decay(.1, .9999)).check(10**9, 10**4)
    with pytest.raises(ValueError, match='in round 4'): Local(lr=Cosine(.1, rounds=3)).check(1, 10**9)
