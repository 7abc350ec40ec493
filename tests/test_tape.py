"What is played from a tape is what would have run: to the bit, for all methods and executors; or it is not recorded."
import copy, warnings
import numpy as np, pytest, torch, torch.nn.functional as F
from functools import partial
from torch import nn
import fedlit.round as round_
from fedlit import methods
from fedlit.cohort import Broadcast
from fedlit.data import Task, load
from fedlit.engine.ragged import can_pad
from fedlit.method import Method, wants
from fedlit.methods import DeCov, DSFL, FedAvg, FedDecorr, FederatedDropout, FedProx, FjORD, HeteroFL, MOON
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.batches import Batches, cross_entropy, valid_places
from fedlit.local import Local, Optimizer
from fedlit.round import fed_round
from fedlit.state import pure, start
from fedlit.run import federate, federating
from fedlit.ground import tape
from fedlit.ground.tape import Tapes, record
from fedlit.ground.tree import flatten
from federation import CLIENTS, CUTTING, METHODS, SIZES, SUMS, Net, batches, difference, model, train, draw_cohort

ids = lambda m: repr(m)

@pytest.mark.parametrize('executor,norm', [pytest.param('loop', False, marks=pytest.mark.slow), ('vmap', True)],
                         ids=['loop', 'vmap'])
@pytest.mark.parametrize('m', METHODS + SUMS, ids=ids)
def test_a_tape_changes_nothing(m, norm, executor):
    tapes, draws = Tapes(), isinstance(m, (DSFL, FjORD)) # its steps cannot be played
    assert difference(train(m, executor, norm=norm), train(m, executor, norm=norm, tapes=tapes)) == 0
    assert draws or any(callable(p) for p in tapes.kept.values())

@pytest.mark.parametrize('m', [*CUTTING, HeteroFL(rates=(1., .5)) + MOON() + FedDecorr()], ids=ids)
def test_networks_that_are_cut_out_are_played_too(m):
    tapes = Tapes()
    assert difference(train(m, 'extract', rounds=4), train(m, 'extract', rounds=4, tapes=tapes)) == 0
    draws = isinstance(m, (FederatedDropout, FjORD)) # other steps have other masks
    assert draws or sum(callable(p) for p in tapes.kept.values()) >= 2

def test_threads_are_the_loop():
    torch.set_num_threads(2)
    for m in (FedAvg(), MOON() + FedDecorr(), *CUTTING[:2]):
        one, many = (train(m, ex, tapes=Tapes()) for ex in ('loop', 'threads'))
        assert difference(one, many) == 0
    assert torch.get_num_threads() == 2

@pytest.mark.parametrize('m', [FedAvg(), FedProx(mu=.1), MOON() + FedDecorr()], ids=ids)
def test_stacks_may_be_of_any_size(m):
    whole = train(m, 'vmap')
    for chunk in (1, 2, 3): assert difference(whole, train(m, 'vmap', chunk=chunk)) < 1e-12
    torch.set_num_threads(2)
    assert difference(whole, train(m, 'vmap', tapes=Tapes())) < 1e-12

@pytest.mark.filterwarnings('ignore:2 clients at once do not fit into memory')
@pytest.mark.parametrize('error', [
    torch.OutOfMemoryError('CUDA out of memory'),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")])
def test_a_stack_that_does_not_fit_is_halved(monkeypatch, error):
    whole = train(FedProx(mu=.1), 'vmap')
    class Small(round_.EngineCohort):
        def __init__(self, sent, who, *args):
            if len(who) > 1: raise error
            super().__init__(sent, who, *args)
    monkeypatch.setattr(round_, 'EngineCohort', Small)
    with pytest.warns(UserWarning, match='4 clients at once do not fit into memory'):
        halved = train(FedProx(mu=.1), 'vmap')
    assert difference(whole, halved) < 1e-12
    monkeypatch.setattr(round_, 'EngineCohort', lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        train(FedAvg(), 'vmap')

def test_other_errors_are_not_taken_for_memory(monkeypatch):
    def broken(*args): raise RuntimeError('shapes do not match')
    monkeypatch.setattr(round_, 'EngineCohort', broken)
    with pytest.raises(RuntimeError, match='shapes do not match'): train(FedAvg(), 'vmap')

class Peeks(Method):
    "Looks at a number: its steps cannot be repeated by a recording."
    def loss(self, features): return features.square().mean() if float(features.mean()) > 0 else 0*features.sum()

@pytest.mark.filterwarnings('ignore:Converting a tensor')
def test_what_looks_at_numbers_is_run_every_time():
    tapes = Tapes()
    assert difference(train(Peeks(), 'loop', rounds=4), train(Peeks(), 'loop', rounds=4, tapes=tapes)) == 0
    assert not any(callable(p) for p in tapes.kept.values())

class Phases(Method):
    "A loss that depends on the step and the round, by Python."
    def loss(self, features, step, round):
        return (step + 2*round)*features.square().mean() if step % 2 else 0*features.sum()

def test_numbers_that_a_hook_asks_for_are_part_of_the_key():
    assert difference(train(Phases(), 'vmap', rounds=4), train(Phases(), 'vmap', rounds=4, tapes=Tapes())) == 0

class Counted(Method):
    "The server's memory grows by a row a round, and a step is as many times as small."
    def init(self, params): return params, dict(rounds=torch.ones(1)), {}
    def grad(self, grads, server): return {k: g/len(server['rounds']) for k, g in grads.items()}
    def merge(self, delta, server): return delta, dict(rounds=torch.cat([server['rounds'], torch.ones(1)]))

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_the_shape_of_the_servers_memory_is_part_of_the_key(executor):
    run, played = (train(Counted(), executor, rounds=4, tapes=t) for t in (None, Tapes()))
    assert difference(run, played) == 0

def test_one_collection_of_tapes_serves_several_methods():
    tapes = Tapes()
    for _ in range(2):
        for m in (FedAvg(), FedProx(mu=.1), FedProx(mu=1.)):
            assert difference(train(m, 'vmap'), train(m, 'vmap', tapes=tapes)) == 0

def filled(method, net, criterion=cross_entropy):
    data = Batches(**dict(batches(0), x=batches(0)['x'].double()))
    sent = Broadcast(method, net, start(method, net, CLIENTS), Local(), criterion)
    return can_pad(sent, data.of([2, 0, 1, 3]))

def test_batches_are_filled_up_only_where_nobody_looks_across():
    assert filled(FedAvg(), model(norm=False)) and filled(FedProx(), model(norm=False))
    assert filled(FedAvg(), model(norm=True))                 # BatchNorm, which passes over empty places
    assert filled(FedDecorr(), model(norm=True)) and filled(MOON() + FedDecorr(), model(norm=False))
    assert not filled(DeCov(), model(norm=False)) and not filled(FedDecorr() + DeCov(), model(norm=True))
    assert not filled(FedAvg(), model(norm=False), F.cross_entropy)
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model(norm=False)
        def forward(self, x):
            z, logits = self.net(x)
            return z, logits - logits.mean(0)
    assert not filled(FedAvg(), Centred())                    # no BatchNorm, and yet

KINDS = [m for m in vars(methods).values() if isinstance(m, type) and issubclass(m, Method) and m is not Method]
FILLED = [FedProx(mu=.1), *(m() for m in KINDS if wants(m(), 'valid'))]
assert len(FILLED) > 2

@pytest.mark.parametrize('norm', [False, True], ids=['plain', 'BatchNorm'])
@pytest.mark.parametrize('method', [*FILLED, MOON() + FedDecorr(), MOON(variant='l2'), FedDecorr(form='paper')],
                         ids=repr)
def test_filled_or_not_is_the_same(monkeypatch, method, norm):
    a, tapes = train(method, 'vmap', norm=norm), Tapes()
    assert difference(a, train(method, 'vmap', norm=norm, tapes=tapes)) == 0
    assert difference(a, train(method, 'loop', norm=norm)) < 1e-9
    monkeypatch.setattr(round_, 'can_pad', lambda *args: False)
    assert difference(a, train(method, 'vmap', norm=norm)) < 1e-9

def test_full_and_short_batches_of_one_group_are_two_recordings():
    "Clients that end together: whether BatchNorm has to pass over places changes from step to step."
    net, gen, live = model(norm=True), torch.Generator().manual_seed(0), torch.tensor([[4, 3]*3, [4, 2]*3])
    x, y = torch.randn(2, 6, 4, 1, 6, 6, generator=gen).double(), torch.randint(0, 4, (2, 6, 4), generator=gen)
    def run(executor, **kw):
        state = start(FedAvg(), net, 2)
        for _ in range(3):
            state = fed_round(Broadcast(FedAvg(), net, state, Local(lr=.1)), [0, 1], dict(x=x, y=y, counts=live),
                              SIZES[:2], executor, **kw)
        return state
    whole = run('loop')
    assert difference(whole, run('vmap')) < 1e-12 and difference(whole, run('vmap', tapes=Tapes())) < 1e-12

class Odd(nn.Module):
    "Looks across the batch, or at zero, in ways that are no BatchNorm module's."
    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.norm, self.head = how, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        if how in ('function', 'unit'): self.norm = nn.Identity()
    def forward(self, x):
        z = self.body(x/x.norm(dim=1, keepdim=True) if 'unit' in self.how else x)
        if self.how == 'function': z = F.batch_norm(z, None, None, training=True)
        elif self.how == 'two views': z = sum(self.norm(torch.cat([z, -2*z.tanh()])).tensor_split(2))
        elif self.how == 'weights': z = F.linear(x, self.norm(self.body.weight))
        else: z = self.norm(z)
        return z, self.head(z)

@pytest.mark.parametrize('how,fill', [('function', False), ('two views', False), ('weights', False), ('unit', True),
                                      ('unit, BatchNorm', True)])
def test_empty_places_do_no_harm_in_odd_networks(how, fill):
    torch.manual_seed(0)
    net, live = Odd(how).double(), torch.tensor([[3, 4, 4], [4, 3, 2], [4, 2, 0]])
    x, y = torch.randn(3, 3, 4, 4).double(), torch.randint(0, 3, (3, 3, 4))
    def run(executor, **kw):
        state = start(FedAvg(), net, 3)
        for _ in range(3):
            state = fed_round(Broadcast(FedAvg(), net, state, Local(batch_size=4, lr=.1)), [0, 1, 2],
                              dict(x=x, y=y, counts=live), SIZES[:3], executor, **kw)
        return state
    whole, sent = run('loop'), Broadcast(FedAvg(), net, start(FedAvg(), net, 3), Local(batch_size=4))
    assert all(v.isfinite().all() for v in whole.params.values())
    assert difference(whole, run('vmap')) < 1e-9 and difference(whole, run('vmap', tapes=Tapes())) < 1e-9
    assert can_pad(sent, Batches(x, y, live)) == fill

def test_a_first_batch_too_small_to_tell_decides_nothing():
    net, x, y = model(norm=True), torch.randn(2, 2, 4, 1, 6, 6).double(), torch.zeros(2, 2, 4, dtype=torch.long)
    sent = Broadcast(FedAvg(), net, start(FedAvg(), net, 2), Local(batch_size=4))
    seen = [can_pad(sent, Batches(x, y, torch.tensor(live))) for live in ([[2, 2], [2, 2]], [[2, 2], [4, 2]])]
    assert seen == [False, True]

def test_padding_may_hold_anything():
    net, data, out = model(norm=False), batches(0), []
    for junk in (0., float('nan')):
        x = data['x'].double().clone()
        x[~valid_places(data['counts'], x.shape[2])] = junk
        out.append(fed_round(Broadcast(FedAvg(), net, start(FedAvg(), net, CLIENTS), Local(lr=.1)), draw_cohort(0),
                             dict(data, x=x), SIZES, executor='vmap'))
    assert difference(*out) == 0 and all(v.isfinite().all() for v in out[0].params.values())

def test_criterion():
    z, y = torch.randn(6, 4, dtype=torch.double), torch.tensor([0, 3, 1, 1, 2, 2])
    assert torch.allclose(cross_entropy(z, y), F.cross_entropy(z, y), atol=1e-14)
    assert torch.allclose(cross_entropy(z, torch.where(y == 2, -1, y)), F.cross_entropy(z[:4], y[:4]), atol=1e-14)
    masked = z.masked_fill(torch.arange(4) == 0, float('-inf'))[1:]     # as MaskedCE(fill='-inf') makes them
    assert torch.allclose(cross_entropy(masked, y[1:]), F.cross_entropy(masked, y[1:]), atol=1e-14)
    w = masked.clone().requires_grad_()
    cross_entropy(w, y[1:]).backward()
    assert w.grad.isfinite().all()

def test_inputs_that_share_memory_stay_apart():
    def f(a, b):
        a.add_(1)
        return a + b
    v = torch.zeros(3)
    for steady in (0, 1, 2):
        _, bind = record(f, v, v, steady=steady)
        both = torch.ones(3), torch.full((3,), 5.)
        assert torch.equal(bind(*both[:steady])(*both[steady:]), torch.full((3,), 7.))

def test_views_writes_and_constants():
    c = torch.arange(4.)
    def f(a):
        rows = a.view(2, 4)
        rows[0] += c
        rows[1].mul_(2)
        return dict(sum=a.sum(), top=rows.max(1)[0], parts=dict(first=rows[0]))
    a, b = torch.randn(8), torch.randn(8)
    for steady in (0, 1):
        _, bind = record(f, a.clone(), steady=steady)
        one, two = b.clone(), b.clone()
        play = bind(two) if steady else lambda: bind()(two)
        for _ in range(3):
            x, y = f(one), play()
            assert (torch.equal(one, two)
                    and all(torch.equal(u, v) for u, v in zip(flatten(x).values(), flatten(y).values())))
        assert 'detach' not in bind.source

def test_what_is_steady_is_worked_out_once():
    "Views of what is written and results of what is not are made once; results of what is written are not."
    def f(w, r, x):
        loss = ((w.T@x)*r.exp()*(1 + w.sum())).sum()
        w.add_(x[:, None])
        return loss
    w, r, x = torch.randn(3, 2), torch.randn(2), torch.randn(3)
    _, bind = record(f, w.clone(), r, x, steady=2)
    outer, inner = bind.source.split('def tape')
    assert 'exp' in outer and 'permute' in outer and 'sum' not in outer and 'exp' not in inner
    one, two = w.clone(), w.clone()
    play = bind(two, r)
    for _ in range(3): assert torch.equal(f(one, r, x), play(x)) and torch.equal(one, two)
    other = bind(w.clone(), r+1)
    assert torch.equal(other(x), f(w.clone(), r+1, x)) and torch.equal(play(x), f(one, r, x))

def test_running_statistics_are_updated_also_where_nobody_reads_what_was_normalised():
    "Of a network's two passes over a batch the first may be there for its statistics alone."
    def f(mean, var, x):
        F.batch_norm(x, mean, var, training=True)
        return mean + 1
    mean, var, x = torch.zeros(3), torch.ones(3), torch.randn(8, 3)
    for steady in (0, 2, 3):
        _, bind = record(f, mean.clone(), var.clone(), x, steady=steady)
        one, two = [mean.clone(), var.clone(), x], [mean.clone(), var.clone(), x]
        play = bind(*two[:steady])
        for _ in range(3): assert torch.equal(f(*one), play(*two[steady:])) and all(map(torch.equal, one, two))

def test_two_ways_to_the_same_view_are_one():
    _, bind = record(lambda a: (a.T.T + a.view(2, 3).unsqueeze(0)).sum(), torch.ones(2, 3))
    assert bind.source.count(' = aten') == 3 and torch.equal(bind()(torch.full((2, 3), 2.)), torch.tensor(24.))

def test_what_is_returned_is_new_every_time():
    _, bind = record(lambda x: dict(one=torch.ones(2), x=x+1), torch.zeros(2))
    play = bind()
    play(torch.zeros(2))['one'].add_(1)
    assert torch.equal(play(torch.zeros(2))['one'], torch.ones(2))

def test_a_copy_is_made_only_where_it_shows():
    def f(a, b, c):
        written, kept = a.clone().add_(1), b.clone()
        c.add_(1)
        return dict(sum=written.sum() + (b.clone()*2).sum(), kept=kept)
    a, b, c = (torch.arange(3.) + k for k in range(3))
    for steady in (0, 1, 2):
        _, bind = record(f, a, b, c.clone(), steady=steady)
        assert bind.source.count('aten_clone_default(') == 2
        one, two = f(a, b, c.clone()), bind(*(a, b)[:steady])(*(a, b)[steady:], c.clone())
        assert all(torch.equal(one[k], two[k]) for k in one) and two['kept'].data_ptr() != b.data_ptr()
    before = lambda c: (c.clone(), c.add_(1))[0]*2 # what is copied is written afterwards
    _, bind = record(before, c.clone())
    assert torch.equal(bind()(c.clone()), 2*c)

def changed(b, x): return b.clone().mul_(.5).add_(x)

def in_place(b, x):
    new = changed(b, x)
    out = new.sin()
    b.copy_(new)
    return out

def seen_meanwhile(b, x):
    new = changed(b, x)
    out = new.sin() + b
    b.copy_(new)
    return out

def seen_through_a_view(b, x):
    new = changed(b, x)
    out = new + b[:1]
    b.copy_(new)
    return out

def copied_elsewhere_too(b, x):
    far, new = torch.zeros_like(b), changed(b, x)
    far.copy_(new)
    b.copy_(new)
    return far*2

def used_afterwards(b, x):
    b.copy_(new := changed(b, x))
    return b.exp() + new.add_(1)

def returned(b, x):
    b.copy_(new := changed(b, x))
    return new

def of_another(b, x):
    b.copy_((new := x.clone()).add_(b))
    return new*2

def never_changed(b, x):
    new = b.clone()
    b.copy_(new)
    return new*2 + x

def turned(b, x):
    b.copy_((new := b.clone().T).add_(x[0]))
    return new*2

@pytest.mark.parametrize('f, copies', [
    (in_place, 0), (seen_meanwhile, 1), (seen_through_a_view, 1), (used_afterwards, 1), (copied_elsewhere_too, None),
    (returned, 1), (of_another, 1), (never_changed, None), (turned, 1)])
@pytest.mark.parametrize('steady', [0, 1])
def test_what_is_copied_and_written_back_is_changed_in_place_if_nobody_sees_it(f, copies, steady):
    b, x = torch.randn(3, 3), torch.randn(3, 3)
    _, bind = record(f, b.clone(), x, steady=steady)
    if copies is not None: assert bind.source.count('copy_') == bind.source.count('aten_clone_default(') == copies
    one, two = b.clone(), b.clone()
    play = bind(two) if steady else partial(bind(), two)
    for i in range(3):
        assert torch.equal(f(one, x + i), play(x + i)) and torch.equal(one, two)
    one.fill_(2), two.fill_(2) # somebody else writes to it
    assert torch.equal(f(one, x), play(x)) and torch.equal(one, two)

def places(n): # products are rounded by where a row begins, on some processors
    "Views of `n` numbers each, which begin at every distance from a multiple of 64 bytes."
    room = torch.randn(n + 8, dtype=torch.double)
    return [room[i:i+n] for i in range(8)]

@pytest.mark.parametrize('steady', [0, 1, 2])
def test_a_copy_that_is_left_out_began_where_its_original_begins(steady):
    def f(w, x): return dict(input=w@x.clone().mT, view=w[1:].clone()@x.mT, made=(2*x)[1:].clone()@w[1:].mT)
    w = torch.randn(2, 10, 9, dtype=torch.double)
    _, bind = record(f, w, torch.zeros(2, 17, 9, dtype=torch.double), steady=steady)
    for v in places(2*17*9):
        args = w, v.view(2, 17, 9)
        got, want = bind(*args[:steady])(*args[steady:]), f(*args)
        assert all(torch.equal(got[k], want[k]) for k in want)

def test_what_is_played_on_copies_begins_where_the_step_does():
    def f(w, x):
        w.sub_((w@x.mT)@x*1e-2)
        return {}
    for v in places(2*10*9):
        tapes = Tapes()
        go = tapes.bind('f', f, v.view(2, 10, 9))
        for x in torch.randn(4, 2, 17, 9, dtype=torch.double): go(x)
        assert not tapes.stopped

@pytest.mark.filterwarnings('error')
def test_tables_of_nine_columns_are_played():
    "The rows of most clients begin at no multiple of 64 bytes."
    class Long(Method):
        def loss(self, features): return .01*features.square().mean()
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(300, 9, generator=g), torch.randint(0, 3, (300,), generator=g)
        task = Task('table', x[:250], y[:250], x[250:], y[250:], classes=3)
        clients = dirichlet(y[:250], 8, .5, seed=seed)
        net = build('mlp', task, seed=seed, hidden=(10,), features=10)
        federate(net, task, clients, Long(), 3, Local(epochs=2, batch_size=8), seed=seed, progress=False)

class Coloured(nn.Module):
    "In a stack, its convolution takes clients and channels as one dimension."
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 3), nn.Linear(72, 10)
    def forward(self, x):
        z = self.conv(x).flatten(1)
        return z, self.head(z)

@pytest.mark.filterwarnings('error')
def test_batches_that_lie_otherwise_have_another_recording():
    "The short batches of neighbours are a part of what was prepared for all; those of others are copied from it."
    class Across(Method):
        def loss(self, features): return .1*features.mean(0).square().sum()
    x, y = torch.randn(72, 2, 8, 8), torch.arange(72)%10
    net, local = Coloured(), Local(epochs=2, batch_size=8)
    task = Task('two', x[:52], y[:52], x[52:], y[52:], classes=10)
    clients = list(torch.arange(52).split([9, 1, 1, 16, 16, 9]))
    one, two = (federate(net, task, clients, Across(), 3, local, executor='vmap', seed=36, progress=False, record=how)
                for how in (True, False))
    assert difference(one.state, two.state) == 0

def test_memory_is_freed_on_the_way():
    "The source deletes every intermediate result after its last use."
    _, bind = record(lambda a: ((a*2).exp() + 1).sum(), torch.ones(3))
    assert bind.source.count('del ') >= 3

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU at hand')

@cuda
@pytest.mark.parametrize('graphs', [False, True])
@pytest.mark.parametrize('m', [FedAvg(), MOON() + FedDecorr(), HeteroFL(rates=(1., .5))], ids=ids)
def test_tapes_and_graphs_on_a_gpu(m, graphs):
    def go(tapes, executor='vmap'):
        net = model().cuda()
        state = start(m, net, CLIENTS)
        for r in range(4):
            data = {k: v.double().cuda() if k == 'x' else v.cuda() if k == 'y' else v for k, v in batches(r).items()}
            state = fed_round(Broadcast(m, net, state, Local(lr=.1, momentum=.9)), draw_cohort(r), data, SIZES,
                              executor=executor, tapes=tapes)
        return state
    played = go(Tapes(graphs))
    assert difference(go(None), played) < 1e-9 and difference(go(None, 'loop'), played) < 1e-9

@pytest.mark.parametrize('kw', [dict(precision='bfloat16'), dict(channels_last=True)], ids=str)
@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads'])
def test_precision_and_order_of_numbers(kw, executor):
    "The options change rounding and nothing else; in every executor."
    kw = dict(precision=torch.bfloat16) if 'precision' in kw else kw
    if executor == 'vmap' and 'channels_last' in kw: pytest.skip('stacks have no such order')
    net, out = Net(), []
    for function in (pure, partial(pure, **kw)):
        out.append(fed_round(Broadcast(FedDecorr(), net, start(FedDecorr(), net, CLIENTS), Local(lr=.01),
                                       function=function),
                             draw_cohort(0), batches(0), SIZES, executor=executor, tapes=Tapes()))
    d = difference(*out)
    assert (0 < d < .05) if 'precision' in kw else d < 1e-5

TASK = load('digits').subset(240, seed=0, test=60)
THREE = [torch.arange(0, 90), torch.arange(90, 170), torch.arange(170, 240)]

def two_ways(method=None, change=None, **kw):
    "Largest difference of what is played and what is run, and the warnings; `change` acts between rounds."
    ends, told = [], []
    for plays in (True, False):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            begin, between = change() if change else (dict, lambda: None)
            given = dict(local=Local(epochs=2, batch_size=20), record=plays, progress=False, **kw) | begin()
            for run in federating(build('mlp', TASK, seed=0), TASK, THREE, method or FedAvg(), 4, **given): # noqa: B007, the last is used
                between()
        ends.append(run.state)
        told.append([str(w.message) for w in said])
    return difference(*ends), told

def test_weights_that_pass_through_numpy_or_lists_are_those_of_the_batch():
    def by_numpy(logits, y):
        n = np.bincount(y.numpy(), minlength=10)
        return F.cross_entropy(logits, y, weight=torch.tensor(1/np.maximum(n, 1)).float())
    def by_list(logits, y): return F.cross_entropy(logits, y)*(1 + sum(y.tolist()) % 7)
    def by_array(logits, y): return F.cross_entropy(logits, y)*float(np.asarray(y).mean())
    def by_copy(logits, y): return F.cross_entropy(logits, y)*copy.deepcopy(y).float().mean()
    for criterion in (by_numpy, by_list, by_array, by_copy):
        apart, (said, _) = two_ways(criterion=criterion, executor='loop')
        assert apart == 0 and not any('recorded' in s for s in said), criterion

class Weighted:
    factor = 1.
    def __call__(self, logits, y): return self.factor*F.cross_entropy(logits, y)

def change_attribute():
    c = Weighted()
    def between(): c.factor *= .3
    return lambda: dict(criterion=c), between

def change_closure():
    t = [1.]
    def between(): t[0] *= 2
    return lambda: dict(criterion=lambda logits, y: F.cross_entropy(logits/t[0], y)), between

STRENGTH = dict(now=0.)
class Annealed(Method):
    def loss(self, features): return STRENGTH['now']*features.square().mean()

def change_global():
    STRENGTH['now'] = 0.
    def between(): STRENGTH['now'] += 1.
    return dict, between

def change_in_watch():
    c = Weighted()
    def watch(*_):
        c.factor *= .5
        return {}
    return lambda: dict(criterion=c, watch=watch), lambda: None

@pytest.mark.parametrize('executor', ['loop', 'threads', 'vmap'])
@pytest.mark.parametrize('change,method', [(change_attribute, FedAvg()), (change_closure, FedAvg()),
                                           (change_global, Annealed()), (change_in_watch, FedAvg())])
def test_what_changes_between_rounds_is_seen_in_the_next(change, method, executor):
    apart, (said, _) = two_ways(method, change, executor=executor)
    assert apart == 0
    assert sum('no longer does what the step does' in s for s in said) == 1

COUNTS = [0]
def late():
    "Has it been called more than nine times?"
    COUNTS[0] += 1
    return COUNTS[0] > 9

class Counting(Method):
    "A hook with a counter, which acts late."
    def loss(self, features): return late()*features.square().mean()

class Late(Optimizer):
    "An optimiser with a counter, which acts late."
    def begin(self, local, params, *clients): return {}
    def step(self, local, params, state, grads):
        rate = local.lr*(1 + late())
        for k, v in params.items(): v.sub_(grads[k], alpha=rate)

@pytest.mark.parametrize('method, given, what', [
    (Counting(), {}, ''), (FedAvg(), dict(optimizer=Late()), '(optimizer)')], ids=['hook', 'optimiser'])
def test_a_step_that_counts_is_run_every_time(method, given, what):
    def change():
        COUNTS[0] = 0
        return lambda: dict(local=Local(epochs=2, batch_size=20, momentum=.5, **given)), lambda: None
    apart, (said, _) = two_ways(method, change, executor='loop')
    assert apart == 0 and sum('changes what Python remembers' in s and what in s for s in said) == 1

def test_a_round_compares_one_stack_of_a_kind():
    "However many sizes the stacks have: the step is run once more than it has to be."
    calls, tapes = [], Tapes()
    def f(x):
        calls.append(len(x))
        return x + 1
    for r in range(3):
        tapes.new_round()
        for n in (3, 2, 1):
            for _ in range(4): tapes.bind(n, f, kind='k')(torch.ones(n))
        assert len(calls) == (7, 8, 9)[r]

class Own(nn.Module):
    "A layer of the user's."
    def forward(self, x): return x

@pytest.mark.parametrize('kw,compares', [
    ({}, False), (dict(criterion=F.cross_entropy), False), (dict(criterion=lambda z, y: F.cross_entropy(z, y)), True),
    (dict(watch=lambda *_: {}), True), (dict(metrics=dict(mean=lambda z, y: z.mean())), True),
    (dict(method=Annealed()), True), (dict(method=FedAvg() + Annealed()), True), (dict(layer=Own()), True),
    (dict(hook=lambda m, x, y: None), True)], ids=lambda v: str(v)[:30])
def test_where_nothing_can_change_one_comparison_is_enough(kw, compares, monkeypatch):
    calls, compare, net, kw = [], Tapes._compare, build('mlp', TASK, seed=0), dict(kw)
    monkeypatch.setattr(Tapes, '_compare', lambda self, *args: (calls.append(1), compare(self, *args))[1])
    if layer := kw.pop('layer', None): net.body.append(layer)
    if hook := kw.pop('hook', None): net.head.register_forward_hook(hook)
    method = kw.pop('method', FedAvg())
    for go in (federate, lambda *args, **kw: list(federating(*args, **kw))[-1]):
        calls.clear()
        go(net, TASK, THREE, method, 4, Local(epochs=2, batch_size=20), progress=False, executor='loop', **kw)
        assert len(calls) == 2*(4 if compares or go is not federate else 1) # full batches, and short ones

def uneven(method, **kw):
    "Clients who finish at different times: stacks of six, five, four, three, two and one."
    net = build('mlp', TASK, seed=0, hidden=(8,), features=8, norm='batch')
    clients = list(torch.arange(240).split([70, 60, 45, 30, 20, 15]))
    local = Local(epochs=2, batch_size=10, equal_batches=True)
    return federate(net, TASK, clients, method, kw.pop('rounds', 3), local, executor='vmap', progress=False, **kw)

def counted(monkeypatch):
    calls, by = [], tape.record
    monkeypatch.setattr(tape, 'record', lambda *args, **kw: (calls.append(1), by(*args, **kw))[1])
    return calls

def alike(one, two):
    return all(torch.equal(v, two.state.params[k]) for k, v in one.state.params.items())

@pytest.mark.parametrize('method,phases', [(FedAvg(), 1), (MOON() + FedDecorr(), 2)], ids=ids)
def test_one_recording_serves_stacks_of_all_sizes(monkeypatch, method, phases):
    monkeypatch.setattr(tape, '_shelf', {})
    calls = counted(monkeypatch)
    played = uneven(method)
    assert len(calls) == 4*phases # two sizes of a stack, two who fill their batches, and the one who is last
    assert alike(played, uneven(method, record=False))

def test_a_second_run_records_nothing(monkeypatch):
    monkeypatch.setattr(tape, '_shelf', {})
    one, calls = uneven(FedProx(mu=.1)), counted(monkeypatch)
    assert alike(one, uneven(FedProx(mu=.1))) and not calls
    uneven(FedProx(mu=.2))
    assert calls # it is another method

def test_what_lies_on_the_shelf_is_believed_only_while_it_agrees(monkeypatch):
    monkeypatch.setattr(tape, '_shelf', {})
    one = uneven(FedAvg())
    for k, v in [*tape._shelf.items()]:
        assert v.source.count('alpha=(-lr)') == 1
        tape._shelf[k] = tape._player(v.source.replace('alpha=(-lr)', 'alpha=(-2*lr)'), v.values, v.shape)
    wrong, calls = list(tape._shelf.values()), counted(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert alike(one, uneven(FedAvg()))
    assert calls and not any(v in wrong for v in tape._shelf.values())

def test_the_shelf_keeps_nothing_of_a_run(monkeypatch):
    "Code that is not a library's is not shared, whatever it holds; and there is room for so many."
    monkeypatch.setattr(tape, '_shelf', {})
    uneven(Annealed())
    assert not tape._shelf
    monkeypatch.setattr(tape, 'PLACES', 1)
    for mu in (.1, .2): uneven(FedProx(mu=mu), rounds=2)
    assert len(tape._shelf) == 1

def test_a_number_that_does_not_count_clients_keeps_recordings_apart():
    tapes = Tapes()
    def f(w, x): return w*len(w)**2 + x
    for n in (3, 5, 3, 5, 7, 3, 5, 7, 7):
        w, x = torch.rand(n), torch.rand(n)
        assert torch.equal(tapes.bind('f', f, w, rows=n)(x), f(w, x))
