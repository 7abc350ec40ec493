"Every method learns the digits under alpha = 0.5."
import pytest, torch
from fedlit import methods, run as runs
from fedlit.data import load
from fedlit.models import build
from fedlit.parse import methods_by_name
from fedlit.partition import dirichlet
from fedlit.local import Local

TASK = load('digits')
ORDER = torch.randperm(len(TASK.y_train), generator=torch.Generator().manual_seed(0))
PROXY, REST = TASK.normalise(TASK.x_train[ORDER[:240]]), ORDER[240:]
CLIENTS = [REST[c] for c in dirichlet(TASK.y_train[REST], 6, .5, seed=0)]
HALVES = dict(rates=(1., .5))
CALL = dict(FedAvgM=dict(form='paper', momentum=.5),
            **{n: HALVES for n in ('HeteroFL', 'FedRolex', 'FederatedDropout', 'FjORD', 'FedDSE', 'FIARSE')},
            FedGSE=dict(HALVES, pool=240), Krum=dict(attackers=0, best=4), DP=dict(clip=9., noise=1e-3),
            DPSGD=dict(clip=9., noise=1e-3))
# parts that mean something beside a method that cuts
TRIMMINGS = 'Scaler', 'MaskedCE', 'OwnLabels', 'Clip', 'OldCounts'

@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(methods_by_name()))
def test_converges_on_digits(name):
    m = methods_by_name()[name](**CALL.get(name, {}))
    if name in TRIMMINGS: m = methods.HeteroFL(**HALVES) + m
    net = (build('exits_mlp', TASK, seed=0) if name == 'DepthFL' else
           build('mlp', TASK, seed=0, hidden=(64,), features=64, norm='none' if name in ('DP', 'DPSGD') else 'batch'))
    run = runs.federate(net, TASK, CLIENTS, m, rounds=8, local=Local(epochs=3, batch_size=32), progress=False,
                        proxy=PROXY, tests=runs.tests_of(TASK, CLIENTS), evaluate_every=8, statistics='recomputed')
    last = run.history.iloc[-1]
    many = run.state.personal or name == 'IFCA' # networks, the server's no more than one of them
    assert last['personal' if many else 'accuracy'] > .85, (name, last[['accuracy', 'personal']])
    if name in ('DP', 'DPSGD'): # a loss has no protection, so none leaves
        assert 'train_loss' not in run.history
    else:
        assert run.history.train_loss.iloc[-1] < run.history.train_loss.iloc[0]
