"Every method learns the digits under alpha = 0.5."
import pytest, torch
from fedlit.data import load
from fedlit.methods import FedPara, pFedPara, StructuredDeCov, FedDecomp, FedAvgM
from fedlit.models import build
from fedlit.parse import known
from fedlit.partition import dirichlet
from fedlit.round import Local
from fedlit.run import federate
from fedlit import run as runs

TASK = load('digits')
ORDER = torch.randperm(len(TASK.y_train), generator=torch.Generator().manual_seed(0))
PROXY, REST = TASK.normalise(TASK.x_train[ORDER[:240]]), ORDER[240:]
CLIENTS = [REST[c] for c in dirichlet(TASK.y_train[REST], 6, .5, seed=0)]
CALL = dict(FedAvgM=FedAvgM(form='paper', momentum=.5))

@pytest.mark.parametrize('name', sorted(known()))
def test_converges_on_digits(name):
    m = CALL.get(name) or known()[name]()
    net = build('mlp', TASK, seed=0, hidden=(64,), features=64, norm='batch')
    run = federate(net, TASK, CLIENTS, m, rounds=8, local=Local(epochs=3, batch_size=32), progress=False, proxy=PROXY, tests=runs.tests_of(TASK, CLIENTS), evaluate_every=8, statistics='recomputed')
    last = run.history.iloc[-1]
    own = bool(run.state.personal)
    score = last['personal'] if own else last['accuracy']
    assert score > .85, (name, last[['accuracy', 'personal']])
    assert run.history.train_loss.iloc[-1] < run.history.train_loss.iloc[0]
