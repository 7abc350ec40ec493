"Costs: counts against hooks and formulas, bytes against known allocations, a sixteenth against the whole, the command."
import copy
import pytest, torch
from torch import nn
from types import SimpleNamespace
from bench import costs as command
from fedlit.scale import costs
from fedlit.scale.costs import RATES, growth, narrow, peak_growth, readable, shrink, take_turns, trainer
from fedlit.ground.files import read_json
from fedlit.methods.depthfl import exits_resnet18
from fedlit.models import Net, cnn4, feddse_resnet18, preact_resnet18

def by_hooks(net, shape):
    "Parameters and multiplications, counted layer by layer from what each layer says and sees."
    seen = []
    def look(m, inputs, output):
        if isinstance(m, nn.Conv2d):
            _, c, h, w = output.shape
            each = m.in_channels//m.groups*m.kernel_size[0]*m.kernel_size[1]
            seen.append((c*each + (c if m.bias is not None else 0), c*h*w*each))
        elif isinstance(m, nn.Linear): seen.append((m.out_features*(m.in_features + 1), m.out_features*m.in_features))
        elif isinstance(m, nn.BatchNorm2d): seen.append((2*output.shape[1], 0))
    hooks = [m.register_forward_hook(look) for m in net.modules()]
    with torch.no_grad(): net.eval()(torch.randn(2, *shape))
    for h in hooks: h.remove()
    return tuple(map(sum, zip(*seen)))

@pytest.mark.slow
@pytest.mark.parametrize('f, shape, classes', [(cnn4, (1, 12, 12), 10),
                                               (feddse_resnet18, (3, 16, 16), 10),
                                               (preact_resnet18, (3, 16, 16), 7)])
def test_counts_are_those_of_a_network_that_was_built_small(f, shape, classes):
    table = costs.costs(shrink(f(shape, classes)), shape, batch_size=2, repeats=1)
    for r in RATES:
        assert (table.parameters[r], table.macs[r]) == by_hooks(f(shape, classes, width=r), shape), r

@pytest.mark.slow
def test_depths():
    model, shape = exits_resnet18((3, 16, 16), 100, width=1/8), (3, 16, 16)
    table = costs.costs(shrink(model), shape, batch_size=2, repeats=1)
    assert list(table.index) == [4, 3, 2, 1]
    for d in table.index: assert (table.parameters[d], table.macs[d]) == by_hooks(model.first(d), shape), d

def test_the_small_network_trains_and_the_large_one_is_left_alone():
    model = cnn4((1, 12, 12), 10)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    step = trainer(narrow(model, 1/4), torch.randn(8, 1, 12, 12), torch.arange(8))
    losses = [step() for _ in range(30)]
    assert losses[-1] < losses[0]/2
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

def test_a_step_is_sgd_with_momentum():
    net, x, y = cnn4((1, 8, 8), 10), torch.randn(8, 1, 8, 8), torch.arange(8)
    ours, theirs = copy.deepcopy(net), copy.deepcopy(net)
    step, velocity = trainer(ours, x, y, lr=.1, momentum=.5), None
    for _ in range(3):
        step()
        g = torch.autograd.grad(nn.functional.cross_entropy(theirs.train()(x)[1], y), list(theirs.parameters()))
        velocity = g if velocity is None else [.5*v + d for v, d in zip(velocity, g)]
        with torch.no_grad():
            for p, v in zip(theirs.parameters(), velocity): p -= .1*v
    for a, b in zip(ours.parameters(), theirs.parameters()): assert torch.allclose(a, b, atol=1e-6)

def test_growth_counts_bytes():
    assert growth(lambda: None) == 0
    assert growth(lambda: torch.zeros(1000)) == 4000
    def both():
        a = torch.zeros(1000)
        b = torch.zeros(500, dtype=torch.double)
        return len(a) + len(b)
    def in_turn():
        a = torch.zeros(1000)
        del a
        b = torch.zeros(500)
        return len(b)
    assert growth(both) == 8000 and growth(in_turn) == 4000

def test_peak_of_a_linear_layer_by_hand():
    one = Net(nn.Identity(), nn.Linear(1000, 500, bias=False))
    row = costs.costs(dict(one=one), (1000,), batch_size=10, repeats=1).loc['one']
    weight, batch = 4*1000*500, 4*10*1000 + 8*10
    assert row.travel == weight and row.own == 2*weight + batch # weight, momentum, x and y
    assert weight < row.peak - row.own < weight + 5*4*10*500    # the gradient, and a few tensors as large as the logits

def test_peak_is_the_same_every_time_and_at_least_what_autograd_keeps():
    net, x, y = narrow(feddse_resnet18((3, 16, 16), 10), 1/4), torch.randn(8, 3, 16, 16), torch.arange(8)
    step, kept = trainer(net, x, y), {}
    step()
    own = {v.untyped_storage().data_ptr() for v in [*net.parameters(), *net.buffers(), x, y]}
    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): net(x)[1].logsumexp(1).sum()
    saved = sum(v for k, v in kept.items() if k not in own)
    assert growth(step) == growth(step) > .9*saved > 0

def test_the_system_sees_at_least_a_large_allocation():
    seen = peak_growth(lambda: torch.ones(20_000_000))
    assert seen != seen or .9*80e6 < seen < 1.5*80e6

@pytest.mark.slow
def test_a_sixteenth_of_resnet18_needs_a_fraction_of_the_processor():
    "A twentieth where it was measured; a network that is only masked needs all of it."
    model, x, y = feddse_resnet18((3, 32, 32), 10), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    t = take_turns({r: trainer(narrow(model, r), x, y) for r in (1, 1/16)}, repeats=2)
    assert min(t[1/16][:, 1]) < .3*min(t[1][:, 1]), t

def test_turns(monkeypatch):
    calls, ticks, busy = [], iter(range(100)), iter(range(0, 1000, 10))
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda device: calls.append('.'))
    clocks = SimpleNamespace(perf_counter=lambda: next(ticks), process_time=lambda: next(busy))
    monkeypatch.setattr(costs, 'time', clocks)
    t = take_turns(dict(a=lambda: calls.append('a'), b=lambda: calls.append('b')), 2, 'cuda')
    assert ''.join(calls) == 'ab' + '.a.' + '.b.' + '.a.' + '.b.'
    assert {k: v.tolist() for k, v in t.items()} == dict(a=[[1, 10]]*2, b=[[1, 10]]*2)

def test_requests_that_make_no_sense():
    with pytest.raises(ValueError, match='must be in'): narrow(cnn4((1, 8, 8), 10), 0)

@pytest.mark.filterwarnings('ignore:.*is damaged')
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(command.NETWORKS, 'tiny', ('small_cnn', (1, 8, 8), 10))
    monkeypatch.setattr(command, 'INSIDE', ('tiny',))
    go = lambda *more: command.main(['--out', str(tmp_path), '--networks', 'tiny',
                                     '--batch-size', '4', '--repeats', '1', *more])
    go()
    file = tmp_path/'tiny.json'
    got = read_json(file)
    assert [p.name for p in tmp_path.iterdir()] == ['tiny.json']
    assert [r['capacity'] for r in got['rows']] == list(RATES) and got['settings']['batch_size'] == 4
    assert ({'cpu', 'torch', 'python', 'fedlit'} <= set(got['machine']) and got['seconds'] > 0
            and got['settings']['threads'] == 1)
    assert ({r['executor'] for r in got['executors']['rows']} == {'loop', 'extract'}
            and all(r['step'] > 0 for r in got['executors']['rows']))
    df, content = costs.read(file)
    assert content == got and list(df.index) == list(RATES) and len(readable(df)) == 5
    stamp = file.stat().st_mtime_ns
    monkeypatch.setattr(command, 'measure', lambda name, batch_size, repeats, device: dict(new=True))
    go()
    # nothing measured, nothing written
    assert file.stat().st_mtime_ns == stamp and 'was there' in capsys.readouterr().out
    go('--repeats', '2')
    # other settings are another measurement
    assert read_json(file) == dict(settings={**got['settings'], 'repeats': 2}, new=True)
    file.write_text('{"half of', encoding='utf-8')
    go('--repeats', '2')
    assert read_json(file)["new"]
    assert [p.name for p in tmp_path.iterdir()] == ['tiny.json']
