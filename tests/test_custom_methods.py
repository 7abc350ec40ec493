"Methods that users write: what is wrong with them is said in one sentence, and what is right goes on and comes back."
import os, subprocess, sys
import numpy as np, pytest, torch
from dataclasses import replace
from functools import partial
from torch import nn
from fedlit.data import Crop, load
from fedlit.ground.files import Damaged
from fedlit.method import Method
from fedlit.measure import features_of
from fedlit.methods import FedAvg, FedDF, FedProto, MOON
from fedlit.models import build
from fedlit.partition import dirichlet, iid
from fedlit.batches import cross_entropy
from fedlit.local import Local, Optimizer, Schedule, Value
from fedlit.participation import Participation
from fedlit.result import Run
from fedlit.run import federate
from fedlit import scores
from fedlit.ground.fingerprint import form_of, agree, weight_of, describe
from by_hand import classifier, classify, gap

TASK = load('digits').subset(200, seed=0)
CLIENTS = dirichlet(TASK.y_train, 4, .5, seed=0)
TESTS = scores.tests_of(TASK, CLIENTS)
NET = build('mlp', TASK, seed=0)

def go(method=None, clients=CLIENTS, model=NET, **kw):
    return federate(model, kw.pop("task", TASK), clients, method or FedAvg(),
                    **{**dict(rounds=2, local=Local(epochs=1), progress=False), **kw})

# Classes

@pytest.mark.parametrize('body, said', [
    ('def loos(self, features): return 0.', "Mine.loos is not a hook; did you mean loss?"),
    ('def aggregate(self, delta): return delta', 'Mine.aggregate is not a hook'),
    ('def select(self): return 0', 'Mine.select is not a hook'),
    ('mu = .1', 'Mine.mu = 0.1 has no annotation, so it is no hyperparameter; write mu: float = 0.1'),
    ('def __init__(self, mu): self.mu = mu', "Mine has an __init__ of its own; declare hyperparameters as fields")])
def test_what_would_train_fedavg_in_silence_is_refused(body, said):
    with pytest.raises(TypeError, match=said.replace('(', r'\(')):
        exec(f'class Mine(Method):\n    {body}', dict(Method=Method))

def test_helpers_are_private_or_declared():
    class Fine(Method):
        helpers = ('measure',)
        mu: float = .1
        def measure(self, v): return v
        def _own(self, v): return v
        def loss(self, features): return self.mu*self._own(self.measure(features)).square().mean()
    class Below(Fine):
        def measure(self, v): return 2*v
    go(Fine())
    go(Below())

# Answers

def one(hook, signature, answer, **others):
    body = ''.join(f'    def {h}(self, {s}): return {a}\n'
                   for h, (s, a) in {hook: (signature, answer), **others}.items())
    space = dict(Method=Method, torch=torch, w=torch.ones((), requires_grad=True))
    exec(f'class Mine(Method):\n{body}', space)
    return space['Mine']()

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('hook, signature, answer, said', [
    ('loss', 'features', 'None', r'Mine.loss returned None, but it must return a number'),
    ('loss', 'features', 'features.mean(1)',
     r'Mine.loss returned a tensor of shape \(\d+,\), but it must return a number'),
    ('grad', 'grads', 'None', 'Mine.grad returned None, but it must return a dictionary with the names of `grads`'),
    ('grad', 'grads', "{'head.weight': grads['head.weight']}",
     'Mine.grad returned nothing for body.1.bias and 4 more; begin with '),
    ('use', 'params', 'None', 'Mine.use returned None, but it must return a dictionary'),
    ('use', 'params', "{'head.weight': params['head.weight']}", 'the network is given nothing for body.1.bias and 4'),
    ('use', 'params, train', "params if train else {'head.weight': params['head.weight']}",
     'the network is given nothing for body.1.bias and 4'),
    ('deploy', 'params', "{'head.weight': params['head.weight']}",
     r'`deploy` of Mine\(\) returned nothing for body.1.bias and 4 more'),
    ('output', 'logits', 'None', 'Mine.output returned None, but it must return a tensor'),
    ('done', 'client', 'client', 'Mine.done returned .*, but it must return two dictionaries'),
    ('done', 'client, delta', 'dict(n=torch.zeros(())), {}',
     r"Mine.done returned a memory with n, but `init` made none; "
     r"let init\(self, params\) return params, \{\}, dict\(n=...\)"),
    ('merge', 'delta, server', 'delta', 'Mine.merge returned .*, but it must return two dictionaries'),
    ('merge', 'delta, server', "({'head.weight': delta['head.weight']}, server)",
     'Mine.merge returned nothing for body.1.bias'),
    ('merge', 'delta, server', 'delta, dict(n=3)',
     'Mine.merge returned 3 as n, but what is remembered or sent must be a tensor'),
    ('weigh', 'weights', 'None', 'Mine.weigh returned None, but it must return'),
    ('weigh', 'weights', 'weights.sum()', 'Mine.weigh returned .*, but it must return'),
    ('init', 'params', 'params', 'Mine.init returned .*, but it must return three dictionaries'),
    ('init', 'params', 'params, {}, dict(seen=dict(t=0))',
     'Mine.init returned 0 as seen/t, but what is remembered or sent must be a tensor'),
    ('done', 'client', 'client, dict(n=3)',
     'Mine.done returned 3 as n, but what is remembered or sent must be a tensor'),
    ('mask', '', 'None', 'Mine.mask returned None, but it must return a dictionary')])
def test_wrong_answers_are_told_in_one_sentence(executor, hook, signature, answer, said):
    with pytest.raises((TypeError, ValueError), match=said):
        go(one(hook, signature or '*, round', answer), executor=executor)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('hook, made, answer, said', [
    ('done', 'rate=torch.tensor(1)', 'dict(rate=client["rate"]*.9), {}',
     r'Mine.done returned float32 of shape \(\) as rate, but `init` made int64 of shape \(\)'),
    ('begin', 'v=torch.zeros(4)', 'params, dict(v=client["v"].mean())',
     r'Mine.begin returned float32 of shape \(\) as v, but `init` made float32 of shape \(4,\)'),
    ('done', 'v=dict(a=torch.zeros(3))', 'dict(v=dict(**client["v"], b=client["v"]["a"])), {}',
     r'Mine.done returned float32 of shape \(3,\) as v/b, but `init` made nothing'),
    ('send', 'v=dict(a=torch.zeros(3))', 'delta, dict(v={})',
     r'Mine.send returned nothing as v/a, but `init` made float32 of shape \(3,\)'),
    ('done', 'v=torch.zeros(3)', 'dict(v=client), {}',
     r'Mine.done returned nothing as v, but `init` made float32 of shape \(3,\)')])
def test_a_memory_keeps_its_names_shapes_and_kinds_of_numbers(executor, hook, made, answer, said):
    signature = ', '.join(['client', *['params']*(hook == 'begin'), *['delta']*(hook == 'send')])
    with pytest.raises(TypeError, match=said):
        go(one(hook, signature, answer, init=('params', f'params, {{}}, dict({made})')), executor=executor)

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('made, answer, said', [
    ('torch.tensor(0)', 'features.mean()', r'float32 of shape \(\) as ema, but the buffer is int64 of shape \(\)'),
    ('torch.zeros(9)', 'features.mean()', r'float32 of shape \(\) as ema, but the buffer is float32 of shape \(9,\)')])
def test_a_buffer_keeps_its_shape_and_kind_of_numbers(executor, made, answer, said):
    start = 'params', f'params, {{}}, {{}}, dict(ema={made})'
    with pytest.raises(TypeError, match=f'Mine.loss returned {said}'):
        go(one('loss', 'features', f'(0., dict(ema={answer}))', init=start), executor=executor)

@pytest.mark.parametrize('hook, signature, answer', [
    ('init', 'params', '{k: torch.nn.Parameter(v) for k, v in params.items()}, dict(ema=w.exp()), {}'),
    ('begin', 'params, client', '{k: v.requires_grad_() for k, v in params.items()}, client'),
    ('grad', 'grads', '{k: w*v for k, v in grads.items()}'),
    ('done', 'client', 'client, dict(n=w.exp())'),
    ('send', 'delta, client', '{k: w*v for k, v in delta.items()}, client, dict(seen=w.exp())'),
    ('weigh', 'weights', 'w*weights'),
    ('combine', 'deltas, weights', '{k: w*v for k, v in deltas.items()}, weights'),
    ('merge', 'delta, server', '{k: w*v for k, v in delta.items()}, {k: w*v for k, v in server.items()}')])
def test_no_graph_outlives_a_hook(hook, signature, answer):
    others = {} if hook == 'init' else dict(init=(
        'params', 'params, dict(ema=torch.zeros(())), dict(n=torch.zeros(())), dict(seen=torch.zeros(()))'))
    if hook == 'done': others['merge'] = 'delta, server, uploads', 'delta, dict(ema=server["ema"] + uploads["n"].sum())'
    state = go(one(hook, signature, answer, **others)).state
    trees = state.params, state.buffers, *state.server.values()
    assert not any(v.requires_grad for tree in trees for v in tree.values())

# Files

class Mine(Method):
    "Lives in a module that can be imported."
    mu: float = .01
    counts: tuple = ()
    def loss(self, features): return self.mu*features.square().mean()

def test_an_importable_method_is_resumed_and_loaded(tmp_path):
    m = MOON() + Mine(counts=tuple(range(1200)))      # its text is longer than a command line should be
    go(m, rounds=1, checkpoint=tmp_path/'run')
    go(m, rounds=2, checkpoint=tmp_path/'run')
    back = Run.load(tmp_path/'run')
    assert back.method == m and len(back.history) == 2
    assert all(torch.equal(back.state.params[k], v) for k, v in go(m, rounds=2).state.params.items())

class Shifted(Method):
    "Its network depends on what the server remembers: a vector, and a number."
    def init(self, params): return params, dict(by=torch.ones_like(params['head.bias']), on=torch.tensor(1.)), {}
    def use(self, params, server): return {**params, 'head.bias': params['head.bias'] + server['on']*server['by']}

def test_a_network_that_depends_on_the_servers_memory_is_loaded(tmp_path):
    run = go(Shifted(), rounds=1, checkpoint=tmp_path/'run')
    back = Run.load(tmp_path/'run')
    assert torch.equal(back.model.head.bias, run.model.head.bias)
    assert not torch.equal(back.model.head.bias, run.state.params['head.bias'])

def test_a_method_of_a_function_is_passed(tmp_path):
    class Local_(Method):
        mu: float = .01
        def loss(self, features): return self.mu*features.square().mean()
    go(Local_(), rounds=1, checkpoint=tmp_path/'run')
    go(Local_(), rounds=2, checkpoint=tmp_path/'run')  # federate knows its own
    with pytest.raises(ValueError, match=r'and the class \S*Local_ of test_custom_methods cannot '
                       r'be found here; pass the method: Run.load\(path, method=...\)') as e:
        Run.load(tmp_path/'run')
    assert not isinstance(e.value, Damaged) and 'remove' not in str(e.value)
    assert Run.load(tmp_path/'run', method=Local_()).method == Local_()
    with pytest.raises(ValueError, match=r'holds Local_\(mu=0.01\), not Local_\(mu=1.0\)'):
        Run.load(tmp_path/'run', method=Local_(mu=1.))

def test_another_process_finds_the_class(tmp_path):
    (tmp_path/'mine.py').write_text('from fedlit.method import Method\n'
                                    'class Own(Method):\n'
                                    '    lam: float = .1\n'
                                    '    def loss(self, features): return self.lam*features.square().mean()\n', 'utf-8')
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            "from fedlit.data import load; from fedlit.models import build; from fedlit.local import Local; "
            "from fedlit.partition import iid; from fedlit.result import Run; from fedlit.run import federate\n")
    train = code + (f"import mine; t = load('digits').subset(60, seed=0); "
                    f"federate(build('mlp', t, seed=0), t, iid(t.y_train, 2), mine.Own(), 1, Local(epochs=1), "
                    f"progress=False, checkpoint={str(tmp_path/'run')!r})")
    read = code + f"print(Run.load({str(tmp_path/'run')!r}).method)"
    for text in (train, read):
        out = subprocess.run([sys.executable, '-c', text], capture_output=True, text=True, check=True).stdout
    assert out.strip() == 'Own(lam=0.1)'

class Scaled(nn.Module):
    def __init__(self, by=1., act=nn.ReLU):
        super().__init__()
        torch.manual_seed(0)
        self.by, self.body, self.act, self.head = by, nn.Linear(64, 8), act(), nn.Linear(8, 10)
    def forward(self, x):
        z = self.act(self.body(x.flatten(1)))*self.by
        return z, self.head(z)

def smoothed(logits, y, by=.1): return torch.nn.functional.cross_entropy(logits, y, label_smoothing=by)

def an(base, signature, answer, name='__call__'):
    "An object of a class of the user's with one function."
    space = dict(base=base, cross_entropy=cross_entropy, torch=torch)
    exec(f'class Mine(base):\n    def {name}(self, {signature}): return {answer}\n', space)
    return space['Mine']()

class Doubled(Optimizer):
    by: object = None
    def begin(self, local, params, *clients): return {}
    def step(self, local, params, state, grads):
        for k, v in params.items(): v.sub_(self.by.of(grads[k]), alpha=local.lr)

MOVED = [torch.arange(0, 50), torch.arange(50, 60), torch.arange(60, 80), torch.arange(80, 100)]
BOUNDS = [torch.arange(0, 10), torch.arange(10, 60), *MOVED[2:]]

@pytest.mark.parametrize('first, then, said', [
    (dict(), dict(method=MOON()), 'MOON'),
    (dict(), dict(clients=iid(TASK.y_train, 4, seed=99)), 'another partition'),
    (dict(), dict(model=build('mlp', TASK, seed=5)), 'other first weights'),
    (dict(), dict(criterion=lambda logits, y: cross_entropy(logits, y)), 'another criterion'),
    (dict(), dict(task=replace(TASK, y_train=TASK.y_train.flip(0))), 'other labels'),
    (dict(), dict(task=replace(TASK, augment=(Crop(padding=2),))), 'another augmentation'),
    (dict(tests=MOVED), dict(tests=BOUNDS), 'other test samples of clients'),
    (dict(criterion=partial(smoothed, by=.1)), dict(criterion=partial(smoothed, by=.2)), 'another criterion'),
    (dict(criterion=nn.CrossEntropyLoss(label_smoothing=.1)), dict(criterion=nn.CrossEntropyLoss()),
     'another criterion'),
    (dict(criterion=lambda z, y: smoothed(z, y, .1)), dict(criterion=lambda z, y: smoothed(z, y, .2)),
     'another criterion'),
    (dict(model=Scaled()), dict(model=Scaled(2.)), 'another network'),
    (dict(model=Scaled()), dict(model=Scaled(act=nn.Tanh)), 'another network'),
    (dict(), dict(task=replace(TASK, x_train=torch.cat([TASK.x_train[:1], TASK.x_train[1:2].flip(-1),
                                                        TASK.x_train[2:]]))), 'other images'),
    (dict(), dict(task=replace(TASK, x_test=TASK.x_test.flip(0))), 'other test samples'),
    (dict(tests=TESTS), dict(tests=TESTS[::-1]), 'other test samples of clients'),
    (dict(method=one('loss', 'features', '.1*features.mean()')),
     dict(method=one('loss', 'features', '.2*features.mean()')), 'other code of the method'),
    (dict(method=FedAvg() + one('loss', 'params', 'sum(v.mean() for v in params.values())')),
     dict(method=FedAvg() + one('loss', 'params', 'sum(v.sum() for v in params.values())')),
     'other code of the method'),
    (dict(method=FedDF(steps=1), proxy=TASK.x_test[:20]), dict(method=FedDF(steps=1), proxy=TASK.x_test[20:40]),
     'other public samples'),
    (dict(metrics=dict(half=lambda z, y: z.mean()/2)), dict(metrics=dict(half=lambda z, y: z.mean()/3)),
     'another metric of the same name'),
    *[(dict(criterion=of('1.')), dict(criterion=of('3.')), 'another criterion')
      for of in (lambda by: an(object, 'logits, y', f'cross_entropy({by}*logits, y)'),
                 lambda by: partial(an(object, 'logits, y, s', f'cross_entropy({by}*s*logits, y)'), s=2.),
                 lambda by: an(object, 'logits, y', f'cross_entropy({by}*logits, y)', 'loss').loss)],
    (dict(task=replace(TASK, augment=(an(Crop, 'x, drawn', '1.*x'),))),
     dict(task=replace(TASK, augment=(an(Crop, 'x, drawn', '0.*x'),))), 'another augmentation'),
    (dict(metrics=dict(half=an(object, 'z, y', 'z.mean()/2'))),
     dict(metrics=dict(half=an(object, 'z, y', 'z.mean()/3'))), 'another metric of the same name'),
    (dict(participation=an(Participation, 'clients, round', '[0, 1]', 'draw')),
     dict(participation=an(Participation, 'clients, round', '[2, 3]', 'draw')), 'other code of who takes part'),
    *[(dict(local=of('.1')), dict(local=of('.2')), 'other code of a schedule')
      for of in (lambda lr: Local(epochs=1, lr=an(Schedule, 'round', lr)),
                 lambda by: Local(epochs=1, optimizer=Doubled(an(Value, 'v', f'{by}*v', 'of'))))]])
def test_resume_knows_what_a_run_was_given(tmp_path, first, then, said):
    go(**first, rounds=1, checkpoint=tmp_path/'run')
    with pytest.raises(ValueError, match=said) as e: go(**then, checkpoint=tmp_path/'run')
    assert 'remove' not in str(e.value)
    assert len(go(**first, rounds=2, checkpoint=tmp_path/'run').history) == 2

@pytest.mark.parametrize('lacks', ['without', 'labels', 'fingerprint'])
def test_a_checkpoint_of_an_older_version_goes_on(lacks, tmp_path):
    first, whole = go(rounds=1), go(rounds=2)
    known = first.settings.pop(lacks)
    if lacks == 'fingerprint': # another Python or another torch may say less, too
        few = 'partition', 'weights', 'labels', 'images', 'criterion'
        first.settings[lacks] = {k: v for k, v in known.items() if k in few}
    run = go(rounds=2, checkpoint=first.save(tmp_path/'run'))
    assert len(run.history) == 2 and all(torch.equal(v, run.state.params[k]) for k, v in whole.state.params.items())

# Networks

ELSEWHERE = """
import sys, torch
from fedlit.data import Task, load
from fedlit.methods import FedAvg
from fedlit.models import build
from fedlit.partition import iid
from fedlit.local import Local
from fedlit.run import federate
def go(path, rounds):
    task = load('digits')
    return federate(build('small_cnn', task, seed=0), task, iid(task.y_train, 3, seed=0), FedAvg(), rounds=rounds,
                    local=Local(epochs=1), device='cpu', progress=False, checkpoint=path)
if __name__ == '__main__': go(sys.argv[1], 1)
"""

@pytest.mark.parametrize('machine', [dict(OMP_NUM_THREADS='1'), dict(OMP_NUM_THREADS='3'),
                                     dict(ATEN_CPU_CAPABILITY='default')], ids=str)
def test_a_checkpoint_goes_on_on_another_machine(tmp_path, machine):
    "Numbers of threads and processors without AVX round otherwise, and it is the same run."
    subprocess.run([sys.executable, '-c', ELSEWHERE, str(tmp_path/'run')], env={**os.environ, **machine}, check=True)
    exec(ELSEWHERE, scope := dict(__name__='here'))
    assert scope['go'](tmp_path/'run', 2).history['round'].tolist() == [1, 2]

class Heads(nn.Module):
    def __init__(self, heads=2, act=torch.relu, power=1):
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(8, heads, batch_first=True), nn.Linear(64, 10)
        self.act, self.own = act, lambda x: self.act(x)**power
        self.register_buffer('mask', torch.full((8, 8), -torch.inf).triu(1))
    def forward(self, x):
        x = x.flatten(1).view(-1, 8, 8)
        z = self.own(self.body(x)).flatten(1)
        return z, self.head(z)
    def body(self, x): return self.mix(x, x, x, attn_mask=self.mask)[0]

class Other(Heads):
    def body(self, x): return torch.sin(super().body(x))

def masked(i, j):
    net = Heads()
    net.mask[i, j] = 0
    return net

@pytest.mark.parametrize('kw', [dict(heads=4), dict(act=torch.tanh), dict(power=2.)], ids=lambda kw: next(iter(kw)))
def test_networks_of_the_same_tensors_are_told_apart(kw):
    assert form_of(Heads()) == form_of(Heads()) != form_of(Heads(**kw)) and form_of(Heads()) != form_of(Other())

def test_a_mask_of_infinities_is_looked_at_entry_by_entry():
    a, b, c = (weight_of(net.mask) for net in (Heads(), masked(0, 3), masked(0, 4)))
    assert not (agree(a, b) or agree(b, c)) and agree(b, weight_of(masked(0, 3).mask))

def keyword(y, t, *, s=.1): return cross_entropy(y, t)*s
def keyword_other():
    def keyword(y, t, *, s=.3): return cross_entropy(y, t)*s
    return keyword

def test_defaults_of_keywords_are_part_of_a_criterion():
    assert describe(keyword, still=True) != describe(keyword_other(), still=True)

def test_numbers_of_numpy_are_numbers(tmp_path):
    local = Local(epochs=np.int64(1), batch_size=np.int64(64), lr=np.float32(.05))
    assert 'np.' not in repr(local)
    run = go(clients=CLIENTS, local=local, seed=np.int64(0), rounds=np.int64(1), participation=np.float32(1.),
             checkpoint=tmp_path/'run')
    assert Run.load(run.save(tmp_path/'done'), model=run.model).settings['seed'] == 0

# What a network answers in use

class Minus(Method):
    def predict(self, logits): return -logits

class Neighbour(Method):
    "A client answers as the nearest of its own samples does, in the features of the common network."
    def predict(self, logits, features, params, buffers, forward, data=None):
        if data is None: return logits
        x, y = data
        own = forward(params, buffers, x, train=False)[0]
        return logits.new_zeros(logits.shape).scatter_(1, y[torch.cdist(features, own).argmin(1)][:, None], 1.)

class Drawn(Method):
    def predict(self, logits, generator): return logits + torch.randn(logits.shape, generator=generator)

def test_what_a_network_answers_may_be_drawn():
    run = go(Drawn(), tests=TESTS)
    drawn = [run.logits(TASK.x_test, client=k) - go(FedAvg()).logits(TASK.x_test, client=k) for k in (None, 0, 1)]
    assert all(.5 < d.std() < 2 for d in drawn) and not torch.equal(drawn[1], drawn[2])
    assert torch.equal(run.logits(TASK.x_test, client=1), go(Drawn(), tests=TESTS).logits(TASK.x_test, client=1))

@pytest.mark.parametrize('wrong', [lambda v: v.argmax(1), lambda v: v[:, :3], lambda v: torch.cat([v, v], 1)])
def test_what_a_network_answers_has_the_shape_of_logits(wrong):
    class Answers(Method):
        def predict(self, logits): return wrong(logits)
    with pytest.raises(TypeError, match='predict returned a tensor of shape .* it must return logits'):
        go(Answers())

class Single(Method):
    "Brings tensors in single precision, as torch makes them, into a federation in double precision."
    def init(self, params):
        mine = torch.full((params['head.weight'].shape[1],), .3)
        return {**params, 'mine': mine}, dict(s=mine), dict(p=mine)
    def loss(self, features, params, client, server):
        return .01*(features - params['mine'] - client['p'] - server['s']).square().mean()

def test_what_a_method_brings_is_as_exact_as_the_network():
    import fedlit
    assert not {'runs', 'slope', 'types', 'finer'} & {*fedlit.check(Single()).broken}

@pytest.mark.parametrize('name', ['own.head', 'body', 'training'])
def test_a_name_that_the_network_has_for_something_else_is_named(name):
    class Brings(Method):
        def init(self, params): return {**params, name: params['head.bias'].clone()}, {}, {}
    with pytest.raises(TypeError, match=f"Net has no tensor '{name}': .* its `use` takes out"): go(Brings())

@pytest.mark.parametrize('home, said', [
    ("{'body.1.weight': trained['body.1.weight']}", 'body.1.weight for the clients, which does not stay with them'),
    ("{'head.wieght': trained['head.weight']}", 'head.wieght for the clients, which does not stay with them'),
    ("{'head.bias': trained['head.bias'].mean(0)}", r'head.bias of shape \(10,\) .* it must be \(4, 10\)')])
def test_merge_gives_back_to_clients_what_stays_with_them(home, said):
    with pytest.raises(TypeError, match='Mine.merge returned ' + said):
        go(one('merge', 'delta, server, trained', f'(delta, server, {home})', keep=('name', "name[:4] == 'head'")))

def test_deploy_may_leave_out_what_the_network_does_not_see():
    class Brings(Method):
        def init(self, params): return {**params, 'own.head.bias': params['head.bias'].clone()}, {}, {}
        def use(self, params): return {k: v for k, v in params.items() if not k.startswith('own.')}
    class Leaves(Brings):
        def deploy(self, params): return self.use(params)
    assert go(Leaves(), tests=TESTS).last['personal'] == go(Brings(), tests=TESTS).last['personal']

def test_what_differs_in_shape_by_client_is_named():
    class Sends(Method):
        def done(self, client, data): return client, dict(labels=data[1])
    said = r'`done` of Sends\(\): clients return uploads/Sends/labels of different shapes, \('
    with pytest.raises(TypeError, match=said): go(Sends())

@pytest.mark.parametrize('executor', ['loop', 'threads'])
@pytest.mark.parametrize('some', [0, 1])
def test_names_that_only_some_clients_send_are_named(executor, some):
    "Those that the first client lacked were lost in silence."
    first = max(range(4), key=lambda k: len(CLIENTS[k])) # it has the most steps, and is trained first
    class Sends(Method):
        def done(self, client, delta, number):
            return client, {'all': number, **({'some': number} if (int(number) == first) == bool(some) else {})}
    class SendsOfData(Sends):
        def done(self, client, delta, number, data): return super().done(client, delta, number)
    for method in Sends(), SendsOfData():
        with pytest.raises(TypeError, match='only some clients return uploads/Sends.*/some'):
            go(method, executor=executor, threads=2)

def test_a_memory_that_was_left_out_is_asked_for():
    class Forgets(Method):
        def init(self, params): return params, {}, dict(p=params['head.bias'])
        def begin(self, params, client): return params, {}
    with pytest.raises(TypeError, match='`init` made p; begin with `client`, the memory that it'): go(Forgets())

def test_training_does_not_hear_what_use_go():
    plain, minus = go(FedAvg()), go(Minus())
    for k, v in plain.state.params.items(): assert torch.equal(v, minus.state.params[k])
    assert torch.equal(minus.logits(TASK.x_test), -plain.logits(TASK.x_test))
    twice = go(Minus() + Minus())
    assert torch.equal(twice.logits(TASK.x_test), plain.logits(TASK.x_test)) # parts are asked in turn

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_a_client_asks_its_nearest_sample(executor):
    run = go(Neighbour(), executor=executor, tests=TESTS)
    z = lambda at: features_of(run.model, TASK.normalise(at))
    for k, (own, at) in enumerate(zip(CLIENTS, TESTS)):
        near = torch.cdist(z(TASK.x_test[at]), z(TASK.x_train[own])).argmin(1)
        assert torch.equal(run.predict(TASK.x_test[at], client=k), TASK.y_train[own][near])
    scored = run.per_client(TASK, TESTS, clients=CLIENTS)
    right = [(run.predict(TASK.x_test[at], client=k) == TASK.y_test[at]).float().mean() for k, at in enumerate(TESTS)]
    assert torch.allclose(torch.tensor(scored['personal']), torch.stack(right).double())
    assert abs(run.history['personal'].iloc[-1] - scored['personal'].mean()) < 1e-9
    assert run.history['accuracy'].iloc[-1] == go(FedAvg()).history['accuracy'].iloc[-1] # the server's

def test_a_network_by_itself_says_that_it_lacks_the_answer():
    with pytest.warns(UserWarning, match='answers otherwise than this network does by itself'): go(Minus()).network()

def test_the_nearest_prototype_decides():
    run = go(FedProto(rule='nearest'), tests=TESTS)
    means = run.state.server['FedProto']['means']
    for k in range(4):
        z = features_of(run.network(k), TASK.normalise(TASK.x_test))
        assert torch.equal(run.predict(TASK.x_test, client=k), torch.cdist(z, means).argmin(1))

class Weighs(Method):
    "Asks for no weights, and makes them of the steps."
    times: float = 1.
    def weigh(self, steps): return self.times*steps/steps.sum()

class Passes(Method):
    def combine(self, deltas, weights): return deltas, weights

@pytest.mark.parametrize('more', [FedAvg(), Passes()])
def test_weights_made_anew_stretch_a_step_and_no_statistics(more):
    one, two = (classify(Weighs(times) + more, model=classifier(norm=True)) for times in (1., 2.))
    first = dict(classifier(norm=True).named_parameters())
    assert gap(one.buffers, two.buffers) < 1e-12
    assert gap({k: v + 2*(one.params[k] - v) for k, v in first.items()}, two.params) < 1e-12
