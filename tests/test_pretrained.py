"""Networks from elsewhere, frozen in part: what stands still, and in every executor; torchvision's and timm's."""
import copy, pickle
import pytest, torch, torchvision
from torch import nn
from fedlit.data import Task, load
from fedlit.method import Method
from fedlit.methods import FedAvg, FedPer, MOON
from fedlit.models import build, freeze, unwrap, wrap
from fedlit.local import Local
from fedlit.result import Run
from fedlit.compare import run_together
from fedlit.run import Federation, federate
from fedlit.state import fixed_names

def large(x): return x.repeat(1, 3, 1, 1).repeat_interleave(4, 2).repeat_interleave(4, 3)

DIGITS = load('digits').subset(60, seed=0, test=20)
TASK = Task('large digits', large(DIGITS.x_train), DIGITS.y_train, large(DIGITS.x_test), DIGITS.y_test, 10)
CLIENTS = [torch.arange(0, 60, 2), torch.arange(1, 60, 2)]

class Small(nn.Module):
    "A BatchNorm in a part that is frozen, and one in a part that is not."
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU())
        self.top = nn.Sequential(nn.Conv2d(4, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(8, 10)
    def forward(self, x): return self.fc(self.top(self.stem(x)))

def go(net, method=None, **kw):
    return federate(net, TASK, CLIENTS, method or FedAvg(), 2, Local(epochs=1, batch_size=8), progress=False, **kw)

def moved(run, net):
    "Which tensors of the network are not what they were."
    old = net.state_dict()
    return {k for k, v in run.model.state_dict().items() if not torch.equal(v, old[k])}

@pytest.mark.parametrize('kw', [dict(executor=e) for e in ('loop', 'threads', 'vmap', 'extract')] + [
    dict(record=False), dict(statistics='home'), dict(statistics='recomputed'), dict(statistics='static')], ids=str)
def test_what_is_frozen_stands_still(kw):
    net = wrap(Small(), 'fc')
    freeze(net, but=('body.top', 'head'))
    run = go(net, **kw)
    still = {k for k in net.state_dict() if k.startswith('body.stem')}
    assert not moved(run, net) & still and 'body.top.1.running_mean' in moved(run, net) | set(run.state.personal)
    assert set(run.state.params) == {k for k, p in net.named_parameters() if p.requires_grad}
    assert {k for k in net.state_dict() if k.startswith('body.stem')} == set(run.state.fixed)
    assert not set(run.state.fixed) & {*run.state.buffers, *run.state.personal}

def test_a_run_from_a_file_is_frozen_as_it_was(tmp_path):
    for task, net, fresh in ((DIGITS, build('mlp', DIGITS, norm='batch', seed=0), None),
                             (TASK, wrap(Small(), 'fc'), wrap(Small(), 'fc'))):
        run = federate(freeze(net, but='head'), task, CLIENTS, FedAvg(), 1, Local(epochs=1), progress=False)
        run.save(tmp_path/'run')
        again = Run.load(tmp_path/'run', fresh)
        assert torch.equal(again.logits(task.x_test), run.logits(task.x_test))
        assert fixed_names(again.model) == fixed_names(run.model)

@pytest.mark.parametrize('norm', ['none', 'batch'])
def test_a_run_from_a_file_is_asked_for_again_as_frozen_as_it_was(tmp_path, norm):
    net = lambda: build('mlp', DIGITS, norm=norm, seed=0)
    run = federate(freeze(net(), but='head'), DIGITS, CLIENTS, FedAvg(), 1, Local(epochs=1), progress=False)
    back, data = Run.load(run.save(tmp_path/'run')), dict(task=DIGITS, clients=CLIENTS)
    assert torch.equal(back.federation(**data).run().logits(DIGITS.x_test), run.logits(DIGITS.x_test))
    assert back.without(1, **data).difference == run.without(1).difference
    with pytest.raises(ValueError, match='other parts of the network frozen'): back.without(1, **data, model=net())

def test_a_checkpoint_goes_on_only_with_what_was_frozen(tmp_path):
    open_, shut = (lambda: build('mlp', DIGITS, seed=0)), (lambda: freeze(build('mlp', DIGITS, seed=0), but='head'))
    for first, then in ((open_, shut), (shut, open_)):
        go = lambda net, rounds, file: federate(net(), DIGITS, CLIENTS, FedAvg(), rounds, Local(epochs=1),
                                                progress=False, checkpoint=file)
        go(first, 1, file := tmp_path/f'{first is open_}')
        with pytest.raises(ValueError, match='other parts of the network frozen'): go(then, 2, file)

class Adapter(Method):
    "A head moved by a matrix of rank one; what it is added to stays where everybody has it."
    def init(self, params):
        w = params['head.weight']
        new = {k: v for k, v in params.items() if k != 'head.weight'}
        a, b = torch.linspace(-1, 1, len(w))[:, None], torch.zeros(1, w.shape[1])
        return {**new, 'a': a, 'b': b}, {}, {}, {}, {'head.weight': w}
    def use(self, params, fixed):
        whole = fixed['head.weight'] + params['a']@params['b']
        return {**{k: v for k, v in params.items() if k not in ('a', 'b')}, 'head.weight': whole}

@pytest.mark.parametrize('kw', [dict(executor='loop'), dict(executor='vmap'), dict(record=False)], ids=str)
def test_a_method_may_add_to_what_everybody_has(kw, tmp_path):
    net = freeze(wrap(Small(), 'fc'), but=('body.top', 'head'))
    run, old = go(net, Adapter(), **kw), net.state_dict()['head.weight']
    assert torch.equal(run.state.fixed['head.weight'], old) and 'head.weight' not in run.state.params
    moved_by = run.model.head.weight - old
    assert torch.linalg.matrix_rank(moved_by, atol=1e-5) == 1
    run.save(tmp_path/'run')
    other = freeze(wrap(Small(), 'fc'), but=('body.top', 'head'))
    again = Run.load(tmp_path/'run', other, method=Adapter())
    assert torch.equal(again.logits(TASK.x_test), run.logits(TASK.x_test)) # of what was frozen, too

class Shift(Method):
    "All that learns is what a method adds to a network that is frozen whole."
    def init(self, params): return {'shift': torch.zeros(10)}, {}, {}
    def use(self, params, fixed): return {'head.bias': fixed['head.bias'] + params['shift']}

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads'])
def test_a_network_that_is_frozen_whole_learns_what_a_method_adds(executor):
    net = build('mlp', DIGITS, seed=0)
    net.requires_grad_(False)
    run = federate(net, DIGITS, CLIENTS, Shift(), 2, Local(epochs=1, batch_size=8), progress=False, executor=executor)
    assert list(run.state.params) == ['shift'] and not run.state.buffers and run.state.params['shift'].any()
    assert moved(run, net) == {'head.bias'}

def test_runs_with_other_frozen_tensors_do_not_share_a_stack():
    nets = [freeze(build('mlp', DIGITS, seed=s), but=('body.3', 'head')) for s in (0, 1)]
    each = [Federation(n, DIGITS, CLIENTS, FedAvg(), 2, Local(epochs=1, batch_size=8), seed=s, progress=False)
            for s, n in enumerate(nets)]
    for run, alone in zip(run_together(each), (f.run() for f in each)):
        assert torch.equal(run.logits(DIGITS.x_test), alone.logits(DIGITS.x_test))

def test_without_freeze_the_statistics_move():
    net = wrap(Small(), 'fc')
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    assert {'body.stem.1.running_mean', 'body.stem.1.running_var'} <= moved(go(net), net)

def test_frozen_is_frozen_in_copies_and_in_training_mode():
    net = copy.deepcopy(freeze(Small(), but='fc')).train()
    net(torch.randn(4, 3, 32, 32))
    assert net.training and not net.stem[1].training and (net.stem[1].running_mean == 0).all()
    assert net.stem[1].train() is net.stem[1] and type(net.stem[1]) is nn.BatchNorm2d
    for but in ('fcc', '', 'fc.weight'):
        with pytest.raises(ValueError, match='no part .*there are stem, top, fc'): freeze(Small(), but)

@pytest.mark.filterwarnings('ignore:.*torch.jit.script')
def test_a_frozen_network_can_be_pickled_and_is_frozen_then_too():
    net = freeze(Small(), but='fc')
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        norm = other.train().stem[1]
        assert norm.train() is norm and not norm.training and other.fc.training
    assert not torch.jit.script(net).train().stem[1].training

def test_a_personal_head_on_a_frozen_body():
    net = freeze(wrap(Small(), 'fc'), but=('body.top', 'head'))
    run = go(net, FedPer())
    assert set(run.state.personal) >= {'head.weight', 'head.bias'}
    assert type(run.network(1)) is Small
    with pytest.raises(ValueError, match="FedPer: head='head' holds every parameter that is trained"):
        go(freeze(wrap(Small(), 'fc'), but='head'), FedPer()) # nothing would be shared

@pytest.mark.parametrize('name,head', [('shufflenet_v2_x0_5', 'fc'), ('mobilenet_v3_small', 'classifier.3')])
def test_torchvisions(name, head):
    theirs = getattr(torchvision.models, name)(weights=None, num_classes=10).eval()
    net = freeze(wrap(theirs, head, x=TASK.x_test[:2]), but='head')
    run = federate(net, TASK.subset(16, test=10), [torch.arange(16)], MOON(), 1, Local(epochs=1, batch_size=8),
                   progress=False)
    assert moved(run, net) == {'head.weight', 'head.bias'} # a frozen network sends two tensors
    assert list(run.state_dict()) == list(theirs.state_dict())

@pytest.mark.slow
@pytest.mark.parametrize('name,kw', [('resnet10t', {}), ('mobilenetv3_small_050', {}),
                                     ('vit_tiny_patch16_224', dict(img_size=32)), ('convnext_atto', {})])
def test_timms(name, kw):
    timm = pytest.importorskip('timm', reason='timm is not installed')
    theirs = timm.create_model(name, num_classes=10, **kw).eval()
    head = next(k for k, m in theirs.named_modules() if m is theirs.get_classifier())
    net = wrap(theirs, head, x=TASK.x_test[:2])
    run = federate(net, TASK.subset(16, test=10), [torch.arange(16)], FedAvg(), 1,
                   Local(epochs=1, batch_size=8, lr=1e-4), progress=False)
    assert len(moved(run, net)) > 10
    fresh = timm.create_model(name, num_classes=10, **kw).eval()
    fresh.load_state_dict(run.state_dict())
    torch.testing.assert_close(fresh(TASK.x_test[:2]), run.logits(TASK.x_test[:2]), atol=1e-4, rtol=1e-4)
    assert type(unwrap(run.model)) is type(theirs)
