"A way of running clients is taken only if one step of it does what the plain way does."
import copy, random, warnings
from dataclasses import replace
from functools import partial
import numpy as np, pytest, torch
from torch import nn
from fedlit.batches import CRITERIA
from fedlit.local import Adam, Local
from fedlit.data import Task, load
from fedlit.engine.inputs import check_extremes
from fedlit.method import Method
from fedlit.methods import FedAvg, FedExP, FedLC, FedProx, HeteroFL, MOON, StructuredDeCov
from fedlit.models import Net, build, freeze
from fedlit.run import federate, federating
from fedlit.state import start
from fedlit.cohort import Broadcast
from fedlit.round import EngineCohort
from fedlit.engine import trial
from fedlit.engine.trial import compare_ways, try_stack
from federation import Bag, difference

TASK = load('digits').subset(240, seed=0, test=60)
RAGGED = [torch.arange(0, 33), torch.arange(33, 60), torch.arange(60, 101), torch.arange(101, 118)]
LOCAL, PLAIN = Local(epochs=2, batch_size=8, lr=.05), FedAvg()

def around(middle):
    torch.manual_seed(0)
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), middle), nn.Linear(16, 10))

class Backward(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(16, 16)
        self.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else .1*g for g in gi))

class OnTensor(nn.Module):
    def forward(self, x):
        y = x*1.
        if y.requires_grad: y.register_hook(lambda g: .1*g)
        return y

class Gate(nn.Module):
    "Looks across the batch as soon as its gate opens; at the end of it or through its logits only by `weight`."
    def __init__(self, weight=10.):
        super().__init__()
        self.gate, self.weight = nn.Parameter(torch.zeros(1)), weight
    def forward(self, x): return x + self.weight*self.gate*(x - x.mean(0, keepdim=True))

class Weak(nn.Module):
    def forward(self, x): return x + 1e-4*x.mean(0)

class Stale(nn.Module):
    def forward(self, x):
        self.kept = x.tanh()
        return self.kept

class RowSum(nn.Module):
    "A linear map onto one number, by a weight of one dimension."
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((16,), .1))
    def forward(self, x): return x*nn.functional.linear(x, self.w)[:, None]

class CustomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*1.
    @staticmethod
    def backward(ctx, g): return g*0.1

class Custom(nn.Module):
    def forward(self, x): return CustomBackward.apply(x)

class Count(nn.Module):
    "Looks across the batch as soon as a buffer has left zero."
    def __init__(self):
        super().__init__()
        self.register_buffer('gate', torch.zeros(1))
    def forward(self, x):
        out = x + self.gate*(x - x.mean(0, keepdim=True))
        if self.training: self.gate = self.gate + .1
        return out

class Flagged(nn.Module):
    "Looks across the batch, and keeps booleans in a buffer."
    def __init__(self):
        super().__init__()
        self.register_buffer('on', torch.arange(16) > 3)
    def forward(self, x): return torch.where(self.on, x - x.mean(0), x)

def stopped(): return freeze(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)), but='1')
def stopped_across(): return freeze(nn.Sequential(nn.BatchNorm1d(16), Gate()), but='1')

class Noise(nn.Module):
    "Draws normal numbers, which PyTorch makes sixteen at a time, for vectors of another width."
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.near, self.far = nn.Linear(16, width), nn.Linear(width, 16)
    def forward(self, x):
        z = self.near(x)
        return self.far(z + torch.randn_like(z) if self.training else z)

MIDDLES = [Backward, OnTensor, Gate, Weak, Stale, RowSum, Custom, nn.Identity, lambda: nn.Dropout(.3), Count, Flagged,
           stopped_across, *(partial(Noise, width) for width in (4, 16, 20))]

@pytest.mark.parametrize('executor', ['auto', 'vmap'])
@pytest.mark.parametrize('middle', MIDDLES, ids=lambda m: getattr(m, '__name__', '?'))
def test_whatever_is_taken_does_what_the_loop_does(middle, executor):
    def go(executor):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return federate(around(middle()), TASK, RAGGED, FedAvg(), 3, LOCAL, progress=False, executor=executor,
                            device='cpu')
    assert difference(go('loop').state, go(executor).state) < 1e-5

def test_a_network_that_stacks_is_stacked_without_a_word():
    for middle in (nn.Identity, Gate, Stale, RowSum, Flagged, stopped):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            run = federate(around(middle()), TASK, RAGGED, FedAvg(), 1, LOCAL, progress=False, device='cpu')
        assert run.settings['executor'] == 'vmap'

class Masked(nn.Module):
    "Makes a mask in its first call, from a tensor that belongs to a stack, and keeps it."
    def forward(self, x):
        if not hasattr(self, 'mask'): self.mask = torch.tril(x.new_ones(16, 16))
        return x @ self.mask

@pytest.mark.parametrize('middle, criterion', [
    (Masked, None), (nn.Identity, nn.CrossEntropyLoss(weight=torch.arange(1., 11.), label_smoothing=.1))])
def test_a_stack_that_fails_in_its_second_step_is_not_taken(middle, criterion):
    with pytest.warns(UserWarning, match=r'cannot be stacked by vmap \(.*\); going on with executor=.loop'):
        run = federate(around(middle()), TASK, RAGGED, FedAvg(), 2, LOCAL, progress=False, criterion=criterion,
                       device='cpu')
    assert run.settings['executor'] == 'loop' and len(run.history) == 2

def test_a_criterion_with_weights_is_tried_as_precisely_as_the_network():
    "Before BatchNorm, the gradient of a bias is rounding alone, of which Adam makes whole steps."
    criterion, local = nn.CrossEntropyLoss(weight=torch.arange(1., 11.)), Local(1, 16, lr=.01, optimizer=Adam())
    net = around(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        run = federate(net, TASK, RAGGED, FedAvg(), 1, local, criterion=criterion, progress=False, device='cpu')
    assert run.settings['executor'] == 'vmap' and criterion.weight.dtype == torch.float32

def test_targets_of_floating_point_are_tried_as_precisely_as_samples():
    "In single precision the loss of several labels is 7e-8 off now and then."
    task = Task('several', TASK.x_train, torch.rand(240, 2) > .5, TASK.x_test, torch.rand(60, 2) > .5)
    for seed in range(40):
        net = build('mlp', task, seed=seed)
        sent = Broadcast(FedAvg(), net, start(FedAvg(), net, 4), LOCAL, criterion=CRITERIA['labels'])
        assert try_stack(sent, task.normalise(task.x_train[:8]), task.y_train[:8], EngineCohort) == ''

def test_a_step_of_known_code_is_tried_once(monkeypatch):
    "The next seed trains another network of the same form; a network of one's own is tried for itself."
    tried, plain = [], trial.trial_step
    monkeypatch.setattr(trial, 'trial_step', lambda *args: tried.append(1) or plain(*args))
    def trials(net, method=PLAIN, local=LOCAL):
        tried.clear()
        federate(net, TASK, RAGGED, method, 2, local, progress=False, device='cpu')
        return len(tried)
    mlp = partial(build, 'mlp', TASK, hidden=(7,))
    assert (trials(mlp(seed=0)), trials(mlp(seed=1)), trials(mlp(seed=2, norm='batch'))) == (2, 0, 2)
    first, again, other = trials(mlp(seed=1), MOON()), trials(mlp(seed=3), MOON()), trials(mlp(seed=3), MOON(mu=2.))
    assert first == other > again == 0
    assert trials(mlp(seed=1), local=replace(LOCAL, optimizer=Adam())) == 2
    assert [trials(around(Stale())) for _ in range(2)] == [2, 2]

def test_what_cannot_be_tried_does_not_pass_for_tried():
    assert 'division by zero' in compare_ways(lambda cast: 1/0, lambda cast: {})

def test_one_sentence_says_what_differs():
    sentence = r'cannot be stacked by vmap \(params/.* off\); going on with executor=.loop'
    with pytest.warns(UserWarning, match=sentence) as said:
        federate(around(OnTensor()), TASK, RAGGED, FedAvg(), 2, LOCAL, progress=False, device='cpu')
    assert len([w for w in said if 'stacked' in str(w.message)]) == 1

class GradientByWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g/g.shape[1]

class AlikeUntilItTrains(nn.Module):
    "What it computes does not depend on its width; its gradient does."
    def forward(self, x): return GradientByWidth.apply(x)

class ByWidth(nn.Module):
    def forward(self, x): return x/x.shape[1]

HALF = HeteroFL(rates=(1., .5))

@pytest.mark.parametrize('middle', [AlikeUntilItTrains, ByWidth])
def test_a_network_whose_half_is_another_network_is_masked(middle):
    plain = federate(around(middle()), TASK, RAGGED, HALF, 2, LOCAL, progress=False, executor='loop', device='cpu')
    with pytest.raises(ValueError, match=r"executor='extract' cannot cut Net to half of its width \(.* off\)"):
        federate(around(middle()), TASK, RAGGED, HALF, 2, LOCAL, progress=False, executor='extract', device='cpu')
    monkey = pytest.MonkeyPatch()
    with monkey.context() as m, pytest.warns(UserWarning, match='it is masked instead'):
        m.setattr('fedlit.run.choose_executor', lambda *_: 'extract') # as for larger networks
        run = federate(around(middle()), TASK, RAGGED, HALF, 2, LOCAL, progress=False, device='cpu')
    assert run.settings['executor'] == 'threads' and difference(plain.state, run.state) == 0

class ByEntry(Method):
    "Half of the features are half as many, and what is masked is zero."
    def loss(self, features): return features.square().mean()

class BySample(Method):
    def loss(self, features): return features.square().sum(1).mean()
    def done(self, client, delta): return client, dict(far=sum(v.square().sum() for v in delta.values()))

@pytest.mark.parametrize('part, executor', [(ByEntry(), 'threads'), (StructuredDeCov(groups=2), 'threads'),
                                            (BySample(), 'extract'), (FedExP(), 'extract')], ids=str)
def test_what_a_part_makes_of_half_of_the_features_is_tried_too(part, executor, monkeypatch):
    go = lambda executor: federate(around(nn.ReLU()), TASK, RAGGED, HALF + part, 2, LOCAL, progress=False,
                                   executor=executor, device='cpu')
    monkeypatch.setattr('fedlit.run.choose_executor', lambda *_: 'extract') # as for larger networks
    plain, run = go('loop'), go('auto')
    assert run.settings['executor'] == executor and difference(plain.state, run.state) < 1e-4
    if executor == 'threads':
        with pytest.raises(ValueError, match=f'half of its width .* off. with HeteroFL . {part.name}'): go('extract')

@pytest.mark.parametrize('middle', [nn.Identity, nn.ReLU, lambda: nn.BatchNorm1d(16)])
def test_a_network_that_can_be_cut_is_cut_without_a_word(middle):
    runs = []
    for executor in ('loop', 'extract'):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            runs.append(federate(around(middle()), TASK, RAGGED, HALF, 2, LOCAL, progress=False, executor=executor,
                                 device='cpu'))
    assert difference(*(r.state for r in runs)) < 1e-4 and runs[1].settings['executor'] == 'extract'

def bag(**kw):
    torch.manual_seed(0)
    return Bag(9, 4, **kw)

TOKENS = torch.randint(0, 9, (60, 5), generator=torch.Generator().manual_seed(0))
WORDS = Task('words', TOKENS, (TOKENS == 3).any(1).long(), TOKENS, (TOKENS == 3).any(1).long(), classes=2)
SITES = [torch.arange(0, 30), torch.arange(30, 47), torch.arange(47, 60)]

@pytest.mark.filterwarnings('ignore:clients with Bag cannot be stacked')
@pytest.mark.parametrize('kw', [dict(padding_idx=0), dict(padding_idx=8), dict(padding_idx=-2),
                                dict(scale_grad_by_freq=True), {}], ids=str)
@pytest.mark.parametrize('method', [FedAvg(), MOON(), FedLC()], ids=repr) # the last counts labels
def test_embeddings_of_every_kind(kw, method):
    runs = [federate(bag(**kw), WORDS, SITES, method, 2, Local(epochs=1, batch_size=10, lr=.5), executor=e,
                     progress=False, device='cpu') for e in ('loop', 'auto')]
    assert difference(*(r.state for r in runs)) < 1e-5
    if 'padding_idx' in kw:
        row = runs[1].model.e.weight[kw['padding_idx']]
        assert torch.equal(row, bag(**kw).e.weight[kw['padding_idx']])
        assert runs[1].settings['executor'] == 'vmap'

@pytest.mark.parametrize('token', [9, 100, -1])
@pytest.mark.parametrize('where', ['x_train', 'x_test', 'x_val'])
def test_a_token_beyond_the_vocabulary_is_named(token, where):
    x = TOKENS.clone()
    x[41, 3] = token
    each = {f'{k}_{part}': v for part in ('train', 'test', 'val') for k, v in dict(x=TOKENS, y=WORDS.y_train).items()}
    task = Task('words', classes=2, **{**each, where: x})
    for executor in ('auto', 'loop'):
        with pytest.raises(ValueError, match=f'sample 41 of {where} holds .*{token}.* which Bag cannot take'):
            federate(bag(), task, SITES, FedAvg(), 1, executor=executor, progress=False, device='cpu')

def test_a_token_beyond_the_vocabulary_in_the_first_sample_is_one_too():
    x = TOKENS.clone()
    x[0, 3] = 100
    task = Task('words', x, WORDS.y_train, TOKENS, WORDS.y_train, classes=2)
    with pytest.raises(ValueError, match='Bag cannot take .* they hold 0 to 100, and an Embedding takes 0 up to'):
        federate(bag(), task, SITES, FedAvg(), 1, progress=False, device='cpu')

def test_a_column_of_its_own_vocabulary():
    "Position by position: 7 is a word of the first column, and none of the second."
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(8, 2)
        def forward(self, x):
            z = torch.cat([self.one(x[:, 0]), self.two(x[:, 1])], 1)
            return z, self.head(z)
    x = torch.stack([torch.arange(60) % 9, torch.arange(60) % 5], 1)
    x[17, 1] = 7
    task = Task('columns', x, WORDS.y_train, x[:9], WORDS.y_train[:9], classes=2)
    with pytest.raises(ValueError, match='sample 17 of x_train'):
        federate(Columns(), task, SITES, FedAvg(), 1, progress=False, device='cpu')

def test_all_extremes_pass_the_network_together():
    calls, net = [], bag()
    net.register_forward_hook(lambda *_: calls.append(1))
    check_extremes(net, WORDS)
    assert len(calls) == 2 # the training and the test samples

class Noisy(nn.Module):
    "Has a buffer, and draws from all three generators."
    def __init__(self):
        super().__init__()
        self.register_buffer('steps', torch.zeros(()))
    def forward(self, x):
        if self.training: self.steps += 1
        return x + 0*torch.rand(()) + 0*random.random() + 0*np.random.rand()

@pytest.mark.filterwarnings('ignore:Net.s forward draws')
def test_the_trial_leaves_no_trace():
    net = around(Noisy())
    before = copy.deepcopy(net.state_dict())
    sent = Broadcast(FedProx(mu=.1), net, start(FedProx(mu=.1), net, 4), LOCAL)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), np.random.get_state()[2]
    x = TASK.normalise(TASK.x_train[:8])
    assert try_stack(sent, x, TASK.y_train[:8], EngineCohort) == ''
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all() and np.random.get_state()[2] == states[3]

def test_a_network_that_keeps_what_it_computed_can_be_followed_round_by_round():
    runs = list(federating(around(Stale()), TASK, RAGGED, FedAvg(), 3, LOCAL, progress=False, evaluate_every=2,
                           executor='vmap'))
    assert [r.state.round for r in runs] == [1, 2, 3]

def test_layers_that_insist_on_single_precision_are_tried_in_it():
    class Single(nn.Module):
        def forward(self, x): return x @ torch.eye(16)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        run = federate(around(Single()), TASK, RAGGED, FedAvg(), 1, LOCAL, progress=False, device='cpu')
    assert run.settings['executor'] == 'vmap'
