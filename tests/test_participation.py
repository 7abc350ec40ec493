"Who takes part: drawn from the seed, resumed exactly, the same in all executors, refused where it does not fit."
import warnings
import numpy as np, pytest, torch
from fedlit.after.report import took_part
from fedlit.data import load
from fedlit.methods import FedAvg, FedPer, FedProx
from fedlit.models import build
from fedlit.parse import value
from fedlit.participation import (Available, BySize, Participation, PowerOfChoice, RoundRobin, Uniform, draw_clients,
                                  many)
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.run import federate
from fedlit.ground.draws import rng
from fedlit.state import start
from fedlit.server import network_for
from fedlit.measure import evaluate

TASK = load('digits').subset(240, seed=0)
CLIENTS = dirichlet(TASK.y_train, 6, .5, seed=0)
ROWS = '110011', '001100', '111111'
WAYS = [Uniform(.5), BySize(.4), RoundRobin(.34), Available(.5, ROWS), PowerOfChoice(.34, candidates=4)]

class Traced(Participation):
    "Remembers whom it drew."
    of: object = .5
    def draw(self, clients, sizes, round, rng, losses):
        inner = Uniform(self.of) if isinstance(self.of, float) else self.of
        offer = dict(clients=clients, sizes=sizes, round=round, rng=rng, losses=losses)
        names = inner.draw.__code__.co_varnames[1:inner.draw.__code__.co_argcount]
        SEEN.append(sorted(map(int, who := inner.draw(**{k: offer[k] for k in names}))))
        return who

SEEN = []

def drawn(way, rounds=4, **kw):
    SEEN.clear()
    run = federate(build('mlp', TASK, seed=0, hidden=(8,), features=4), TASK, CLIENTS, kw.pop('method', FedAvg()),
                   rounds, Local(epochs=1), participation=Traced(way), progress=False, **kw)
    return run, [*SEEN]

def test_a_number_is_the_draw_that_it_was():
    "As it was before there were ways: the generator of `clients`, a choice without replacement, sorted."
    for n, share, seed, r in ((10, .3, 0, 0), (10, .3, 0, 1), (7, .5, 3, 2), (100, .1, 1, 9), (5, 1., 0, 7)):
        k = max(1, int(np.floor(share*n + .5)))
        old = sorted(rng('clients', seed, r).choice(n, k, replace=False).tolist())
        assert draw_clients(n, share, seed, r) == draw_clients(n, Uniform(share), seed, r) == old

@pytest.mark.parametrize('way', WAYS, ids=repr)
def test_a_way_prints_as_the_call_that_makes_it(way):
    assert eval(repr(way)) == way == value(repr(way))

@pytest.mark.parametrize('way', WAYS, ids=repr)
def test_a_run_that_goes_on_asks_those_whom_the_whole_run_asks(way, tmp_path):
    whole, all_of_them = drawn(way)
    _, first = drawn(way, rounds=2, checkpoint=tmp_path/'run.safetensors')
    again, rest = drawn(way, checkpoint=tmp_path/'run.safetensors')
    assert first + rest == all_of_them and len({*map(tuple, all_of_them)}) > 1
    assert all(torch.equal(v, again.state.params[k]) for k, v in whole.state.params.items())
    assert whole.settings['participation'] == repr(Traced(way))
    with pytest.raises(ValueError, match='another run.*participation'):
        drawn(.3, checkpoint=tmp_path/'run.safetensors', rounds=5)

@pytest.mark.parametrize('executor', ['threads', 'vmap'])
def test_who_takes_part_does_not_depend_on_the_executor(executor):
    assert drawn(WAYS[-1], executor=executor)[1] == drawn(WAYS[-1], executor='loop')[1]

def test_round_robin_asks_everybody_equally_often():
    who = sum((draw_clients(6, RoundRobin(.34), 0, r) for r in range(9)), [])
    assert np.bincount(who).tolist() == [3]*6

def test_only_those_who_are_there():
    for r in range(12):
        here = [k for k, c in enumerate(ROWS[r % 3]) if c == '1']
        assert {*draw_clients(6, Available(.5, ROWS), 0, r)} <= {*here}
        assert len(draw_clients(6, Available(.5, ROWS), 0, r)) == many(.5, len(here))

def test_by_size_is_in_proportion_where_one_is_drawn():
    who = sum((draw_clients(4, BySize(.25), 0, r, [10, 20, 30, 40]) for r in range(4000)), [])
    assert np.allclose(np.bincount(who)/4000, [.1, .2, .3, .4], atol=.025)

@pytest.mark.parametrize('method', [FedAvg(), FedPer() + FedProx()], ids=repr)
def test_power_of_choice_takes_the_largest_losses_of_the_servers_network(method):
    model = build('mlp', TASK, seed=0, hidden=(8,), features=4)
    _, (who, *_) = drawn(PowerOfChoice(.34, candidates=6), method=method)
    state = start(method, model, 6)
    loss = [evaluate(model, TASK.x_train[c], TASK.y_train[c], prepare=TASK.normalise,
                     state=network_for(method, state))['loss'] for c in CLIENTS]
    assert who == sorted(np.argsort(loss)[-2:].tolist())

class Wrong(Participation):
    who: tuple = ()
    def draw(self): return self.who

@pytest.mark.parametrize('way,word', [
    (Wrong(()), 'at least one'), (Wrong((0, 0)), r'\[0, 0\]'), (Wrong((6,)), '0 to 5'), (Wrong((-1,)), '0 to 5'),
    (Available(1., ('11',)), 'a row has 2 clients, but there are 6'),
    (PowerOfChoice(.5, candidates=2), 'from 3, who take part, to 6'), (PowerOfChoice(.5, candidates=9), 'candidates=9'),
    (0., 'in \\(0, 1\\]'), ('all', "participation='all'"), (True, 'participation=True')])
def test_what_does_not_fit_is_refused_before_the_first_round(way, word):
    with pytest.raises(ValueError, match=word):
        federate(build('mlp', TASK, seed=0), TASK, CLIENTS, FedAvg(), 2, participation=way, progress=False)

@pytest.mark.parametrize('make,word', [
    (lambda: Uniform(0), 'share=0'), (lambda: RoundRobin(1.5), 'share=1.5'), (lambda: BySize('x'), "share='x'"),
    (lambda: Available(.5, ('10', '001')), 'rows='), (lambda: Available(.5, ('00',)), 'rows='),
    (lambda: Available(.5, ('12',)), 'rows='), (lambda: PowerOfChoice(.1, candidates=-1), 'candidates=-1')])
def test_a_way_that_cannot_be_is_refused_by_name(make, word):
    with pytest.raises(ValueError, match=word): make()

def test_one_number_is_one_client_and_nothing_is_refused():
    class Turn(Participation):
        def draw(self, round, clients): return round % clients if round else np.int64(0)
    class Forgot(Participation):
        def draw(self, clients): pass
    assert [draw_clients(3, Turn(), 0, r) for r in range(4)] == [[0], [1], [2], [0]]
    with pytest.raises(ValueError, match=r'drew the clients \[None\]; they must be'): draw_clients(3, Forgot(), 0, 0)

def test_what_is_drawn_must_be_whole_numbers():
    class Half(Participation):
        def draw(self, clients): return [1.5]
    with pytest.raises(ValueError, match=r'drew the clients \[1.5\]; they must be different numbers'):
        draw_clients(6, Half(), 0, 0)
    class Tensors(Participation):
        def draw(self, clients): return torch.tensor([3, 1])
    assert draw_clients(6, Tensors(), 0, 0) == [1, 3]

CALLS = []

class Elsewhere(Participation):
    "It is asked with the numbers that `source` names."
    source: str = 'torch'
    def draw(self, clients, rng, round):
        CALLS.append(round)
        many = dict(torch=lambda: torch.randperm(clients).numpy(), numpy=lambda: np.random.permutation(clients),
                    calls=lambda: np.roll(range(clients), len(CALLS)), rng=lambda: rng.permutation(clients))
        return many[self.source]()[:3]

@pytest.mark.parametrize('source', ['torch', 'numpy', 'calls', 'rng'])
def test_a_rule_that_draws_from_elsewhere_is_noticed(source):
    torch.manual_seed(0)
    np.random.seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        drawn = [draw_clients(20, Elsewhere(source), 0, r) for r in range(2)]
        draw_clients(4, Elsewhere(source), 0, 0)
    assert sum('from rng only' in str(w.message) for w in said) == (0 if source == 'rng' else 2)
    torch.manual_seed(0)
    if source == 'torch': assert drawn[:2] == [sorted(torch.randperm(20)[:3].tolist()) for _ in range(2)] # as it was

class Short(Participation):
    "Those who have least to do, and one that the seed picks."
    def draw(self, clients, steps, round, seed):
        return {*sorted(range(clients), key=lambda k: (steps(k, round), k))[:2], (seed + round) % clients}

def test_a_rule_of_ones_own_may_ask_how_much_there_is_to_do(tmp_path):
    run = federate(build('mlp', TASK, seed=0, hidden=(8,), features=4), TASK, CLIENTS, FedAvg(), 3, Local(epochs=1),
                   participation=Short(), progress=False)
    least = sorted(range(6), key=lambda k: (-(-len(CLIENTS[k])//32), k))[:2]
    assert took_part(run) == [sorted({*least, r}) for r in range(3)]
