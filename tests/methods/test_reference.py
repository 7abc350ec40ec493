"FedAvg, and the two ends: clients alone, and one training without clients."
import copy
import pytest, torch
from torch.nn import functional as F
from fedlit.data import load
from fedlit.methods import SOLO, FedAvg
from fedlit.models import build
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.batches import batches_of
from fedlit.run import train_centrally, federate
from by_hand import EXECUTORS, SIZES, batches, classifier, classify, descend, gap

# ---- FedAvg ----

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('weights', [SIZES, torch.ones(3), torch.tensor([0., 1., 0.])])
def test_one_full_batch_step_is_gradient_descent_on_the_weighted_objective(executor, weights):
    model, data = classifier(), batches((1, 1, 1), samples=7)
    state = classify(FedAvg(), 1, model, data, Local(lr=.3, momentum=0.), executor, weights)
    p = (weights/weights.sum()).double()
    loss = sum(pk*F.cross_entropy(model(data['x'][k, 0])[1], data['y'][k, 0]) for k, pk in enumerate(p))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = {n: v.detach() - .3*g for (n, v), g in zip(model.named_parameters(), grads)}
    assert gap(state.params, expected) < 1e-7  # weights are float32 in a round

def test_counters_are_averaged_by_data_and_rounded():
    first = classify(FedAvg(), 1, classifier(norm=True)).buffers['norm.num_batches_tracked']
    assert first.dtype == torch.int64 and first.item() == round((12*3 + 9*3 + 4*1)/25) == 3

@pytest.mark.parametrize('n', range(1, 60))
def test_a_counter_on_which_all_agree_is_kept(n):
    "The released codes truncate a float sum here, and lose one for some n."
    model = classifier(norm=True)
    model.norm.num_batches_tracked.fill_(n)
    weights = torch.rand(3, generator=torch.Generator().manual_seed(n)) + .1
    state = classify(FedAvg(), 1, model, batches((2, 2, 2)), weights=weights)
    assert state.buffers['norm.num_batches_tracked'].item() == n + 2

# ---- SOLO and the centralised reference ----

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
                descend(opt, F.cross_entropy(mine(x[0])[1], y[0]))
        assert max((v - run.state.personal[n][k]).abs().max().item() for n, v in mine.named_parameters()) < 1e-5

def test_centralised_in_pieces():
    task = load('digits')
    net = build('mlp', task, seed=0, hidden=(8,), features=8)
    run = train_centrally(net, task, epochs=4, rounds=2, local=Local(lr=.05), progress=False)
    assert len(run.history) == 2 and run.history.accuracy.iloc[-1] > .5 and run.settings['clients'] == 1
    with pytest.raises(ValueError, match='must divide the 4 epochs'):
        train_centrally(net, task, epochs=4, rounds=3, progress=False)
