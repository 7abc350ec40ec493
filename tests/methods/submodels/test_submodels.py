"The trimmings that every sub-model method can have, on small networks that plain torch trains."
import pytest, torch, torch.nn.functional as F
from math import exp, log
from types import SimpleNamespace
from fedlit.batches import Batches
from fedlit.ground.axes import along, apply_mask, extract, find_axes, masks
from fedlit.method import Method
from fedlit.methods import (
    Clip, CoordinateMedian, DepthFL, FedAsync, FedDecorr, FedDyn, FederatedDropout, FedLC, FedRolex, FjORD,
    HeteroFL, Krum, MaskedCE, OwnLabels, Scaler, TrimmedMean)
from fedlit.models import build
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round, local_phase
from fedlit.state import start
from federation import difference, train
from oracle import OWNED, UNIFORM, data, differ, logits, nested, perceptron, trained, written_out

THREE = (1., .5, .25)
CUT = HeteroFL(rates=THREE)

# ---- the scaler ----

def scaled_loss(round, client, step, params, x, y): return F.cross_entropy(logits(params, x, rescale=True), y)

def test_scaler():
    ours = trained(CUT + Scaler(), UNIFORM)
    assert differ(ours, written_out(nested(THREE), UNIFORM, loss=scaled_loss)) < 1e-5
    assert differ(ours, written_out(nested(THREE), UNIFORM)) > 1e-3
    assert differ(ours, trained(CUT + Scaler(), UNIFORM, executor='extract')) < 1e-9

def test_scaler_is_for_training_only():
    net = perceptron()
    axes, params = find_axes(net), dict(net.named_parameters())
    share = {'a': .5, 'b': .6}
    used, idle = (Scaler().use(params, axes, share, train=t) for t in (True, False))
    for k, v in params.items():
        assert torch.allclose(used[k], v/{'a': .5, 'b': .6}.get(k[0], 1.)) and torch.equal(idle[k], v)

# ---- layers without parameters ----

class Between(torch.nn.Module):
    def __init__(self, layer, channels=8):
        super().__init__()
        conv = lambda c, out: torch.nn.Conv2d(c, out, 3, padding=1)
        self.body = torch.nn.Sequential(conv(1, 8), layer, conv(channels, 6), layer, torch.nn.AdaptiveAvgPool2d(1),
                                        torch.nn.Flatten())
        self.head = torch.nn.Linear(channels*6//8, 4)
    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)

@pytest.mark.parametrize('layer, sizes', [(torch.nn.ReLU(), [8, 6]), (torch.nn.ChannelShuffle(2), []),
                                          (torch.nn.Softmax(1), []), (torch.nn.LogSoftmax(1), [])])
def test_channels_that_a_layer_mixes_are_not_cut(layer, sizes):
    net = Between(layer)
    assert net(torch.randn(2, 1, 8, 8))[1].shape == (2, 4) and list(find_axes(net).size.values()) == sizes

def test_a_layer_that_changes_the_number_of_channels_is_refused():
    with pytest.raises(ValueError, match='PixelShuffle, and fedlit has no rule'):
        find_axes(Between(torch.nn.PixelShuffle(2), 2))

# ---- cross-entropy over the labels that a client has ----

def zeros(client, z): return torch.stack([z[:, i] if i in OWNED[client] else 0*z[:, i] for i in range(4)], 1)
def holes(client, z): return torch.stack([z[:, i] if i in OWNED[client] else 0*z[:, i] - 1e30 for i in range(4)], 1)

def masked_loss(filled, rescale=False):
    "Cross-entropy of logits after `filled(client, logits)`."
    def loss(round, client, step, params, x, y):
        return F.cross_entropy(filled(client, logits(params, x, rescale=rescale)), y)
    return loss

@pytest.mark.parametrize('fill, right, wrong', [('zero', zeros, holes), ('inf', holes, zeros)])
def test_masked_ce_in_training(fill, right, wrong):
    ours = trained(CUT + MaskedCE(fill=fill))
    assert differ(ours, written_out(nested(THREE), loss=masked_loss(right))) < 1e-5
    assert differ(ours, written_out(nested(THREE), loss=masked_loss(wrong))) > 1e-3

@pytest.mark.parametrize('fill, rest', [('zero', 1.), ('inf', 0.)])
def test_masked_ce_loss_and_gradient(fill, rest):
    z = [[.3, -1.2, 2., .7, 0.], [1.5, .1, -.4, -2., 3.]]
    own, y = [0, 2, 3], [2, 0]
    v = torch.tensor(z, dtype=torch.double, requires_grad=True)
    loss = F.cross_entropy(MaskedCE(fill=fill).output(logits=v, labels=torch.tensor([c in own for c in range(5)])),
                           torch.tensor(y))
    loss.backward()
    expected = 0.
    for i in range(2):
        Z = sum(exp(z[i][c]) for c in own) + 2*rest
        expected += (log(Z) - z[i][y[i]])/2
        for c in range(5):
            slope = (exp(z[i][c])/Z - (c == y[i]))/2 if c in own else 0.
            assert abs(v.grad[i, c].item() - slope) < 1e-9
    assert abs(loss.item() - expected) < 1e-9

# ---- rows of the head that a client owns ----

def test_own_labels():
    ours, net = trained(CUT + OwnLabels()), perceptron()
    assert differ(ours, written_out(nested(THREE), owned=OWNED)) < 1e-5
    assert differ(ours, written_out(nested(THREE))) > 1e-3
    assert (torch.equal(ours['head.weight'][3], net.head.weight[3].detach())
            and ours['head.bias'][3] == net.head.bias[3]) # nobody's class
    rows = OwnLabels().mask(dict(net.named_parameters()), find_axes(net), torch.tensor([True, False, True, False]))
    assert set(rows) == {'head.weight', 'head.bias'}
    assert (rows['head.weight'].tolist() == [[c in (0, 2)]*5 for c in range(4)]
            and rows['head.bias'].tolist() == [True, False, True, False])

def test_rows_of_what_is_not_trained_are_left_out():
    params, labels = dict(perceptron().named_parameters()), torch.tensor([True, False, True, False])
    del params['head.bias'] # frozen
    assert set(OwnLabels().mask(params, find_axes(perceptron()), labels)) == {'head.weight'}

# ---- gradients of bounded length ----

@pytest.mark.parametrize('norm', [.05, .3, 100.])
def test_clip(norm):
    ours = trained(CUT + Clip(norm=norm), UNIFORM)
    assert differ(ours, written_out(nested(THREE), UNIFORM, clip=norm)) < 1e-5
    assert (differ(ours, written_out(nested(THREE), UNIFORM)) > 1e-4) == (norm < 1)

# ---- together ----

def test_all_trimmings_together():
    m = CUT + Scaler() + MaskedCE() + OwnLabels() + Clip(norm=.5)
    theirs = written_out(nested(THREE), UNIFORM, loss=masked_loss(zeros, rescale=True), owned=OWNED, clip=.5)
    for executor in ('loop', 'vmap', 'extract'): assert differ(trained(m, UNIFORM, executor=executor), theirs) < 1e-5

# ---- parts that no method of ours chooses ----

class Rows(Method):
    "The classes that a client has, as a part of their axis."
    def mask(self, axes, labels): return {axes.logits: labels}

class Even(Method):
    def mask(self, axes): return {a: torch.arange(n) % 2 == 0 for a, n in axes.size.items()}

class InSteps(Method):
    "The even channels, chosen anew in every step; or even and odd ones in turn."
    turns: bool = False
    def mask(self, axes, step): return {a: torch.arange(n) % 2 == step % 2*self.turns for a, n in axes.size.items()}

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'extract'])
def test_a_part_of_the_classes_and_a_part_for_each_step(executor):
    ours = lambda m: trained(CUT + m, executor=executor)
    assert differ(ours(Rows()), trained(CUT + MaskedCE() + OwnLabels())) < 1e-9
    assert differ(ours(Scaler() + InSteps()), trained(CUT + Scaler() + Even())) < 1e-9
    assert differ(ours(InSteps(turns=True)), trained(CUT + InSteps(turns=True))) < 1e-9
    assert differ(ours(InSteps(turns=True)), ours(InSteps())) > 1e-3

@pytest.mark.parametrize('executor', ['loop', 'extract'])
def test_rows_of_classes_that_a_client_lacks_stay(executor):
    m, net = CUT + Rows(), perceptron()
    sent = Broadcast(m, net, start(m, net, 3), Local(lr=.2, weight_decay=.1))
    out = local_phase(sent, [0, 1, 2], Batches(**data(0)), executor)['params']['head.weight']
    for k, own in enumerate(OWNED):
        assert [c for c in range(4) if not torch.equal(out[k, c], net.head.weight[c])] == own

# ---- a penalty on features sees those that are there ----

def test_feddecorr_on_live_features():
    def hand(z): # correlations of the columns, squared, off the diagonal, by loops
        n, d = z.shape
        z = (z - z.mean(0))/(z.var(0) + 1e-8).sqrt()
        return sum((z[:, i]@z[:, j])**2/n for i in range(d) for j in range(d) if i != j)/(d*(d-1))
    torch.manual_seed(0)
    net = build('mlp', SimpleNamespace(classes=4, x_train=torch.empty(0, 3)), seed=0, hidden=(8,), features=12,
                representation='linear').double()
    axes, x, y = find_axes(net), torch.randn(10, 3).double(), torch.randint(0, 4, (10,))
    on = HeteroFL(rates=(.5,)).mask(axes=axes, number=torch.tensor(0), clients=1, round=0)
    small = extract(net, axes, on).train()
    z = torch.func.functional_call(net, apply_mask(dict(net.named_parameters()), masks(axes, on)), (x,))[0]
    live = along(axes.features, on)
    mine, true = FedDecorr(beta=1.).loss(z, live), hand(small(x)[0])
    assert live.sum() == 6 and abs((mine - true).item()) < 1e-6
    assert abs((FedDecorr(beta=1.).loss(z) - true).item()) > 1e-2 # dead columns counted
    old = {k: v.detach().clone() for k, v in small.named_parameters()}                  # and one step of a round
    features, logits = small(x)
    grads = torch.autograd.grad(F.cross_entropy(logits, y) + 3*hand(features), list(small.parameters()))
    m = HeteroFL(rates=(.5,)) + FedDecorr(beta=3.)
    for executor in ('loop', 'vmap', 'extract'):
        new = fed_round(Broadcast(m, net, start(m, net, 1), Local(lr=.1, momentum=0.)), [0],
                        dict(x=x[None, None], y=y[None, None]), [1.], executor=executor).params
        for (k, v), g in zip(old.items(), grads):
            assert torch.allclose(new[k][tuple(map(slice, v.shape))], v - .1*g, atol=1e-6), (executor, k)

# ---- one answer in every executor; where all have all of it, FedAvg's: NEUTRAL of federation.py ----

@pytest.mark.parametrize('m', [
    HeteroFL(rates=THREE), HeteroFL(assign='dynamic', seed=3),
    HeteroFL() + Scaler() + MaskedCE() + OwnLabels() + Clip(), HeteroFL() + FedDyn(),
    FedRolex(rates=THREE), FedRolex(assign='dynamic', direction='forward'),
    FederatedDropout(rates=THREE), FederatedDropout(assign='dynamic'),
    FjORD(), FjORD(rates=(.5, .3), assign='dynamic', distill=False)], ids=repr)
def test_executors_agree(m):
    loop = train(m, 'loop', rounds=2)
    for executor in ('vmap', 'extract'): assert difference(loop, train(m, executor, rounds=2)) < 1e-9

# ---- refusals ----

@pytest.mark.parametrize('left,right,why', [
    (DepthFL(), MaskedCE(), 'MaskedCE.* DepthFL'), (DepthFL(ramp=1), FedLC(), 'FedLC.* DepthFL'),
    (MaskedCE(), FjORD(distill=False), 'FjORD.* MaskedCE'), (CoordinateMedian(), FedAsync(), 'FedAsync.* Coordinate'),
    (TrimmedMean(), FedAsync(), 'FedAsync.* TrimmedMean')])
def test_an_order_without_effect_is_refused_with_the_right_one(left, right, why):
    with pytest.raises(ValueError, match=f'write {why}'): left + right
    assert (right + left).parts == (right, left)
    assert DepthFL() + Clip() and MaskedCE() + FjORD() and Krum() + FedAsync()
