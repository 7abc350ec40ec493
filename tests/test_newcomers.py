"Clients that nobody trained, the worst tenth, and rounds to a target, each against a loop of its own."
from dataclasses import replace
import warnings, numpy as np, pytest, torch
from fedlit.data import load
from fedlit.local import Local
from fedlit.methods import FedAvg, FedBN, FedPer, FedProx
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.result import Run
from fedlit.run import federate
from fedlit.scores import tests_of as own_tests, worst
from by_hand import drawn, sgd

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, 6, .5, seed=0)
TESTS = own_tests(TASK, CLIENTS)
LOCAL = Local(epochs=1, lr=.1, momentum=0.)

def go(method=None, rounds=3, without=(4, 1), norm='none', **kw):
    return federate(build('mlp', TASK, seed=0, norm=norm), TASK, CLIENTS, method or FedAvg(), rounds, LOCAL,
                    without=without, device='cpu', progress=False, **kw)

def read(net, at): return (net(TASK.normalise(TASK.x_test[at]))[1].argmax(1) == TASK.y_test[at]).float().mean().item()

def test_before_is_the_server_and_after_is_a_loop_of_sgd():
    run, steps = go(), 7
    seen = run.newcomers(steps)
    assert seen.client.tolist() == [1, 4] and seen.samples.tolist() == [len(CLIENTS[1]), len(CLIENTS[4])]
    assert seen['test samples'].tolist() == [len(TESTS[1]), len(TESTS[4])]
    for (_, row), k, i in zip(seen.iterrows(), (1, 4), range(2)):
        assert row.before == pytest.approx(read(run.model.eval(), TESTS[k]), abs=1e-6)
        own = sgd(run.model, drawn(TASK, [CLIENTS[1], CLIENTS[4]], i, replace(LOCAL, steps=steps)), lr=LOCAL.lr)
        assert row.after == pytest.approx(read(own.eval(), TESTS[k]), abs=1e-6)

@pytest.mark.parametrize('method', [FedPer(), FedBN(), FedProx(mu=.1)], ids=repr)
def test_the_run_stays_as_it_was_and_more_steps_help(method, tmp_path):
    run = go(method, norm='batch')
    was = {k: v.clone() for k, v in run.model.state_dict().items()}
    few, many = run.newcomers(1), run.newcomers(60)
    assert all(torch.equal(v, was[k]) for k, v in run.model.state_dict().items())
    assert few.before.tolist() == many.before.tolist() and many.after.mean() > many.before.mean()
    back = Run.load(run.save(tmp_path/'run'))
    again = back.newcomers(60, task=TASK, clients=CLIENTS, local=LOCAL)
    assert again.equals(many)

def smooth(logits, y): return torch.nn.functional.cross_entropy(logits, y, label_smoothing=.9)

def test_what_a_file_does_not_hold_is_asked_for(tmp_path):
    run = go(rounds=1, criterion=smooth, tests=TESTS[::-1])
    back = Run.load(run.save(tmp_path/'run'))
    with pytest.warns(UserWarning, match='another criterion.*pass criterion=.*pass tests=') as seen:
        back.newcomers(1, task=TASK, clients=CLIENTS)
    assert len(seen) == 1
    with pytest.warns(UserWarning, match='another criterion'): back.federation(task=TASK, clients=CLIENTS, tests=TESTS)
    with pytest.warns(UserWarning, match='another partition'):
        back.newcomers(1, task=TASK, clients=CLIENTS[::-1], criterion=smooth, tests=TESTS[::-1])
    with pytest.raises(ValueError, match='another criterion; pass criterion='):
        back.without(3, task=TASK, clients=CLIENTS, tests=TESTS)
    as_lists = dict(clients=(c.tolist() for c in CLIENTS), tests=[t.tolist() for t in TESTS[::-1]])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert back.newcomers(5, task=TASK, criterion=smooth, **as_lists).equals(run.newcomers(5))

def test_who_is_not_left_out_is_no_newcomer():
    with pytest.raises(ValueError, match=r'all clients of this run took part; federate\(..., without='):
        go(without=(), rounds=1).newcomers()
    assert go(rounds=1).newcomers(2, without=(0,)).client.tolist() == [0] # it may be asked of others too

def test_the_worst_tenth():
    v = np.random.default_rng(0).random(200)
    assert worst(v) == pytest.approx(np.sort(v)[:20].mean()) and worst(v, 1) == pytest.approx(v.mean())
    assert worst([.5, float('nan'), .7]) == .5 and np.isnan(worst([]))
    for share in (0, -1, 1.1):
        with pytest.raises(ValueError, match=f'share={share}'): worst(v, share)

def test_rounds_to_a_target():
    run = go(rounds=6, evaluate_every=2)
    h = run.history.dropna(subset='accuracy')
    for target in h['accuracy']:
        assert run.rounds_to(target) == next(r for r, a in zip(h['round'], h['accuracy']) if a >= target)
    assert run.rounds_to(1.01) is None and run.rounds_to(-1, 'loss', lowest=True) is None
    assert run.rounds_to(h['loss'].iloc[0], 'loss', lowest=True) == 2
    assert run.rounds_to(.5, 'personal') is None # a column that there might be
    with pytest.raises(ValueError, match="no column 'f2'"): run.rounds_to(.5, 'f2')
