"`fedlit check` on methods from outside: right, wrong where the first broken law names the mistake, and odd."
import random
from pathlib import Path
import pytest, torch
from torch import nn
import fedlit
from fedlit import laws
from fedlit.cli import main
from fedlit.data import load
from fedlit.method import Method
from fedlit.methods import DepthFL, FedAvg, FedProx, Krum, DP, DPSGD
from fedlit.models import build
import mine_odd, mine_right, mine_wrong

HERE = Path(__file__).parent
RIGHT, _ = laws.methods_in(mine_right)
WRONG, _ = laws.methods_in(mine_wrong)
ODD, _ = laws.methods_in(mine_odd)
OWN = 'finer fresh participants signs numbers names equal statistics batch twice'.split()
ALONE = [next(c for c, caught in mine_wrong.CAUGHT.items() if caught == law) for law in OWN] # no other law finds them
ids = lambda m: m.name

@pytest.mark.parametrize('m', [pytest.param(m, marks=pytest.mark.slow) if k > 1 else m for k, m in enumerate(RIGHT)],
                         ids=ids)
def test_what_is_right_passes(m):
    report = fedlit.check(m)
    assert report.ok and report.rows['executors'].holds, report

class Tutor(Method):
    "Clients begin with a step on labelled samples of the server."
    def begin(self, params, client, buffers, forward, proxy):
        x, y = proxy
        def loss(params): return nn.functional.cross_entropy(forward(params, buffers, x, train=False)[1], y)
        return {k: params[k] - .1*g for k, g in torch.func.grad(loss)(params).items()}, client

def test_a_method_that_learns_from_samples_of_the_server():
    report = laws.check(Tutor(), proxy=(torch.randn(12, 1, 6, 6), torch.arange(12) % 3))
    assert report.ok and report.rows['names'].holds is True and report.rows['plain'].holds is True, report
    assert laws.check(Tutor()).broken == ['runs'] # inputs alone are no pair

def test_all_of_them_are_tried(): assert len(RIGHT) == 3 and {type(m) for m in WRONG} == set(mine_wrong.CAUGHT)

@pytest.mark.parametrize('m', WRONG, ids=ids)
def test_what_is_wrong_is_named(m):
    report = laws.check(m)
    assert report.broken[:1] == [mine_wrong.CAUGHT[type(m)]], report
    assert not report.ok and str(report.broken[0]) in repr(report).splitlines()[0]
    if type(m) in ALONE: assert report.broken == [mine_wrong.CAUGHT[type(m)]] and not report.doubts, report

def test_of_running_statistics_it_is_said_where_they_are():
    said = laws.check(mine_wrong.Slow()).rows['statistics'].reason
    assert '`delta` holds them too, and `merge` may pass on what is not in `params`' in said

def test_every_newer_law_has_a_method_of_its_own(): assert {mine_wrong.CAUGHT[c] for c in ALONE} == set(OWN)

@pytest.mark.parametrize('m', [pytest.param(m, marks=pytest.mark.slow) if k > 4 else m for k, m in enumerate(ODD)],
                         ids=ids)
def test_what_may_be_meant_is_asked(m):
    report = laws.check(m)
    assert report.ok and report.doubts == mine_odd.ASKED[type(m)], report
    assert ('look at' in repr(report).splitlines()[0]) == bool(report.doubts)

def test_what_only_vmap_refuses_is_recorded_all_the_same():
    report = laws.check(mine_wrong.Branch())
    assert report.broken == ['executors'] and report.rows['recorded'].holds, report

def test_a_network_that_was_received_is_asked_without_training():
    seen = laws.check_executors(mine_wrong.Distil(), laws.small_world())
    assert 'vmap fails where the loop does not' in seen.reason
    assert '`forward(received, {}, x, train=False)`' in seen.reason
    class Right(Method):
        def loss(self, features, received, x, forward):
            return .1*(features - forward(received, {}, x, train=False)[0]).square().mean()
    assert laws.check_executors(Right(), laws.small_world()).holds

def test_a_loss_that_draws_has_a_slope():
    "The same draws at either side of a difference; what is cut by float() is caught all the same."
    class Noisy(Method):
        cut: bool = False
        def loss(self, features, generator):
            noise = torch.randn(features.shape, generator=generator).to(features)
            noisy = torch.dropout(features, .5, True) + noise*torch.rand_like(features) + random.random()
            value = .1*noisy.square().mean()
            return float(value) if self.cut else value
    assert laws.check_slope(Noisy(), laws.small_world()).holds
    assert laws.check_slope(Noisy(cut=True), laws.small_world()).holds is False

@pytest.mark.parametrize('stop', [lambda v: v.data, torch.Tensor.detach, torch.detach])
def test_a_gradient_may_be_stopped_on_purpose(stop):
    class Stops(Method):
        def loss(self, features): return (features*stop(features)).mean()
    assert 'on purpose' in laws.check_slope(Stops(), laws.small_world()).reason

def test_a_tie_is_no_order():
    report = laws.check(Krum()) # of four clients, two are nearest to each other
    assert report.ok and 'a tie' in report.rows['order'].reason, report

def test_after_the_check_the_module_is_as_before():
    assert not mine_wrong.ANCHOR and laws.check(mine_wrong.Anchored()).broken == ['repeats'] and not mine_wrong.ANCHOR

@pytest.mark.slow
def test_a_method_that_is_off_is_fedavg():
    assert laws.check(FedProx(), off=FedProx(mu=0.)).rows['off'].holds
    assert laws.check(FedProx(), off=FedProx(mu=.1)).broken == ['off']

@pytest.mark.parametrize('begin, said', [(lambda params: params['fc9.weight'], "KeyError: 'fc9.weight'"),
                                         (lambda params: params['head.bias'] @ torch.ones(99), 'RuntimeError')])
def test_a_method_that_cannot_begin_is_reported(begin, said):
    class Lost(Method):
        def init(self, params): return params, {}, dict(first=begin(params))
    report = laws.check(Lost())
    assert report.broken == ['runs'] and said in report.rows['runs'].reason, report

def test_a_class_is_tried_with_its_defaults():
    assert laws.check(FedProx).method == FedProx()
    with pytest.raises(TypeError, match='3 is not a method'): laws.check(3)

# ---- a network and data of one's own ----

class Tokens(nn.Module):
    "Words, their mean, dropout, a head."
    def __init__(self):
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(20, 6), nn.Dropout(.2), nn.Linear(6, 3)
    def forward(self, x):
        z = self.drop(self.words(x).mean(1))
        return z, self.head(z)

def test_on_batches_of_ones_own():
    g = torch.Generator().manual_seed(0)
    data = dict(x=torch.randint(0, 20, (3, 2, 5, 4), generator=g), y=torch.randint(0, 3, (3, 2, 5), generator=g))
    net = Tokens()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    report = laws.check(FedProx(), net, data)
    assert report.ok and not report.doubts and report.rows['executors'].holds is not False, report
    assert (all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
            and net.head.weight.dtype == torch.float32)

@pytest.mark.slow
def test_on_a_task():
    task = load('digits').subset(100, seed=0)
    assert laws.check(FedAvg(), data=task).ok
    assert laws.check(DepthFL(), build('exits_mlp', task, seed=0), task).ok

class Draws(nn.Module):
    "A network that tosses Python's coins, which is no fault of a method."
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        return x, self.head(x)*(1 + .1*random.random())

def test_what_the_network_breaks_is_not_held_against_the_method():
    data = dict(x=torch.randn(3, 2, 5, 4), y=torch.zeros(3, 2, 5, dtype=torch.long))
    report = laws.check(FedProx(), Draws(), data)
    assert report.ok and 'FedAvg breaks it on this network too' in report.rows['sealed'].reason, report

@pytest.mark.parametrize('model, data, said', [
    (nn.Linear(2, 2), None, 'needs data'),
    (None, dict(x=torch.ones(1)), r"got \['x'\] and no network")])
def test_worlds_that_are_none(model, data, said):
    with pytest.raises(TypeError, match=said): laws.check(FedAvg(), model, data)

# ---- the command ----

def command(*argv):
    try: main(['check', *map(str, argv)])
    except SystemExit as e: return e.code
    return 0

def test_the_command(tmp_path, capsys):
    (tmp_path/'helping.py').write_text('SCALE = .1\n', encoding='utf-8')
    file = tmp_path/'mine_own.py'
    file.write_text('''from fedlit.method import Method
from fedlit.methods import FedDecorr
from helping import SCALE
class Fine(Method):
    mu: float = SCALE
    def loss(self, features): return self.mu*features.square().mean()
''', encoding='utf-8')
    assert command(file) == 0
    assert 'Fine(mu=0.1): ' in capsys.readouterr().out
    assert command(file, '--method', 'Fine(mu=2.0) + FedDecorr()', '--data', 'digits') == 0
    assert 'Fine(mu=2.0) + FedDecorr(beta=0.1' in capsys.readouterr().out
    with file.open('a') as f:
        f.write('class Needs(Fine):\n    nu: float = None\n'
                '    def __post_init__(self): assert self.nu is not None, "nu must be given"\n')
    assert command(file) == 1
    assert ('Needs was not tried: AssertionError: nu must be given; put a value into the file, mine = Needs(...)'
            in capsys.readouterr().out)
    with file.open('a') as f: f.write('mine = Needs(nu=1.)\n')
    assert command(file) == 0
    assert 'Needs(mu=0.1, nu=1.0): ' in capsys.readouterr().out

def test_the_command_ends_with_one_where_a_law_is_broken(capsys):
    assert command(HERE/'mine_wrong.py', '--method', 'Vector()') == 1
    assert 'runs         BROKEN' in capsys.readouterr().out

@pytest.mark.parametrize('text, said', [
    ('x = 1\n', 'defines no method'),
    ('x = \n', 'SyntaxError'),
    ('x = 1\ny = x/0\n', 'line 2: ZeroDivisionError'),
    ('from fedlit.method import Method\nclass M(Method):\n    def loos(self): return 0.\n',
     'line 2: TypeError: M.loos is not a hook; did you mean loss?')])
def test_files_that_cannot_be_tried(tmp_path, text, said):
    file = tmp_path/f'mine_{abs(hash(text))}.py'
    file.write_text(text, encoding='utf-8')
    assert said in command(file)

def test_a_file_that_is_not_there(): assert 'there is no file nowhere.py' in command('nowhere.py')

@pytest.mark.slow
def test_a_method_that_refuses_batchnorm_is_tried_without():
    for m in (DP(clip=.1), DPSGD()): assert (report := laws.check(m)).ok, report
