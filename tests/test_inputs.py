"What a user gives is right, or it is refused in one sentence that names the value and what would be right."
import dataclasses, json, math, warnings
import numpy as np, pandas as pd, pytest, torch
from functools import partial
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from fedlit import methods
from fedlit.engine.inputs import best_device
from fedlit.data import Flip, Task, load
from fedlit.local import Adam, Decay, Local, Rates
from fedlit.methods import FedAvg, FedBN, FedDecorr, HeteroFL, MOON
from fedlit.models import build, unwrap, wrap
from fedlit.parse import methods_by_name, method
from fedlit.participation import RoundRobin
from fedlit.partition import by_flower, dirichlet, iid
from fedlit.batches import PADDED, plan
from fedlit import compare as comparison, run as runs, scores
from fedlit.compare import compare
from fedlit.result import Run
from fedlit.run import federate
from fedlit.cli import main
from federation import Bag

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, 10, .5, seed=0)
QUICK = dict(rounds=1, local=Local(epochs=1), progress=False)

def go(method=None, task=TASK, clients=CLIENTS, net=None, **kw):
    return federate(build('mlp', task, seed=0) if net is None else net, task, clients, method or FedAvg(),
                    **{**QUICK, **kw})

def refused(*words):
    "One sentence with these words in it."
    return pytest.raises((ValueError, TypeError), match='.*'.join(words))

def table(n=400, d=6, classes=3, seed=0):
    "A table (n, d) whose classes lie apart."
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    return torch.randn(n, d, generator=g) + 2*torch.eye(classes, d)[y], y

def cut(x, y, **kw):
    n = len(x)*3//4
    return Task('mine', x[:n], y[:n], x[n:], y[n:], classes=int(max(y)) + 1, **kw)

# --- clients ------------------------------------------------------------------------------------------------

OWNER = torch.arange(len(TASK.y_train)) % 4

def same(a, b): return all(torch.equal(v, b.state.params[k]) for k, v in a.state.params.items())

@pytest.mark.parametrize('ask', [
    lambda k: OWNER == k,
    lambda k: (OWNER == k).numpy(),
    lambda k: (OWNER == k).tolist(),
    lambda k: pd.Series(OWNER.numpy() == k),
    lambda k: (OWNER == k).nonzero().flatten().tolist(),
    lambda k: np.flatnonzero(OWNER.numpy() == k).astype('uint16'),
    lambda k: pd.DataFrame(dict(o=OWNER.numpy())).query('o == @k').index,
    lambda k: (OWNER == k).nonzero().flatten().int(),
    lambda k: range(k, len(OWNER), 4)])
def test_masks_and_other_kinds_of_indices(ask):
    right = go(clients=[(OWNER == k).nonzero().flatten() for k in range(4)])
    run = go(clients=(asked := [ask(k) for k in range(4)]))
    assert (run.settings['sizes'] == right.settings['sizes'] and sum(run.settings['sizes']) == len(OWNER)
            and same(run, right))
    tests = [scores.tests_of(TASK, c, most=3) for c in (asked, [(OWNER == k).nonzero().flatten() for k in range(4)])]
    assert all(map(torch.equal, *tests))

def test_masks_are_test_sets_too():
    own = scores.tests_of(TASK, CLIENTS)
    masks = [torch.zeros(len(TASK.y_test), dtype=torch.bool).index_fill(0, t, True) for t in own]
    a, b = (go(FedBN(), tests=t, net=build('mlp', TASK, seed=0, norm='batch'))
            for t in ([t.unique() for t in own], masks))
    assert a.history.personal.tolist() == b.history.personal.tolist()

@pytest.mark.parametrize('clients,words', [
    (10, ['clients=10', r'dirichlet\(task.y_train, 10', 'iid']),
    ('dirichlet', ["clients='dirichlet'"]),
    (None, ['clients=None']),
    ({0: [1, 2]}, ['dict', r'list\(clients.values\(\)\)']),
    (OWNER, ['client 0 is one number', 'owner == k']),
    ([[0., 1.]], ['client 0', 'float', 'whole numbers']),
    ([[0, 1], [.5]], ['client 1', 'whole numbers']),
    ([torch.ones(5, dtype=torch.bool)], ['client 0', 'mask of 5', '1438']),
    ([[[0, 1]]], ['client 0', r'\(1, 2\)']),
    ([['a', 'b']], ['client 0']),
    ([[0, [1, 2]]], ['client 0']),
    ([[True, True, False]], ['mask of 3', '1438']),
    ([OWNER == 9], ['client 0 has no samples']),
    ([[0, 1438]], ['index 1438', '1438 samples']),
    ([[0, -1]], ['index -1']), ([[0, -7, 5]], ['client 0 has the index -7,']),
    ([], ['clients is empty'])])
def test_clients_that_are_none(clients, words):
    with refused(*words): go(clients=clients)

# --- kinds of data ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('as_x', [
    lambda x: x.numpy(), lambda x: x.tolist(), lambda x: list(x), lambda x: [v.numpy() for v in x]])
@pytest.mark.parametrize('as_y', [
    lambda y: y.numpy(), lambda y: y.tolist(), lambda y: pd.Series(y.numpy()), lambda y: y.int(),
    lambda y: y.numpy().astype('uint8'), lambda y: list(y)])
def test_what_people_have_becomes_tensors(as_x, as_y):
    t = Task('mine', *(f(v) for part in (TASK.subset(40, test=20),)
                       for v, f in ((part.x_train, as_x), (part.y_train, as_y),
                                    (part.x_test, as_x), (part.y_test, as_y))), classes=10)
    assert (torch.equal(t.x_train.float(), TASK.subset(40).x_train)
            and torch.equal(t.y_train, TASK.subset(40).y_train) and t.y_train.dtype == torch.int64)

def test_pandas():
    x, y = table()
    frame = pd.DataFrame(x.numpy(), columns=list('abcdef'), index=range(1000, 1400))
    t = cut(frame, pd.Series(y.numpy(), index=frame.index))
    assert torch.equal(t.x_train, x[:300]) and torch.equal(t.y_test, y[300:])
    flags = cut(pd.DataFrame(x.numpy() > 0), y)
    assert flags.x_train.dtype == torch.float32 and torch.equal(flags.x_train, (x[:300] > 0).float())
    mixed = cut(pd.DataFrame(dict(a=x[:, 0].numpy(), b=(x[:, 1] > 0).numpy(), c=y.numpy())), y)
    assert mixed.x_train.shape == (300, 3) and mixed.x_train.is_floating_point()
    with refused("x_train", "column 'town'", 'text'): cut(frame.assign(town='Bern'), y)
    gap = pd.Series([0, 1, None], dtype='Int64')
    with refused('y_train', 'missing'): Task('mine', x[:3], gap, x[:3], y[:3], classes=3)

def test_pictures(tmp_path):
    from PIL import Image
    from torchvision.datasets import ImageFolder
    rng = np.random.default_rng(0)
    shots = [Image.fromarray(rng.integers(256, size=(5, 4, 3), dtype='uint8')) for _ in range(4)]
    t, grey = (Task('mine', s, [0, 1, 0, 1], s, [0, 1, 0, 1], classes=2)
               for s in (shots, [s.convert('L') for s in shots]))
    assert t.x_train.shape == (4, 3, 5, 4) and grey.x_test.shape == (4, 1, 5, 4) and t.x_train.dtype == torch.uint8
    assert (t.x_train[0].permute(1, 2, 0).numpy() == np.array(shots[0])).all()
    with refused('x_train', 'sizes'):
        Task('mine', [shots[0], shots[1].resize((2, 2))], [0, 1], shots, [0, 1, 0, 1], classes=2)
    for i, s in enumerate(shots):
        (tmp_path/'ab'[i % 2]).mkdir(exist_ok=True)
        s.save(tmp_path/'ab'[i % 2]/f'{i}.png')
    folder = ImageFolder(tmp_path)
    with refused('x_train is a data set', 'ImageFolder', r'torch.stack', r'for _, y in data.*augment'):
        Task('mine', folder, folder.targets, folder, folder.targets, classes=2)
    with refused('DataLoader'):
        Task('mine', torch.utils.data.DataLoader(folder), folder.targets, t.x_test, t.y_test, classes=2)

class Column:
    "What Hugging Face's data sets return for a column: a sequence, and no list."
    def __init__(self, values): self.values = values
    def __len__(self): return len(self.values)
    def __getitem__(self, i): return self.values[i]

def test_columns():
    small = TASK.subset(12, test=10)
    t = Task('mine', Column(list(small.x_train)), Column(small.y_train.tolist()), small.x_test, Column(small.y_test),
             classes=10)
    assert torch.equal(t.x_train, small.x_train) and torch.equal(t.y_train, small.y_train)
    with refused('x_train', 'column', r"data\['image'\]"):
        Task('mine', Column([dict(image=1, label=0)]), [0], small.x_test, small.y_test, classes=10)

def test_an_array_is_not_copied(tmp_path):
    "What is larger than memory stays where it is."
    big = np.memmap(tmp_path/'x', dtype='uint8', mode='w+', shape=(8, 1, 4, 4))
    t = Task('mine', big, [0, 1]*4, big, [0, 1]*4, classes=2)
    big[3] = 7
    assert (t.x_train[3] == 7).all()
    read = np.memmap(tmp_path/'x', dtype='uint8', mode='r', shape=(8, 1, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert (Task('mine', read, [0, 1]*4, read, [0, 1]*4, classes=2).x_test[3] == 7).all()

# --- inputs that are no images ------------------------------------------------------------------------------

@pytest.mark.filterwarnings('ignore:.*hardly vary')
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_a_table(executor):
    x, y = table()
    task = cut(x, y)
    assert '6 float32' in repr(task)
    clients = dirichlet(task.y_train, 4, 1., seed=0)
    run = go(MOON(mu=.1) + FedDecorr(), task, clients, executor=executor, rounds=3)
    assert run.history.accuracy.iloc[-1] > .8
    flat = cut(x[..., None, None], y)                     # as it had to be written
    again = go(MOON(mu=.1) + FedDecorr(), flat, clients, executor=executor, rounds=3)
    assert same(run, again)

def test_a_table_is_normalised_by_column():
    x, y = table()
    x = 100*x + 50
    task = cut(x, y, mean=tuple(x[:300].mean(0).tolist()), std=tuple(x[:300].std(0).tolist()))
    z = task.normalise(task.x_train)
    assert torch.allclose(z.mean(0), torch.zeros(6), atol=1e-4) and torch.allclose(z.std(0), torch.ones(6), atol=1e-4)
    assert (task.normalise(task.x_train.view(2, 150, 6)).shape == (2, 150, 6)
            and task.subset(30).x_train.shape == (30, 6))
    assert go(task=task, clients=iid(task.y_train, 3), rounds=3).history.accuracy.iloc[-1] > .7

def tokens(n=200, length=7):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 20, (n, length), generator=g)
    x[:, 5:] = 0
    return x, (x == 3).any(1).long()

@pytest.mark.parametrize('kw', [dict(executor='threads'), dict(executor='vmap'), dict(executor='extract'),
                                dict(executor='loop', precision='bfloat16')])
def test_tokens(kw):
    x, y = tokens()
    task = cut(x, y)
    assert (torch.equal(task.normalise(x), x) and task.x_train.dtype == torch.int64
            and cut(x.int(), y).x_train.dtype == torch.int64)
    net = Bag()
    run, loop = (go(MOON(mu=.1), task, iid(task.y_train, 4), net, **QUICK | dict(rounds=2), **k)
                 for k in (kw, dict(executor='loop')))
    assert run.history.loss.iloc[-1] == pytest.approx(loop.history.loss.iloc[-1],
                                                      rel=.05 if 'precision' in kw else 1e-5)
    assert not torch.equal(run.state.params['head.weight'], dict(net.named_parameters())['head.weight'])

@pytest.mark.parametrize('shape', [(5, 4), (5,), (2, 3, 4, 2)])
def test_any_float_tensor(shape):
    x, y = table(120, int(np.prod(shape)))
    task = cut(x.view(-1, *shape), y)
    runs = [go(task=task, clients=iid(task.y_train, 3), executor=e) for e in ('loop', 'vmap')]
    assert (runs[0].history.loss.iloc[-1] == pytest.approx(runs[1].history.loss.iloc[-1], rel=1e-4)
            and 'x'.join(map(str, shape)) in repr(task))

@pytest.mark.parametrize('change,words', [
    (dict(x_train=torch.zeros(2)), [r'x_train has shape \(2,\)', r'x\[:, None\]']),
    (dict(x_train=torch.zeros(2, 8, 8)), [r'x_train .*\(8, 8\)', r'x_test .*\(1, 8, 8\)', r'must be \(N, C, H, W\)']),
    (dict(x_train=torch.zeros(2, 8, 8, dtype=torch.uint8)), ['bytes are images', r'\(N, C, H, W\)', r'\[:, None\]']),
    (dict(x_train=torch.zeros(2, 8, dtype=torch.uint8)), ['float', 'long']),
    (dict(x_train=torch.zeros(2, 32, 32, 3, dtype=torch.uint8)), [r'permute\(0, 3, 1, 2\)']),
    (dict(x_train=torch.zeros(2, 1, 8, 8, dtype=torch.complex64)), ['complex64']),
    (dict(x_train='images'), ['x_train is a str']),
    (dict(x_train=None), ['x_train is a NoneType']),
    (dict(x_train=[[1., 2.], [1.]]), ['x_train', 'lengths']),
    (dict(x_train=np.array(['a', 'b'])), ['x_train', 'text']),
    (dict(y_train=[.5, 1.5]), ['y_train', 'int64', 'classes=None makes a regression']),
    (dict(y_train=torch.zeros(2, 2)), ['y_train', "say target='labels'"]),
    (dict(y_train=torch.zeros(2, 1, dtype=torch.long)), [r'y_train .*\(2, 1\)', 'flatten']),
    (dict(y_train=['cat', 'dog']), ['y_train', 'text', 'numbers']),
    (dict(y_train=torch.tensor([0, 5])), ['label 5; with classes=2 labels must lie in 0..1']),
    (dict(y_test=torch.tensor([0, -1])), ['y_test holds the label -1']),
    (dict(y_train=torch.tensor([0, 1, 1])), ['2 samples but y_train has 3 labels']),
    (dict(y_train=np.array([0, 1], dtype=object)), ['numbers as Python objects']),
    (dict(domain_train=torch.tensor([0])), ['1 entries for 2 samples']),
    (dict(x_test=torch.zeros(2, 1, 8, 8, dtype=torch.int64)), ['uint8']),
    (dict(classes=2.5), ['classes=2.5']),
    (dict(classes='two'), ["classes='two'"]),
    (dict(classes=0), ['classes=0']),
    (dict(mean=(.5,)), ['mean', 'std=None belong together']),
    (dict(mean=(.5, .5), std=(1., 1.)), ['mean has 2 numbers', '1']),
    (dict(mean=(.5,), std=(0.,)), ['std', 'positive']),
    (dict(x_train=torch.zeros(2, 1, 8, 8, dtype=torch.uint8), mean=(120.,), std=(60.,)), ['mean', '255']),
    (dict(mean='a', std='b'), ["mean='a'"]),
    (dict(x_train=torch.zeros(2, 5), x_test=torch.zeros(2, 5), augment=(Flip(),)), [r'Flip\(p=0.5\)', 'images']),
    (dict(augment=Flip()), [r'augment=Flip\(p=0.5\)', 'tuple']),
    (dict(x_train=torch.ones(2, 5, dtype=torch.long), x_test=torch.ones(2, 5, dtype=torch.long),
          mean=(0.,), std=(1.,)), ['mean', 'tokens'])])
def test_a_task_that_cannot_be(change, words):
    x, y = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    with refused(*words): Task(**{**dict(name='mine', x_train=x, y_train=y, x_test=x, y_test=y, classes=2), **change})

@pytest.mark.parametrize('task', ['digits', None, torch.zeros(3), [1, 2]])
def test_what_is_no_task(task):
    with refused('task', r'Task', r"load\('digits'\)"): federate(build('mlp', TASK), task, CLIENTS, FedAvg(), **QUICK)

# --- a batch beyond the data --------------------------------------------------------------------------------

def test_a_batch_beyond_the_data_costs_a_full_batch():
    most = max(map(len, CLIENTS))
    index, _ = plan(CLIENTS, range(10), Local(epochs=2, batch_size=400_000))
    assert index.shape == (10, 2, max(PADDED, most))
    ask = lambda b, ex: go(local=Local(epochs=2, batch_size=b), executor=ex)
    assert same(ask(most, 'loop'), ask(400_000, 'loop'))
    a, b = (ask(n, 'vmap') for n in (most, 400_000))
    assert all(torch.allclose(v, b.state.params[k], atol=1e-6) for k, v in a.state.params.items())

def test_ordinary_batches_are_padded_as_they_were():
    small = [torch.arange(5), torch.arange(5, 12)]
    assert plan(small, [0, 1], Local(epochs=1, batch_size=32))[0].shape == (2, 1, 32)

def test_the_width_of_a_batch_does_not_depend_on_who_is_drawn():
    alone, both = (plan(CLIENTS, who, Local(epochs=1, batch_size=1000))[0] for who in ([0], [0, 3]))
    assert alone.shape[2] == both.shape[2]

# --- not a number -------------------------------------------------------------------------------------------

def spoiled(value=float('nan')):
    x = TASK.x_train.clone()
    x[CLIENTS[1][4], 0, 3, 5] = value
    return Task('mine', x, TASK.y_train, TASK.x_test, TASK.y_test, classes=10)

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_the_data_are_looked_at_before_the_learning_rate(value, executor):
    with pytest.raises(FloatingPointError) as e: go(task=spoiled(value), executor=executor)
    said = str(e.value)
    assert (f'sample {CLIENTS[1][4]} of x_train is {value} at [0, 3, 5]' in said and 'client 1' in said
            and 'lr' not in said and 'left finite' not in said)

def test_a_column_of_a_table_is_named():
    x, y = table()
    x[17, 4] = float('nan')
    with pytest.raises(FloatingPointError, match='sample 17 of x_train is nan in column 4'):
        go(task=(t := cut(x, y)), clients=iid(t.y_train, 3))

def test_nan_in_the_test_data_is_named():
    x = TASK.x_test.clone()
    x[3, 0, 1, 2] = float('nan')
    with pytest.warns(UserWarning, match=r'sample 3 of x_test is nan at \[0, 1, 2\]'):
        go(task=Task('mine', TASK.x_train, TASK.y_train, x, TASK.y_test, classes=10))

# --- networks -----------------------------------------------------------------------------------------------

class Plain(nn.Module):
    "A network of one's own, that answers as it is told."
    def __init__(self, answer=lambda z, l: (z, l), out=10):
        super().__init__()
        self.answer, self.a, self.fc = answer, nn.Linear(64, 32), nn.Linear(32, out)
    def forward(self, x):
        z = self.a(x.flatten(1)).relu()
        return self.answer(z, self.fc(z))

def frozen():
    net = build('mlp', TASK, seed=0)
    for p in net.parameters(): p.requires_grad_(False)
    return net

class Codebook(Plain):
    "It follows the features, which no gradient does, and calls itself a parameter."
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(32), requires_grad=False)
    def forward(self, x):
        z, logits = super().forward(x)
        if self.training: self.codes.lerp_(z.detach().mean(0), .5)
        return z - self.codes, logits

class Bounded(Plain):
    "Its weights are kept small by `bound`, which writes to them, in training or in evaluation."
    def __init__(self, bound, train=True):
        super().__init__()
        self.bound, self.when = bound, train
    def forward(self, x):
        if self.training == self.when: self.bound(self.a)
        return super().forward(x)

def ball(a): a.weight.data = a.weight.data.renorm(2, 0, .3)

class ActNorm(Plain):
    "It sets its bias in its first call."
    ready = False
    def forward(self, x):
        if not self.ready:
            with torch.no_grad(): self.a.bias.sub_(self.a(x.flatten(1)).mean(0))
            self.ready = True
        return super().forward(x)

@pytest.mark.parametrize('net,words', [
    (lambda: Bounded(lambda a: a.weight.data.clamp_(-9, 9)), ['a.weight of Bounded', 'but its forward writes to it']),
    (lambda: Bounded(lambda a: a.weight.data.renorm_(2, 0, 9.), train=False), ['a.weight of Bounded']),
    (lambda: Bounded(lambda a: torch.clamp(a.bias.data, max=9, out=a.bias.data)), ['a.bias of Bounded']),
    (lambda: Bounded(ball), ['a.weight of Bounded', 'parametrize']),
    (ActNorm, ['a.bias of ActNorm', 'only the first call writes']),
    (lambda: Plain(lambda z, l: (l, z)), [r'Plain returns \(2, 10\) and \(2, 32\).*other way round']),
    (lambda: Plain(lambda z, l: (z[:, :10], l), out=3), [r'Plain returns \(2, 10\) and \(2, 3\).*layer 10 outputs']),
    (lambda: Plain(out=7), ['Plain', '7 logits', '10 classes']),
    (lambda: Plain(out=12), ['Plain', '12 logits', '10 classes']),
    (lambda: Plain().double(), ['Plain', 'float64', r'\.float\(\)']),
    (lambda: Plain().half(), ['Plain', 'float16', r'\.float\(\)']),
    (lambda: Plain().bfloat16(), ['bfloat16', r'\.float\(\)']),
    (frozen, ['no parameter of Net', 'requires_grad']),
    (Codebook, ['codes of Codebook', 'without gradient', 'register_buffer']),
    (lambda: Plain(lambda z, l: l), [r'\(features, logits\)']),
    (lambda: Plain(lambda z, l: (z, l, z)), [r'\(features, logits\)']),
    (lambda: Plain(lambda z, l: [z, l]), [r'\(features, logits\)']),
    (lambda: Plain(lambda z, l: (z, l[:1])), ['2 samples', '1 row']),
    (lambda: Plain(lambda z, l: (z, l.argmax(1))), ['Plain', r'\(2,\)', '10 classes']),
    (lambda: Plain(lambda z, l: (z, None)), ['NoneType']),
    (lambda: build('mlp', cut(*table())), ['Net', r'\(1, 8, 8\)', 'cannot']),
    (lambda: Bag(classes=10), ['Bag', 'float32', 'Embedding']),
    (lambda: 'mlp', ["'mlp'", 'build']),
    (lambda: nn.Identity(), ['no parameter of Identity|must return'])])
def test_a_network_that_does_not_fit(net, words):
    with refused(*words): go(net=net())

@pytest.mark.parametrize('bound', [weight_norm, spectral_norm, orthogonal])
def test_weights_bounded_by_parametrization_are_no_writes(bound):
    net = Plain()
    bound(net.a)
    assert len(go(net=net, executor='loop').history) == 1

def test_a_table_with_a_largest_norm_writes_to_itself():
    x, y = tokens()
    (net := Bag()).e.max_norm = 1.
    with refused('e.weight of Bag is a parameter'): go(task=(t := cut(x, y)), clients=iid(t.y_train, 2), net=net)

def test_a_network_for_tables_is_given_tokens():
    x, y = tokens()
    with refused('Net', 'int64', 'tokens', r'\.float\(\)'): go(task=(t := cut(x, y)), clients=iid(t.y_train, 2))

def test_a_network_in_double_that_knows_what_it_wants_is_left_alone():
    class Own(Plain):
        def forward(self, x): return super().forward(x.double())
    assert go(net=Own().double()).history.accuracy.iloc[-1] > .2

def test_the_trial_changes_nothing():
    net = build('mlp', TASK, seed=0, norm='batch').train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(3)
    go(net=net)
    a = torch.rand(1)
    torch.manual_seed(3)
    assert a == torch.rand(1) and net.training and all(torch.equal(v, before[k]) for k, v in net.state_dict().items())

# --- runs ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kw,words', [
    (dict(rounds=2.5), ['rounds=2.5', 'whole number']),
    (dict(rounds='3'), ["rounds='3'", 'whole number']),
    (dict(rounds=0), ['rounds=0', 'at least 1']),
    (dict(rounds=True), ['rounds=True']),
    (dict(evaluate_every=0), ['evaluate_every=0', 'at least 1']),
    (dict(evaluate_every=None), ['evaluate_every=None']),
    (dict(seed=-1), ['seed=-1', 'at least 0']),
    (dict(seed=None), ['seed=None']),
    (dict(seed=1.5), ['seed=1.5']),
    (dict(minutes=-1, checkpoint='x'), ['minutes=-1', 'at least 0']),
    (dict(participation='all'), ["participation='all'"]),
    (dict(executor='gpu'), ["executor='gpu'", 'auto', 'torchrun']),
    (dict(device='tpu'), ["device='tpu'", 'there is cpu']),
    (dict(device='cuda:99'), ["device='cuda:99'", 'there is cpu']),
    (dict(local=dict(lr=1)), ['local=', r'Local\(']),
    (dict(local=lambda r: r), ['local=', r'Local\(']),
    (dict(progress=1), ['progress=1', 'True or False']),
    (dict(keep_locals='no'), ["keep_locals='no'", 'True or False']),
    (dict(channels_last='auto'), ["channels_last='auto'", 'True or False']),
    (dict(checkpoint=3), ['checkpoint=3', 'name of a file']),
    (dict(chunk=0), ['chunk=0']),
    (dict(record=1), ['record=1 ']),
    (dict(record='yes'), ["record='yes'"]),
    (dict(record='graph', device='cpu'), ["record='graph'"]),
    (dict(participation=0.), ['participation=0']),
    (dict(participation=2.), ['participation=2']),
    (dict(participation=math.nan), ['participation=nan']),
    (dict(threads=0), ['threads=0, but it must be a whole number from 1']),
    (dict(precision='half'), ["precision='half'"]),
    (dict(statistics='mine'), ["statistics='mine'"]),
    (dict(weighting='mine'), ["weighting='mine'"]),
    (dict(bad_clients='hide'), ["bad_clients='hide'"]),
    (dict(without=(99,)), ['without=.99,.']),
    (dict(method='FedAvg()'), ['not a method']),
    (dict(evaluate_every=1.5), ['evaluate_every=1.5']),
    (dict(tests=3), ['tests']),
    (dict(tests=[[0]]*9 + [[9999]]), [r'tests\[9\]', '9999', '359 samples'])])
def test_requests_that_are_no_numbers(kw, words):
    with refused(*words): go(**kw)

@pytest.mark.parametrize('make,words', [
    (lambda: methods.FedProx(mu='a'), ['FedProx', "mu='a'", 'number']),
    (lambda: MOON(mu=None), ['MOON', 'mu=None', 'number']),
    (lambda: MOON('x'), ["mu='x'"]),
    (lambda: methods.HeteroFL(rates=[1., .5]), ['HeteroFL', r'rates=\(1.0, 0.5\)']),
    (lambda: methods.HeteroFL(rates=np.array([1., .5])), ['HeteroFL', 'is an array', r'rates=\(1.0, 0.5\)']),
    (lambda: methods.HeteroFL(rates=np.array(.5)), ['HeteroFL', 'is an array', r'rates=\(0.5,\)']),
    (lambda: methods.HeteroFL(rates=np.array([[1., .5]])), ['HeteroFL', r'rates=\(\(1.0, 0.5\),\)']),
    (lambda: methods.FedProx(mu=np.array([.1, .2])), ['FedProx', 'must be a number']),
    (lambda: methods.FedProx(mu=torch.ones(2)), ['FedProx', 'must be a number']),
    (lambda: wrap(5, 'fc'), ['5 is a int', 'torch.nn.Module']),
    (lambda: unwrap(build('mlp', TASK)), ['was not made by wrap']),
    (lambda: by_flower(None, [0, 1]), ['partitioner=None', 'flwr_datasets']),
    (lambda: methods.FedDecomp(rank=2.5), ['rank=2.5', 'whole number']),
    (lambda: methods.APFL(learn='no'), ["APFL: learn='no', but it must be True or False"]),
    (lambda: methods.Krum(np.float64(1.5)), [r'attackers=.*1.5', 'whole number']),
    (lambda: methods.Krum(torch.tensor(1.5)), ['attackers=1.5', 'whole number']),
    (lambda: methods.FedProx(mu=math.inf), ['FedProx: mu=inf', 'finite']),
    (lambda: methods.HeteroFL(rates=(math.nan, .5)), [r'rates=\(nan, 0.5\)']),
    (lambda: Adam(eps=math.inf), ['Adam: eps=inf', 'positive'])])
def test_hyper_parameters_that_are_none(make, words):
    with refused(*words): make()

PLAIN = [m for m in (c() for c in methods_by_name().values()) if dataclasses.fields(m)]

@pytest.mark.parametrize('method', PLAIN, ids=lambda m: m.name)
def test_no_hyper_parameter_is_nan_or_infinite_unless_it_says_so(method):
    for f in dataclasses.fields(method):
        if not isinstance(v := getattr(method, f.name), float) and not (f.type is float and v is None): continue
        with pytest.raises(ValueError, match=f'{f.name}=nan'): dataclasses.replace(method, **{f.name: math.nan})
        if f.name in method.endless: dataclasses.replace(method, **{f.name: math.inf})
        else:
            with pytest.raises(ValueError, match=f'{f.name}=inf'): dataclasses.replace(method, **{f.name: math.inf})

@pytest.mark.parametrize('one,other', [
    (methods.HeteroFL(rates=(1, .5)), methods.HeteroFL(rates=(1., np.float32(.5)))),
    (methods.HeteroFL(rates=(1., .5), seed=3), method('HeteroFL(rates=[1.0, 0.5], seed=3)')),
    (methods.HeteroFL(seed=np.int64(3)), methods.HeteroFL(seed=3)),
    (methods.FjORD(widths=(1,)), methods.FjORD(widths=(1.,))), (MOON(1), MOON(1.)),
    (MOON(mu=torch.tensor(1)), MOON(mu=np.int64(1))), (methods.Krum(np.float64(1)), methods.Krum(1.)),
    (methods.Krum(1.), methods.Krum(1)), (Local(lr=1), Local(lr=1.)), (Local(epochs=2.), Local(epochs=2)),
    (Rates((1, .5)), Rates((1., .5))), (Decay(1, np.float64(.5)), Decay(1., .5)), (Adam((0, .9)), Adam((0., .9)))],
    ids=repr)
def test_a_number_is_one_however_it_is_written(one, other):
    assert one == other and repr(one) == repr(other) and hash(one) == hash(other)

def test_a_checkpoint_knows_its_method_however_it_was_written(tmp_path, monkeypatch):
    kw = dict(clients=[[*range(20)], [*range(20, 40)]], checkpoint=tmp_path/'run')
    go(method=methods.HeteroFL(rates=(1, .5)), rounds=1, **kw)
    assert len(go(method=methods.HeteroFL(rates=(1., .5)), rounds=2, **kw).history) == 2
    text = methods.HeteroFL.__repr__ # as it was printed before
    with monkeypatch.context() as m:
        m.setattr(methods.HeteroFL, '__repr__', lambda self: text(self).replace('1.0', '1'))
        go(method=methods.HeteroFL(rates=(1, .5)), rounds=3, **kw)
    assert len(go(method=methods.HeteroFL(rates=(1., .5)), rounds=4, **kw).history) == 4
    assert Run.load(tmp_path/'run', method=methods.HeteroFL(rates=(1., .5))).state.round == 4

def test_batchnorm_is_named():
    net = lambda: build('mlp', TASK, seed=0, norm='batch')
    with refused('client 0 has too few samples, 1,', 'BatchNorm', '2'): go(net=net(), clients=[[3], [4, 5, 6]])
    with refused('batch_size=1', 'BatchNorm', 'batch_size=2'): go(net=net(), local=Local(epochs=1, batch_size=1))

@pytest.mark.parametrize('net, local, said', [
    (None, Local(epochs=1, batch_size=4, drop_last=True), 'none of its batches is used'),
    (build('mlp', TASK, seed=0, norm='batch'), Local(epochs=1, batch_size=4), 'BatchNorm, which needs 2')])
def test_a_client_without_a_batch_is_refused_before_its_turn(net, local, said):
    how = dict(clients=[[*range(8)], [*range(8, 16)], [16]], local=local, participation=RoundRobin(.3), rounds=1)
    with refused('client 2 has too few samples, 1,', said): go(net=net, **how)
    assert len(go(net=net, without=2, **how).history) == 1

def test_a_checkpoint_that_cannot_be_written(tmp_path):
    (tmp_path/'folder').mkdir()
    (tmp_path/'file').write_text('', encoding='utf-8')
    with refused('folder', 'is a folder; name a file'): go(checkpoint=tmp_path/'folder')
    with refused('cannot be written, as', 'file is a file; name a folder'): go(checkpoint=tmp_path/'file'/'x')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'folder']

def test_names_match_without_case_and_dashes():
    assert {load(name).name for name in ('DIGITS', 'digits-domains', 'Digits Domains')} == {'digits', 'digits_domains'}
    assert method('Moon(mu=2) + feddecorr()') == MOON(mu=2) + FedDecorr() and method('solo()') == methods.SOLO()
    assert build('MLP', TASK).spec['name'] == 'mlp' and build('Small-CNN', TASK).spec['name'] == 'small_cnn'
    with refused('no model', 'resnet'): build('resnet99', TASK)
    with pytest.raises(FileNotFoundError, match='--root FOLDER --download'): load('CIFAR-10', root='/nowhere')

def test_ctrl_c_keeps_what_was_finished(monkeypatch):
    whole = go(rounds=3)
    real = runs.Simulation.score_round
    def tested(self, history, *args):
        if len(history) == 2: raise KeyboardInterrupt
        return real(self, history, *args)
    monkeypatch.setattr(runs.Simulation, 'score_round', tested)
    with pytest.raises(KeyboardInterrupt, match='after round 2 of 3') as e: go(rounds=3)
    run = e.value.run
    assert (run.history.accuracy.tolist() == whole.history.accuracy[:2].tolist() and run.state.round == 2
            and run.model(TASK.x_test)[1].shape == (359, 10))
    monkeypatch.setattr(runs.Simulation, 'score_round', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt, match='nothing is finished'): go()

def test_compare_goes_on(tmp_path, monkeypatch):
    ask = lambda: compare([FedAvg(), MOON(mu=1.)], rounds=2, local=Local(epochs=1), seeds=(0, 1),
                          folder=tmp_path/'c')
    first, real = ask(), runs.Simulation.judge
    assert len(list((tmp_path/'c').glob('*.safetensors'))) == 4
    next((tmp_path/'c').glob('MOON*seed1.safetensors')).unlink()
    next((tmp_path/'c').glob('MOON*seed1.safetensors.last')).unlink()
    trained = []
    def judge(self, *args):
        trained.append((self.federation.method.name, self.federation.seed))
        return real(self, *args)
    monkeypatch.setattr(runs.Simulation, 'judge', judge)
    assert ask().equals(first) and set(trained) == {('MOON', 1)}
    assert compare([FedAvg(), MOON(mu=1.)], rounds=2, local=Local(epochs=1), seeds=(0, 1)).equals(first)

# --- the command line ---------------------------------------------------------------------------------------

def cli(*words):
    main([str(w) for w in words])

FAST = 'run', '--quiet', '--rounds', 1, '--epochs', 1

def test_version(capsys):
    import fedlit
    with pytest.raises(SystemExit) as e: cli('--version')
    assert e.value.code == 0 and capsys.readouterr().out == f'fedlit {fedlit.__version__}\n'

@pytest.mark.parametrize('words', [
    ['--alpha', .1, '--seed', 3, '--option', 'hidden=(16,)', 'features=8', '--method', 'moon(mu=2)'],
    ['--partition', 'shards', '--classes', 3, '--train-samples', 300]], ids=['moon', 'shards'])
def test_a_run_is_repeated_from_its_file(words, tmp_path):
    a, b, c = (tmp_path/f'{n}.json' for n in 'abc')
    cli(*FAST, *words, '--json', a)
    cli('run', '--quiet', '--from', a, '--json', b)
    cli('run', '--quiet', '--from', a, '--json', c, '--partition', 'iid')
    one, two, three = (json.loads(f.read_text(encoding='utf-8')) for f in (a, b, c))
    said = [one['settings'][k] for k in ('setting', 'asked')]
    assert {k: said[0][k] for k in ('partition', 'seed')} == dict(
        partition='dirichlet(alpha=0.1)' if '--alpha' in words else 'shards(shards_per_client=3)',
        seed=3 if '--seed' in words else 0)
    clock = ('seconds', 'peak_mb')
    same = lambda r: [{k: v for k, v in row.items() if k not in clock} for row in r['history']]
    assert [two['settings'][k] for k in ('setting', 'asked')] == said
    assert same(one) == same(two) and same(three) != same(one)

def test_ctrl_c_says_what_is_true(monkeypatch, tmp_path):
    keep, judge, left = ('--checkpoint', tmp_path/'c.st'), runs.Simulation.judge, iter(())
    def pressed(*args):
        if next(left, None) is None: raise KeyboardInterrupt
        return judge(*args)
    monkeypatch.setattr(runs.Simulation, 'judge', pressed)
    with pytest.raises(SystemExit, match='nothing is kept without --checkpoint'): cli(*FAST)
    with pytest.raises(SystemExit, match='in the first round; nothing is kept'): cli(*FAST, *keep)
    left = iter(range(1))
    with pytest.raises(SystemExit, match='c.st.*goes on'): cli(*FAST, '--rounds', 2, *keep)
    with pytest.raises(SystemExit, match='nothing is kept without --out'): cli('compare', *FAST[1:])
    with pytest.raises(SystemExit, match='in the first round; nothing is kept'):
        cli('compare', *FAST[1:], '--out', tmp_path/'there')

def test_ctrl_c_prints_the_methods_that_are_finished(monkeypatch, capsys):
    together, left = comparison.run_together, iter(range(1))
    def pressed(*args, **kw):
        if next(left, None) is None: raise KeyboardInterrupt
        return together(*args, **kw)
    monkeypatch.setattr(comparison, 'run_together', pressed)
    with pytest.raises(SystemExit, match='nothing but this table is kept without --out'):
        cli('compare', *FAST[1:], '--methods', 'FedAvg()', 'FedProx(mu=0.1)', '--seeds', 1)
    said = capsys.readouterr().out
    assert 'FedAvg()' in said and 's a round' in said and 'FedProx' not in said

def test_compare_on_the_command_line(tmp_path, capsys, monkeypatch):
    words = ('compare', *FAST[1:], '--methods', 'FedAvg()', '--seeds', 0, 1,
             '--out', tmp_path/'c', '--json', tmp_path/'t.json')
    cli(*words)
    assert '\nFedAvg() ' in (out := capsys.readouterr().out) and '±' in out # text begins at the left
    t = json.loads((tmp_path/'t.json').read_text(encoding='utf-8'))
    assert t['asked']['setting']['partition'] == 'dirichlet(alpha=0.5)' and t['asked']['seeds'] == [0, 1]
    assert ([r['seed'] for r in t['runs']] == [0, 1] and t['table'][0]['method'] == 'FedAvg()')
    monkeypatch.setattr(runs.Simulation, 'train', lambda *a: pytest.fail('it trains'))
    cli(*words)

@pytest.mark.parametrize('cuda,apple,best', [(True, True, 'cuda'), (False, True, 'mps'), (False, False, 'cpu')])
def test_auto_is_the_best_device_there_is(monkeypatch, cuda, apple, best):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: apple)
    assert best_device() == best

class Reshaping(nn.Module):
    "Writes down a width of its own."
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
    def forward(self, x):
        z = self.body(x.flatten(1)).relu().view(-1, 16)
        return z, self.head(z)

def spectral():
    net = Reshaping()
    net.body = nn.utils.parametrizations.spectral_norm(net.body)
    return net

@pytest.mark.parametrize('make', [Reshaping, spectral])
def test_a_network_that_cannot_be_cut_is_refused_by_name(make):
    task = load('digits').subset(40, test=10)
    run = partial(federate, make(), task, [range(20), range(20, 40)], HeteroFL(rates=(1., .5)), rounds=1,
                  progress=False)
    with pytest.raises(ValueError, match=f"executor='extract' cannot cut {make().__class__.__name__} to half"):
        run(executor='extract')
    assert len(run(executor='threads').history) == 1 # which masks
