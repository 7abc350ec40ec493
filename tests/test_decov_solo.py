"DeCov and Structured-DeCov by loops over pairs; SOLO and the centralised reference."
import copy
import pytest, torch, torch.nn.functional as F
from fedlit.data import load
from fedlit.methods import SOLO, DeCov, StructuredDeCov, centralised
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.round import Local
from fedlit.run import batches_of, federate

def pairs(h, group):
    "Half the squared covariances of pairs of features in different groups, and mean squared correlation within."
    n, d = h.shape
    mean = [sum(h[i][a] for i in range(n))/n for a in range(d)]
    cov = [[sum((h[i][a]-mean[a])*(h[i][b]-mean[b]) for i in range(n))/n for b in range(d)] for a in range(d)]
    between = sum(cov[a][b]**2 for a in range(d) for b in range(d) if a != b and group(a) != group(b))/2
    inside = [cov[a][b]**2/(cov[a][a]*cov[b][b]) for a in range(d) for b in range(d) if group(a) == group(b)]
    return float(between), float(sum(inside)/len(inside))

@pytest.mark.parametrize('n,d', [(5, 6), (9, 4)])
def test_decov(n, d):
    h = torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(n))
    assert DeCov(weight=.3).loss(h).item() == pytest.approx(.3*pairs(h, lambda a: a)[0], abs=1e-5)

@pytest.mark.parametrize('groups,within', [(2, 0.), (3, 0.), (2, .5)])
def test_structured_decov(groups, within):
    h = torch.randn(8, 6, dtype=torch.double, generator=torch.Generator().manual_seed(groups))
    between, inside = pairs(h, lambda a: a//(6//groups))
    assert (StructuredDeCov(weight=.3, groups=groups, within=within).loss(h).item()
            == pytest.approx(.3*(between - within*inside), abs=1e-5))

def test_solo_clients_train_alone():
    "Each client's network is what a torch loop makes of its data; the server's does not move."
    task = load('digits')
    parts, net, local = (dirichlet(task.y_train, 4, .5, seed=0),
                         build('mlp', task, seed=0, hidden=(8,), features=8), Local(epochs=1, lr=.05))
    run = federate(net, task, parts, SOLO(), rounds=2, local=local, progress=False)
    assert all(torch.equal(v, run.state.params[k]) for k, v in net.named_parameters())
    for k in range(4):
        mine = copy.deepcopy(net)
        for r in range(2):
            opt, seen = (torch.optim.SGD(mine.parameters(), lr=.05, momentum=.9),
                         batches_of(task, parts, [k], local, 0, r))
            for t in range(seen.counts.shape[1]):
                x, y = seen.at(t, [0], int(seen.counts[0, t]))
                opt.zero_grad()
                F.cross_entropy(mine(x[0])[1], y[0]).backward()
                opt.step()
        assert max((v - run.state.personal[n][k]).abs().max().item() for n, v in mine.named_parameters()) < 1e-5

def test_centralised_in_pieces():
    task = load('digits')
    net = build('mlp', task, seed=0, hidden=(8,), features=8)
    run = centralised(net, task, epochs=4, rounds=2, local=Local(lr=.05), progress=False)
    assert len(run.history) == 2 and run.history.accuracy.iloc[-1] > .5 and run.settings['clients'] == 1
    with pytest.raises(ValueError, match='must divide the 4 epochs'):
        centralised(net, task, epochs=4, rounds=3, progress=False)
