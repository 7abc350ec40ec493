"Every network: the published size, (features, logits), and the same numbers mapped over clients as one by one."
from types import SimpleNamespace

import pytest, torch, torch.nn.functional as F
from fastcore.test import test_close as close
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from fedlit.data import load
from fedlit.methods import FedDecomp, FedPara
from fedlit.models import Net, build, count, macs, models, register, unwrap, wrap
from fedlit import models as M
from federation import Patches

def task(shape, classes=10): return SimpleNamespace(x_train=torch.empty(1, *shape, device='meta'), classes=classes)

def blank(name, shape, classes, **kw): # shapes only: nothing is allocated or drawn
    with torch.device('meta'): return build(name, task(shape, classes), **kw)

MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)
RATES = 1, .5, .25, .125, .0625
COUNTS = [('mlp', (1, 8, 8), {10: 17_226}, {}),
          ('mobilenetv2', CIFAR, {10: 2_296_922, 100: 2_412_212, 200: 2_540_312}, {}),
          ('mobilenetv2', CIFAR, {10: 3_270_618}, dict(projector=True)),
          ('resnet18', CIFAR, {10: 11_173_962, 100: 11_220_132, 200: 11_271_432}, {}),
          ('resnet32', CIFAR, {10: 464_154, 100: 470_004, 200: 476_504}, {}),
          ('resnet20', CIFAR, {10: 269_722, 100: 275_572, 200: 282_072}, {}),
          ('moon_cnn', CIFAR, {10: 92_626}, {}), ('moon_cnn', CIFAR, {10: 62_006}, dict(projector=False)),
          ('resnet50', CIFAR, {100: 28_246_948, 200: 28_272_648}, {}),
          ('feddecomp_resnet8', CIFAR, {10: 1_235_274}, {}), ('feddecomp_resnet10', CIFAR, {100: 4_957_092}, {}),
          ('alexnet_bn', (3, 256, 256), {10: 57_063_498}, {})]
for name, shape, classes, sizes in [
        ('cnn4',            MNIST, 10,  (1_556_874, 391_370, 98_922, 25_274, 6_594)),
        ('preact_resnet18', CIFAR, 10,  (11_172_170, 2_796_714, 701_018, 176_178, 44_510)),
        ('feddse_resnet18', CIFAR, 10,  (11_524_426, 2_884_778, 723_034, 181_682, 45_886)),
        ('feddse_resnet34', TINY,  200, (22_291_208, 5_602_792, 1_415_768, 361_552, 94_268))]:
    COUNTS += [(name, shape, {classes: n}, dict(width=r)) for r, n in zip(RATES, sizes)]

@pytest.mark.parametrize('name, shape, sizes, kw', COUNTS)
def test_published_count(name, shape, sizes, kw):
    assert {c: count(blank(name, shape, c, **kw)) for c in sizes} == sizes

# A narrow or small version of every network, with the width of its features, on images as small as it takes.
SMALL = {'mlp':                (dict(representation='tanh'), (1, 8, 8), 64),
         'small_cnn':          (dict(norm='batch', pool='avg'), (1, 8, 8), 64),
         'moon_cnn':           ({}, (3, 16, 16), 256),
         'cnn4':               (dict(width=.125), (1, 8, 8), 64),
         'cnn_bn':             (dict(width=.125), (3, 8, 8), 32),
         'mobilenetv2':        ({}, (3, 16, 16), 1280),
         'resnet18':           (dict(width=.125), (3, 16, 16), 64),
         'resnet34':           (dict(width=.125), (3, 16, 16), 64),
         'resnet20':           ({}, (3, 8, 8), 64),
         'resnet32':           (dict(width=.5), (3, 8, 8), 32),
         'resnet50':           (dict(width=.125), (3, 16, 16), 256),
         'preact_resnet18':    (dict(width=.125), (3, 16, 16), 64),
         'preact_resnet34':    (dict(width=.0625), (3, 16, 16), 32),
         'feddse_resnet18':    (dict(width=.125), (3, 16, 16), 64),
         'feddse_resnet34':    (dict(width=.0625), (3, 16, 16), 32),
         'feddecomp_resnet8':  ({}, (3, 32, 32), 256),
         'feddecomp_resnet10': ({}, (3, 64, 64), 512),
         'alexnet_bn':         (dict(features=32), (3, 64, 64), 32)}
OWN = sorted(SMALL)

def small(name, seed=0, **more):
    kw, shape, d = SMALL[name]
    return build(name, task(shape), seed=seed, **{**kw, **more}).double(), shape, d

# networks of DepthFL join the list when fedlit.methods is imported; tests/methods/submodels has theirs
def test_every_network_has_a_small_version(): # a new one must join the tests below
    assert {n for n in models() if not n.startswith('exits_')} == set(SMALL)

@pytest.mark.parametrize('name', OWN)
def test_features_and_logits(name):
    net, shape, d = small(name)
    features, logits = net(torch.randn(3, *shape).double())
    assert features.shape == (3, d) and logits.shape == (3, 10)
    assert torch.equal(net.head(features), logits) and hasattr(net, 'projector')
    assert isinstance(net.head, nn.Linear) and net.training

def client(net):
    "Loss, gradient, features and moved buffers of one batch, as a pure function."
    def loss(params, buffers, x, y):
        buffers = {k: v.clone() for k, v in buffers.items()}
        features, logits = functional_call(net, (params, buffers), (x,))
        return F.cross_entropy(logits, y) + features.square().mean(), (features, buffers)
    return grad_and_value(loss, has_aux=True)

@pytest.mark.parametrize('name', OWN)
def test_vmap_equals_loop(name):
    nets = [small(name, seed=s)[0] for s in (0, 1)]
    shape = SMALL[name][1]
    params, buffers = ({k: v.detach() for k, v in d.items()} for d in stack_module_state(nets))
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, *shape).double(), torch.randint(10, (2, 4))
    grads, (loss, (features, moved)) = vmap(client(nets[0]))(params, buffers, x, y)
    for i, net in enumerate(nets): # the plain modules, with autograd
        f, logits = net(x[i])
        l = F.cross_entropy(logits, y[i]) + f.square().mean()
        l.backward()
        close(l.item(), loss[i].item(), 1e-8)
        assert torch.allclose(f, features[i], atol=1e-8)
        for k, p in net.named_parameters():
            assert p.grad.isfinite().all() and torch.allclose(p.grad, grads[k][i], rtol=1e-5, atol=1e-8), k
        for k, b in net.named_buffers(): assert torch.allclose(b, moved[k][i], atol=1e-8), k

def test_seed_repeats_and_leaves_the_global_state():
    before = torch.get_rng_state()
    a, b, c = (build('resnet20', task(CIFAR), seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.head.weight, c.head.weight)

def test_global_seed_without_seed():
    def one():
        torch.manual_seed(5)
        return build('mlp', task((1, 8, 8)))
    assert torch.equal(one().head.weight, one().head.weight)

@pytest.mark.parametrize('seed', [2**64, -1, 1.5, 'x'])
def test_impossible_seeds_are_named(seed):
    t = load('digits')
    net = build('mlp', t, seed=0)
    for draw in (lambda: build('mlp', t, seed=seed), lambda: t.subset(9, seed=seed),
                 *(lambda m=m: m(seed=seed).init(dict(net.named_parameters()), net) for m in (FedDecomp, FedPara))):
        with pytest.raises((ValueError, TypeError), match=f'seed.*{seed}.*must be a whole number'): draw()

def test_trial_moves_nothing():
    net = build('small_cnn', task((1, 8, 8)), norm='batch')
    assert net.training and net.body[1].num_batches_tracked == 0 and (net.body[1].running_mean == 0).all()

@pytest.mark.parametrize('name', ['mlp', 'small_cnn', 'moon_cnn', 'cnn_bn', 'resnet18', 'resnet20', 'resnet50',
                                  'mobilenetv2'])
def test_projector(name):
    net, shape, d = small(name, projector=True)
    assert net(torch.randn(2, *shape).double())[0].shape == (2, 256) and net.projector is not None
    plain = small(name, projector=False)[0]
    assert plain.projector is None and plain.head.in_features == net.projector[0].in_features

@pytest.mark.parametrize('kind, low', [('relu', 0), ('tanh', -1), ('linear', -float('inf'))])
def test_representation(kind, low):
    for name in ('mlp', 'small_cnn'):
        x, lim = 9*torch.randn(64, 1, 8, 8), 1 if kind == 'tanh' else float('inf')
        z = build(name, task((1, 8, 8)), seed=0, representation=kind)(x)[0]
        assert z.min() >= low and z.max() <= lim and (kind == 'relu' or z.min() < 0)

@pytest.mark.parametrize('norm', ['none', 'batch', 'group'])
@pytest.mark.parametrize('shape', [(1, 8, 8), MNIST, CIFAR])
def test_small_cnn_takes(norm, shape):
    assert build('small_cnn', task(shape), norm=norm)(torch.randn(2, *shape))[1].shape == (2, 10)

def test_no_hidden_layer(): assert count(build('mlp', task((5,), 3), hidden=(), features=4)) == 5*4 + 4 + 4*3 + 3

def test_option_a_keeps_the_signal():
    net = build('resnet20', task(CIFAR), seed=0)
    pads = [m for m in net.modules() if type(m).__name__ == '_Pad']
    x = torch.randn(2, 16, 8, 8)
    assert len(pads) == 2 and torch.equal(pads[0](x)[:, 8:24], x[..., ::2, ::2]) and pads[0](x)[:, :8].abs().sum() == 0

@pytest.mark.parametrize('call, says', [
    (lambda: build('mpl', task(CIFAR)), 'did you mean mlp'),
    (lambda: build('resnet_81', task(CIFAR)), 'did you mean resnet18'),
    (lambda: build('zzz', task(CIFAR)), 'there are alexnet_bn'),
    (lambda: build('alexnet_bn', task(CIFAR), features=8), r'samples of shape \(3, 32, 32\)'),
    (lambda: build('moon_cnn', task((1, 8, 28))), r'samples of shape \(1, 8, 28\)'),
    (lambda: build('cnn4', task((64,))), r'images \(C, H, W\)'),
    (lambda: build('small_cnn', task((64,))), r'images \(C, H, W\)'),
    (lambda: build('resnet18', task((3, 32))), r'images \(C, H, W\)'),
    (lambda: build('mlp', task(CIFAR), representation='gelu'), 'linear, relu, tanh'),
    (lambda: build('small_cnn', task(CIFAR), norm='layer'), 'batch, group, none'),
    (lambda: build('small_cnn', task(CIFAR), pool='max'), "'flatten' or 'avg'"),
    (lambda: build('resnet18', task(CIFAR), width=0.), 'width'),
    (lambda: build('cnn4', task(CIFAR), width=-1), 'width'),
])
def test_errors(call, says):
    with pytest.raises(ValueError, match=says): call()

def test_misspelt_option():
    with pytest.raises(TypeError, match='widht'): build('resnet18', task(CIFAR), widht=.5)

def test_macs():
    assert macs(nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)) == 5*5*6 * 2*9
    net = build('resnet20', task(CIFAR))
    stage = [1024*9*(3*16 + 6*16*16), 256*9*(16*32 + 5*32*32), 64*9*(32*64 + 5*64*64)] # 32x32, 16x16 and 8x8 positions
    assert macs(net, CIFAR) == sum(stage) + 64*10 and net.training
    assert not any(m._forward_hooks for m in net.modules())

def by_layers(model, shape):
    "Outputs times the size of a row, over all convolutions and linear layers."
    total = []
    for m in model.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            m.register_forward_hook(lambda m, i, out: total.append(out[0].numel()*m.weight[0].numel()))
    with torch.no_grad(): model.eval()(torch.empty(1, *shape, device='meta'))
    return sum(total)

@pytest.mark.parametrize('name', models())
def test_macs_are_those_of_its_layers(name):
    shape = dict(alexnet_bn=(3, 256, 256)).get(name, CIFAR)
    net = blank(name, shape, 10)
    assert macs(net, shape) == by_layers(net, shape) > 0

def test_macs_of_attention_count_the_products_of_queries_keys_and_values():
    net = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    net.forward = lambda x, f=net.forward: f(x, x, x, need_weights=False)[0]
    assert macs(net, (5, 8)) == 5*8*24 + 2*5*5*8 + 5*8*8

FUSED = dict(encoder=(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 10*(4*256 + 2*512) + 2*10*10*16),
             attention=(nn.MultiheadAttention(16, 4, batch_first=True), 10*4*256 + 2*10*10*16),
             lstm=(nn.LSTM(16, 16, batch_first=True), 10*4*2*256), gru=(nn.GRU(16, 16, batch_first=True), 10*3*2*256),
             bilinear=(nn.Bilinear(16, 16, 16), 10*16**3))

@pytest.mark.parametrize('name', FUSED)
def test_macs_of_layers_that_run_as_one_kernel(name, recwarn):
    layer, known = FUSED[name]
    given = dict(attention=3, bilinear=2).get(name, 1)
    layer.forward = lambda x: type(layer).forward(layer, *[x]*given)
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    assert macs(layer, (10, 16)) == known and not recwarn.list
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled) == before

class Bottom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
    def forward(self, x): return self.fc(self.a(x).tanh())

def test_wrap_copies_and_agrees():
    m, x = Bottom(), torch.randn(6, 4)
    net = wrap(m, 'fc', x=x)
    assert torch.allclose(net(x)[1], m(x)) and torch.allclose(net(x)[0], m.a(x).tanh())
    with torch.no_grad(): net.head.weight.zero_()
    assert m.fc.weight.abs().sum() > 0 and isinstance(m.fc, nn.Linear)
    back = unwrap(net) # and so does its inverse
    back.fc.weight.data.fill_(1.)
    assert not net.head.weight.any() and list(back.state_dict()) == list(m.state_dict())

def test_wrap_errors():
    for head in ('f', '', 'a.b'):
        with pytest.raises(ValueError, match='linear layers are a, fc'): wrap(Bottom(), head)
    with pytest.raises(ValueError, match="after 'a'"): wrap(Bottom(), 'a', x=torch.randn(2, 4))
    with pytest.raises(ValueError, match="after '0'"):
        wrap(nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten()), '0', x=torch.randn(2, 1, 4, 4))

def test_a_head_has_something_to_make_logits_with():
    "A dropout before the last layer changes nothing in evaluation mode, where `wrap` compares."
    net = nn.Sequential(nn.Dropout(), nn.Linear(4, 3))
    for x in (None, torch.randn(2, 4)):
        with pytest.raises(ValueError, match="'0' is a Dropout.*linear layers are 1"): wrap(net, '0', x=x)
    fixed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False)) # buffers will do: a fixed classifier
    assert isinstance(wrap(fixed, '1').head, nn.BatchNorm1d)

def test_wrap_torchvision_under_vmap():
    import torchvision
    nets = [wrap(torchvision.models.resnet18(num_classes=10), 'fc').double() for _ in range(2)]
    params, buffers = ({k: v.detach() for k, v in d.items()} for d in stack_module_state(nets))
    x, y = torch.randn(2, 4, 3, 32, 32).double(), torch.randint(10, (2, 4))
    _, (_, (features, _)) = vmap(client(nets[0]))(params, buffers, x, y)
    for i, net in enumerate(nets): assert torch.allclose(net(x[i])[0], features[i], atol=1e-8)

def test_register_checks_what_comes_back(monkeypatch):
    monkeypatch.setattr(M, '_shelf', dict(M._shelf))
    @register
    def bare(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    with pytest.raises(ValueError, match='features, logits'): build('bare', task((1, 8, 8)))
    @register
    def other(shape, classes): return Net(nn.Flatten(), nn.Linear(64, classes + 1))
    with pytest.raises(ValueError, match=r'\(N, 10\)'): build('other', task((1, 8, 8)))

@pytest.mark.parametrize('padding', [0, 1])
def test_a_text_of_padding_alone_is_no_trial(padding):
    class Packed(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.e, self.r, self.head = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, classes)
        def forward(self, x):
            n = (x != padding).sum(1).cpu()
            z = nn.utils.rnn.pack_padded_sequence(self.e(x), n, batch_first=True, enforce_sorted=False)
            return (z := self.r(z)[1][0]), self.head(z)
    assert M._check_fit('packed', Packed((5,), 3), (5,), 3)

def test_an_embedding_of_places_does_not_make_pictures_tokens():
    for device in 'cpu', 'meta': assert M._check_fit('patches', Patches(4).to(device), (1, 8, 8), 3)
    assert M.macs(Patches(4), (1, 8, 8)) == 4*5*16 + 5*3
