"One network that is tested on the images of many clients says what it says on each client's by themselves."
import warnings
import pytest, torch
from torch import nn
from fedlit.compare import choose
from fedlit.data import load
from fedlit.local import Local
from fedlit.methods import MOON, FedAvg, FedBN, FedDecomp, FedProto, FedPer
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.run import federate
from fedlit import scores
from fedlit.scores import MANY, queue_scores, tests_of as own_tests
from fedlit.state import start

TASK = load('digits')
PARTS = [torch.arange(0, 40), torch.arange(0), torch.arange(20, 70), torch.tensor([358]*1200)]

@pytest.mark.parametrize('metrics', [None, dict(share=lambda logits, y: (logits.argmax(1) == y).double().mean())])
def test_parts_are_tests_by_themselves(metrics):
    model = build('mlp', TASK, seed=0, norm='batch')
    test, state = scores.Tester(model, TASK, False, metrics), start(FedAvg(), model, 4)
    net = state.params, state.buffers
    alone = [test.ask(net, at) for at in PARTS]
    assert not test.draws # which the first test has found
    together = queue_scores(FedAvg(), test, state, PARTS, [None]*4)
    for a, b in zip(alone, together):
        assert len(a) == len(b) and all(torch.allclose(u, v, atol=1e-5) for u, v in zip(a, b))
    assert [len(b) for b in together][1] == 0
    mine = queue_scores(FedAvg(), test, state, PARTS, [2, 0, 1, 3]) # whose networks are the server's
    assert all(torch.equal(u, v) for a, b in zip(together, mine) for u, v in zip(a, b))

def test_a_network_that_draws_is_tested_client_by_client():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)
        def forward(self, x): return (z := x.flatten(1) + torch.randn(len(x), 64)), self.head(z)
    model = Noisy()
    test, state = scores.Tester(model, TASK, False), start(FedAvg(), model, 4)
    alone = [test.ask((state.params, state.buffers), at) for at in PARTS]
    for a, b in zip(alone, queue_scores(FedAvg(), test, state, PARTS, [None]*4)):
        assert all(torch.equal(u, v) for u, v in zip(a, b))

@pytest.mark.parametrize('method', [FedAvg(), MOON(), FedBN(), FedDecomp(lora_epochs=1), FedProto(rule='nearest')],
                         ids=repr)
def test_the_history_is_what_each_network_says(method):
    clients = dirichlet(TASK.y_train[:400], 4, .5, seed=0)
    tests = own_tests(TASK, clients)
    run = federate(build('mlp', TASK, seed=0, norm='batch'), TASK, clients, method, 2, Local(epochs=2), tests=tests,
                   progress=False)
    right = [(run.logits(TASK.x_test[at], client=k).argmax(1) == TASK.y_test[at]).double().mean()
             for k, at in enumerate(tests)]
    assert abs(torch.stack(right).mean() - run.history.personal.iloc[-1]) < 1e-9

def test_less_is_better_of_losses_and_squared_errors():
    less = lambda column, first='accuracy': scores.less_is_better(column, {first, 'loss', 'validation', 'personal'})
    assert all(map(less, ('loss', 'train_loss', 'loss_before')))
    assert not any(map(less, ('accuracy', 'accuracy_before', 'validation', 'personal', 'drift')))
    assert all(less(k, 'mse') for k in ('mse', 'mse_before', 'validation', 'personal', 'personal_before', 'loss'))
    run = federate(build('mlp', TASK, seed=0), TASK, [torch.arange(300)], FedAvg(), 4, progress=False)
    assert run.best('loss')['loss'] == run.history.loss.min() < run.history.loss.iloc[0] - .1
    assert run.rounds_to(run.history.loss.iloc[0] - .1, 'loss') > 1

def test_of_a_metric_of_your_own_nobody_knows_whether_less_is_better():
    mae = lambda z, y: (z.argmax(1) - y).abs().float().mean()
    m, run = FedAvg(), federate(build('mlp', TASK, seed=0), TASK, [torch.arange(300)], FedAvg(), 2, progress=False,
                                metrics=dict(mae=mae))
    runs = run.history.assign(method=repr(m), seed=0, validation=.5, mae_validation=run.history.mae)
    asks = dict(mae=lambda **kw: run.best('mae', **kw), mae_before=lambda **kw: run.rounds_to(0., 'mae_before', **kw),
                mae_validation=lambda **kw: choose([m], runs, 'mae_validation', **kw),
                validation=lambda **kw: choose([m], runs.drop(columns='accuracy'), **kw)) # of which measure?
    for column, ask in asks.items():
        with pytest.warns(UserWarning, match=f"nothing says whether .* '{column}' is better, so more counts"): ask()
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            for lowest in (True, False): ask(lowest=lowest)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        choose([m], runs)
        less = lambda column: scores.less_is_better(column, run.history)
        assert [*map(less, ('f1_personal_before', 'f1_validation_personal', 'personal', 'mse'))] == [False]*3 + [True]
    assert run.best('mae', lowest=True)['mae'] == run.history.mae.min()

def test_of_many_clients_a_sample_is_tested():
    "By default a thousand; the columns are means over those, and the same as if the others were there."
    task = load('digits')
    parts = list(torch.arange(1436).split(1))
    few = own_tests(task, parts, most=7)
    asked = [k for k, t in enumerate(few) if len(t)]
    assert len(asked) == 7 and len(few) == len(parts)
    whole = own_tests(task, parts)
    assert all(torch.equal(few[k], whole[k]) for k in asked) # a client's draw is its own
    assert sum(len(t) > 0 for t in own_tests(task, parts, most=MANY)) == MANY
    clients = list(torch.arange(1430).split(130))
    net = build('mlp', task, seed=0, hidden=(8,))
    run = lambda tests: federate(net, task, clients, FedPer(), 2, Local(epochs=1), progress=False, tests=tests,
                                 participation=.5)
    own, some = own_tests(task, clients), own_tests(task, clients, most=4)
    with pytest.warns(UserWarning, match='have no test samples'): a = run(some)
    b = run(own)
    table = b.per_client(task, own)
    asked = [k for k, t in enumerate(some) if len(t)]
    assert a.last['personal'] == pytest.approx(table.personal[asked].mean(), abs=1e-6)
    assert all(torch.equal(v, b.state.params[k]) for k, v in a.state.params.items())
