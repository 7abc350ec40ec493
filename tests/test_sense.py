"What cannot be meant is refused before the first round, and what is probably not meant gets a warning."
import random
import numpy as np, pytest, torch, torch.nn.functional as F, warnings
from dataclasses import replace
from torch import nn
from fedlit.data import Task, load
from fedlit.method import Method
from fedlit.methods import (
    DPSGD, FIARSE, MOON, SCAFFOLD, SOLO, CoordinateMedian, DeCov, ExactDecorr, FedAMP, FedAvg, FedAvgM, FedBABU, FedBN,
    FedDecorr, FedDF, FedDSE, FedGSE, FedPer, FedProto, FedRep, FedRoD, FFALoRA, HeteroFL, LGFedAvg, OwnLabels,
    Quantize, StructuredDeCov, TopK)
from fedlit import models
from fedlit.models import build, freeze
from fedlit.partition import iid
from fedlit.local import Local
from fedlit.run import Federation, Simulation, federate
from fedlit.state import start

TASK = load('digits').subset(120, seed=0, test=40)
CLIENTS = iid(TASK.y_train, 2)

def go(method=None, net=None, rounds=1, **kw):
    return federate(net or build('mlp', TASK, seed=0), TASK, CLIENTS, method or FedAvg(), rounds,
                    Local(epochs=1, lr=.01), progress=False, **kw)

class Net(nn.Module):
    "A convolution and a head; `out` makes of its maps and logits what it returns."
    def __init__(self, out):
        super().__init__()
        torch.manual_seed(0)
        self.out, self.c, self.head = out, nn.Conv2d(1, 4, 3), nn.Linear(144, 10)
    def forward(self, x):
        z = self.c(x)
        return self.out(z, self.head(z.flatten(1)))

maps = lambda z, l: (z, l)
flat = lambda z, l: (z.flatten(1), l)
detached = lambda z, l: (z.flatten(1).detach(), l)
twice = lambda z, l: (l, l)
softmax = lambda z, l: (z.flatten(1), l.softmax(1))
logsoftmax = lambda z, l: (z.flatten(1), l.log_softmax(1))

class Own(Method):
    def loss(self, features): return features.square().mean()

PENALTIES = [MOON(), FedDecorr(), DeCov(), ExactDecorr(), StructuredDeCov(), FedProto(), Own()]

@pytest.mark.parametrize('m', PENALTIES, ids=lambda m: m.name)
def test_features_that_are_maps_are_refused(m):
    with pytest.raises(ValueError, match=rf'{m.name}.*features \(N, d\).*Net.*\(16, 4, 6, 6\).*flatten'):
        go(m, Net(maps))
    with pytest.raises(ValueError, match='flatten'): go(FedAvgM() + m, Net(maps))
    go(m, Net(flat))

def untouched(m, net):
    "Does a part that works through the features leave this network to FedAvg?"
    a, b = go(m, net), go(FedAvg(), net)
    return all(torch.equal(v, b.state.params[k]) for k, v in a.state.params.items())

@pytest.mark.parametrize('m', PENALTIES, ids=lambda m: m.name)
def test_features_without_a_gradient_are_said(m):
    with pytest.warns(UserWarning, match=f'{m.name}.* works through the features.*Net carry no gradient') as said:
        assert untouched(m, Net(detached)) or isinstance(m, FedProto)
    assert len([w for w in said if 'carry no gradient' in str(w.message)]) == 1

def test_features_of_frozen_layers_are_said_where_something_works_through_them():
    net = Net(flat)
    net.c.requires_grad_(False)
    with pytest.warns(UserWarning, match='or all layers before them are frozen'): assert untouched(FedDecorr(), net)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        go(FedAvg(), net)
        go(FedRoD(), net) # has a head of its own, on features

def test_features_that_are_the_logits_get_a_warning():
    with pytest.warns(UserWarning, match='returns its logits as features too, so MOON.* works on the logits'):
        go(MOON(), Net(twice))

@pytest.mark.parametrize('out', [maps, detached, twice])
def test_methods_that_ask_for_no_features_take_any(out):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        go(FedAvg(), Net(out))

def test_what_finds_nothing_to_keep_is_refused():
    for net in (build('mlp', TASK, seed=0), build('small_cnn', TASK, seed=0, norm='group')):
        for m in (FedBN(), FedBN() + FedDecorr(), FedPer() + FedBN()):
            with pytest.raises(ValueError, match=r'FedBN\(\) finds nothing.*BatchNorm'): go(m, net)
    assert 'personal' in go(FedBN(), build('mlp', TASK, seed=0, norm='batch')).last

CUTTING = [HeteroFL(rates=(1., .5)), FedGSE(rates=(.5,)), FedDSE(rates=(.25,)) + MOON()]

def hidden(*norms):
    "A layer of eight channels for each norm, and a head."
    torch.manual_seed(0)
    layers = [v for n in norms for v in (nn.LazyLinear(8), n(8), nn.ReLU())]
    net = models.Net(nn.Sequential(nn.Flatten(), *layers), nn.LazyLinear(10))
    net(torch.zeros(2, 1, 8, 8))
    return net

@pytest.mark.parametrize('m', CUTTING, ids=repr)
def test_what_finds_nothing_to_cut_is_refused(m):
    proxy = TASK.normalise(TASK.x_train[:8])
    with pytest.raises(ValueError, match=r'finds no layer of Net to cut.*body\.2 is a norm across channels'):
        go(m, hidden(nn.LayerNorm), proxy=proxy)
    with pytest.raises(ValueError, match='finds no layer of Net to cut'): go(m, hidden(), proxy=proxy)
    with pytest.warns(UserWarning, match=r'finds only some layers of Net.*body\.5 is a norm'):
        go(m, hidden(nn.Identity, nn.LayerNorm, nn.Identity), proxy=proxy)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        go(m, hidden(nn.BatchNorm1d), proxy=proxy)

def test_a_whole_network_may_be_one_that_cannot_be_cut():
    net, whole = hidden(nn.LayerNorm), HeteroFL(rates=(1.,))
    runs = [go(m, net) for m in (FedAvg(), whole, whole + OwnLabels(), FIARSE(rates=(.5,)))]
    assert torch.equal(runs[0].state.params['body.1.weight'], runs[1].state.params['body.1.weight'])

# ---- the criterion ----

def swapped(y, logits): return F.cross_entropy(logits, y)

@pytest.mark.parametrize('f,word', [
    (nn.CrossEntropyLoss, r'CrossEntropyLoss is a class; make one of it, CrossEntropyLoss\(\)'),
    (nn.CrossEntropyLoss(reduction='none'), r"CrossEntropyLoss.* of shape \(16,\).*reduction='mean'"),
    (lambda l, y: F.cross_entropy(l, y)[None], r'of shape \(1,\), but it must return a tensor without dimensions'),
    (lambda l, y: F.cross_entropy(l, y).item(), 'returned a float, but'),
    (lambda l, y: F.cross_entropy(l.detach(), y), 'without a gradient'),
    (lambda l, y: F.cross_entropy(l, y)/0, 'returned inf'),
    (swapped, r'criterion swapped.*takes \(labels, logits\), but must take \(logits, labels\)'),
    (lambda l, y: F.cross_entropy(l, y, torch.ones(3)), 'criterion <lambda>, asked of .* failed: ')],
    ids='class none element item detached infinite swapped fails'.split())
@pytest.mark.parametrize('executor', ['auto', 'loop'])
def test_a_criterion_is_tried_before_the_first_round(f, word, executor):
    with pytest.raises((TypeError, ValueError), match=word): go(criterion=f, executor=executor)

def test_a_part_may_keep_what_another_part_adds():
    class KeepB(Method):
        def keep(self, name): return name.endswith('.B')
    run = go(FFALoRA(both=True) + KeepB())
    assert run.state.personal and all(k.endswith('.B') for k in run.state.personal)
    for m in KeepB(), KeepB() + FedPer(), FFALoRA(both=True) + FedBN():
        with pytest.raises(ValueError, match='finds nothing in'): go(m)

def test_trying_the_criterion_changes_nothing():
    class Counts:
        calls = 0
        def __call__(self, logits, y):
            self.calls += 1
            return F.cross_entropy(logits, y)*(1 + torch.rand(()))*random.random()*np.random.rand()
    before, f = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()), Counts()
    sim = Simulation(Federation(build('mlp', TASK, seed=0), TASK, CLIENTS, FedAvg(), criterion=f).resolve())
    first = {k: v.clone() for k, v in sim.model.state_dict().items()}
    sim.try_out()
    assert f.calls == 0 and random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all() and torch.equal(torch.get_rng_state(), before[2])
    assert all(torch.equal(v, first[k]) for k, v in sim.model.state_dict().items())

def of_shares(p, y): return F.nll_loss(p.log(), y)

@pytest.mark.parametrize('f', [None, nn.CrossEntropyLoss(label_smoothing=.1), F.cross_entropy, of_shares])
def test_a_network_that_ends_in_a_softmax_gets_a_warning(f):
    kw = {} if f is None else dict(criterion=f)
    with pytest.warns(UserWarning, match='Net seems to end in a softmax'): go(net=Net(softmax), **kw)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for net in (Net(flat), Net(logsoftmax)): go(net=net, **{} if f is of_shares else kw)
        go(net=Net(logsoftmax), criterion=nn.NLLLoss())

class Probe(nn.Module):
    "A head on a body that is used as it is."
    def __init__(self, still=torch.no_grad):
        super().__init__()
        self.still, self.body, self.norm, self.head = still, nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    def forward(self, x):
        with self.still(): z = self.body(x.flatten(1))
        return z, self.head(self.norm(z))

def test_weight_decay_of_what_has_no_gradient_is_said():
    "PyTorch's optimisers leave such parameters alone."
    net = Probe()
    def train(net, decay):
        local = Local(epochs=1, lr=.01, weight_decay=decay)
        return federate(net, TASK, CLIENTS, FedAvg(), 1, local, progress=False, executor='loop').state.params
    with pytest.warns(UserWarning, match='body.weight of Probe and 1 more have no gradient.*weight_decay=0.1'):
        assert not torch.equal(train(net, .1)['body.weight'], net.body.weight)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert torch.equal(train(net, 0.)['body.weight'], net.body.weight)
        train(Probe(torch.enable_grad), .1)
        net.body.requires_grad_(False)
        assert 'body.weight' not in train(net, .1)

# ---- hooks that look at numbers, under vmap ----

class Item(Method):
    def loss(self, features): return features.mean().item()*features.square().mean()
class Branch(Method):
    def loss(self, features): return features.square().mean() if features.mean() > 0 else 0*features.sum()
class Norm(Method):
    def grad(self, grads): return {k: v/max(1., float(v.norm())) for k, v in grads.items()}
class Start(Method):
    def begin(self, params, client): return {k: v if v.sum() > 0 else v for k, v in params.items()}, client
class Picked(Method):
    def loss(self, features): return features[features[:, 0] > 0].sum()
class Away(Method):
    def loss(self, features): return features.square().mean()*float(features.detach().numpy().sum() > 0)

def looks(logits, y): return F.cross_entropy(logits, y)*(1 if logits.sum().item() > 0 else 2)

@pytest.mark.parametrize('m,f', [(m, F.cross_entropy) for m in (Item(), Branch(), Norm(), Start(), Picked(), Away())]
                         + [(FedAvg(), looks)], ids=lambda v: getattr(v, 'name', ''))
def test_a_hook_that_looks_at_numbers_is_answered_with_the_loop(m, f):
    with pytest.warns(UserWarning, match="cannot be stacked by vmap .* executor='loop'"):
        run = go(m, criterion=f, executor='vmap')
    assert run.settings['executor'] == 'loop'

# ---- sentences in place of errors from inside ----

class Parts(nn.Module):
    "A head that is frozen, or shared with another layer."
    def __init__(self, tied):
        super().__init__()
        self.body, self.head, self.last = nn.Linear(64, 10), nn.Linear(10, 10), nn.Linear(10, 10)
        if tied: self.body = nn.Sequential(self.body, self.head)
        else: self.head.requires_grad_(False)
    def forward(self, x):
        z = self.head(self.body(x.flatten(1)).relu())
        return z, self.last(z)

@pytest.mark.parametrize('m', [FedPer(), FedRep(), LGFedAvg(), FedProto(), FedRoD()], ids=lambda m: m.name)
@pytest.mark.parametrize('tied', [False, True])
def test_a_head_that_is_there_and_not_trained(m, tied):
    with pytest.raises(ValueError, match='head is there, but its parameters are frozen, or shared with another layer'):
        go(m, Parts(tied))
    with pytest.raises(ValueError, match=r"head='nose' must name [^;]*$"): go(type(m)(head='nose'))

@pytest.mark.parametrize('m, said', [(FedPer(), "head='head' holds every parameter that is trained.* rest is frozen"),
                                     (FedBN(), 'FedBN wants BatchNorm that is not frozen')], ids=lambda v: str(v)[:6])
def test_a_network_that_is_frozen_but_for_its_head(m, said):
    with pytest.raises(ValueError, match=said): go(m, freeze(build('mlp', TASK, norm='batch', seed=0), but='head'))

class Tied(nn.Module):
    "A head whose weight is that of the embedding; `first` of the two has its name."
    def __init__(self, first):
        super().__init__()
        for k in sorted(('emb', 'head'), key=lambda k: k != first):
            setattr(self, k, nn.Embedding(17, 8) if k == 'emb' else nn.Linear(8, 17))
        self.head.weight = self.emb.weight = getattr(self, first).weight
    def forward(self, x): return (h := self.emb(x.flatten(1).long()).mean(1)), self.head(h)[:, :10]

@pytest.mark.parametrize('first', ['emb', 'head'])
@pytest.mark.parametrize('m', [FedPer(), FedRep(), LGFedAvg(), FedBABU(), FFALoRA(), None], ids=str)
def test_a_part_that_shares_a_weight_with_the_rest_is_refused(m, first):
    with pytest.raises(ValueError, match=r"(head=|but=\()'head'.* holds head.weight, .* same tensor as emb.weight"):
        start(m, Tied(first), 2) if m else freeze(Tied(first), but='head')
    if m is None: assert not any(p.requires_grad for p in freeze(Tied(first)).parameters())

@pytest.mark.parametrize('v', [dict(a=1), {1}, (dict(a=1),), bytearray(b'')], ids=repr)
def test_a_hyper_parameter_that_is_no_value(v):
    class Own(Method):
        table: tuple = None
    with pytest.raises(TypeError, match='Own: table=.* but a method is a value'): Own(table=v)

def test_a_subclass_that_sends_too_little():
    class Less(SCAFFOLD):
        def done(self, params, client): return client, {}
    with pytest.raises(KeyError, match="SCAFFOLD.merge looks for 'change', .*`done`, is empty"): go(Less())
    class Typo(Method):
        def done(self, client): return client, dict(one=torch.zeros(()))
        def merge(self, delta, server, uploads): return delta, server['memory']
    with pytest.raises(KeyError, match="Typo.merge looks for 'memory', .* is one"): go(Typo())

def test_a_memory_that_is_read_before_it_is_there():
    class Pull(Method):
        def loss(self, features, server): return (features - server['mean']).square().mean()
        def merge(self, delta, server): return delta, dict(mean=torch.zeros(()))
    with pytest.raises(KeyError, match="Pull.loss looks for 'mean', but its memory, `server`, is empty before"):
        go(Pull())
    class Heavy(Method):
        def grad(self, grads, client): return {k: v + client[k] for k, v in grads.items()}
    with pytest.raises(KeyError, match="Heavy.grad looks for .*, `client`, is empty .* from `init`"): go(Heavy())
    class Odd(Method):
        def init(self, params): return params, dict(mean=torch.zeros(())), {}
        def loss(self, features, server): return {}['other']
    with pytest.raises(KeyError, match="^'other'$"): go(Odd())

class Momentum(Method):
    "Forgets that tensors may stay at home."
    def init(self, params): return params, {k: torch.zeros_like(v) for k, v in params.items()}, {}
    def merge(self, delta, server, uploads): return delta, {k: .5*v + delta[k] for k, v in server.items()}

class Rescaled(Method):
    def send(self, delta, client, params): return {k: 2*delta[k] for k in params}, client

@pytest.mark.parametrize('m, name', [(Momentum(), 'Momentum.merge'), (Rescaled(), 'Rescaled.send')], ids=repr)
def test_a_tensor_that_stays_at_home_is_not_looked_for_elsewhere(m, name):
    with pytest.raises(KeyError) as e: go(m + FedPer())
    assert e.value.args[0] == (f"{name} looks for 'head.weight', but `delta` does not have it: "
                               "it stays at its client (see `kept`)")

def test_a_precision_that_the_network_cannot_be_computed_in():
    class Broken(Net): # as an LSTM in float16 on many CPUs
        def forward(self, x):
            z, out = super().forward(x)
            if out.dtype == torch.float16: raise RuntimeError('could not create a primitive')
            return z, out
    go(net=Broken(flat), precision='bfloat16', device='cpu')
    with pytest.raises(ValueError, match="^precision='float16', .* Broken .* on 'cpu' .could not create.*'bfloat16'"):
        go(net=Broken(flat), precision='float16', device='cpu')

@pytest.mark.filterwarnings('ignore:.*weight_norm')
@pytest.mark.parametrize('m', [FedAvg(), MOON() + FedDecorr()], ids=repr)
def test_a_network_with_exits_is_for_depthfl(m):
    with pytest.raises(ValueError, match=r'several exits .* \(2, 4, 10\), .* DepthFL is for'):
        go(m, build('exits_mlp', TASK, seed=0))

def test_a_network_that_cannot_be_copied():
    net = build('mlp', TASK, seed=0)
    net.head = nn.utils.weight_norm(net.head)
    with pytest.raises(ValueError, match='Net cannot be copied, .*parametrizations.weight_norm'): go(net=net)

def test_what_the_server_has_must_fit_the_network():
    for proxy in (torch.rand(9, 3, 8, 8), (torch.rand(9, 3, 8, 8), torch.zeros(9).long())):
        with pytest.raises(ValueError, match=r'^proxy: .* cannot take samples of float32 \(3, 8, 8\)'):
            go(FedDF(), proxy=proxy)

def test_test_samples_must_fit_the_network():
    with pytest.raises(ValueError, match=r'^x_test: Net cannot take .* \(1, 4, 8\): .*x_train are \(1, 8, 8\)'):
        federate(build('mlp', TASK), replace(TASK, x_test=TASK.x_test[:, :, :4]), CLIENTS, FedAvg(), progress=False)

class Public(Method):
    def loss(self, params, buffers, proxy, forward): return forward(params, buffers, proxy)[0].square().mean()

@pytest.mark.parametrize('proxy, said', [
    (None, 'proxy=None, but it must be unlabelled inputs'), ('x', 'proxy=x, but it must be'),
    ([[.5]*64]*4, r'proxy=\[\[0.5, 0.5.*, but it must be'), (np.ones((4, 1, 8, 8)), 'a tensor, .*task.normalise'),
    (torch.zeros(0, 1, 8, 8), r'size=\(0, 1, 8, 8\)\), but it must be'), ((), r'proxy=\(\), but'), (TASK, 'must be'),
    (torch.tensor([1., float('nan')]).repeat(3, 1, 8, 4), r'sample 0 of proxy is nan at \[0, 0, 1\]')])
def test_public_samples_that_are_none_are_refused_before_the_first_round(proxy, said):
    for method in (Public(), FedDF()):
        with pytest.raises(ValueError, match=said): go(method, proxy=proxy)

def test_a_method_that_can_do_without_public_samples():
    class Either(Method):
        def loss(self, features, proxy=None): return 0.*features.sum() if proxy is None else features.sum()
    go(Either())

class Tokens(torch.nn.Module):
    def __init__(self, sparse=False, recurrent=False):
        super().__init__()
        self.e = torch.nn.Embedding(9, 8, sparse=sparse)
        self.r = torch.nn.GRU(8, 8, batch_first=True) if recurrent else None
        self.head = torch.nn.Linear(8, 2)
    def forward(self, x):
        z = self.r(self.e(x))[0][:, -1] if self.r else self.e(x).mean(1)
        return z, self.head(z)

def test_layers_without_a_rule_are_named():
    x = torch.randint(0, 9, (60, 5), generator=torch.Generator().manual_seed(0))
    words = Task('words', x, (x == 3).any(1).long(), x[:20] + 0, (x[:20] == 3).any(1).long(), classes=2)
    run = lambda net, m: federate(net, words, [torch.arange(30), torch.arange(30, 60)], m, 1, progress=False)
    with pytest.raises(ValueError, match='e of Tokens has sparse gradients.*sparse=False'): run(Tokens(True), FedAvg())
    with pytest.raises(ValueError, match='no rule in r, a GRU'): run(Tokens(recurrent=True), DPSGD())

@pytest.mark.parametrize('home', [SOLO(), FedProto(), FedAMP()], ids=repr)
@pytest.mark.parametrize('part', [TopK(), Quantize(), CoordinateMedian()], ids=repr)
def test_a_change_of_what_nobody_sends_is_noticed(home, part):
    with pytest.warns(UserWarning, match=f"{part.name}.* changes what clients send, but here all"): go(home + part)
    with warnings.catch_warnings(record=True) as said: go(FedPer() + part)
    assert not [w for w in said if 'changes what clients send' in str(w.message)]
