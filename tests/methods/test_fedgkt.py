"FedGKT against a loop with dictionaries from an image's number to what was said of it."
import copy, math
from dataclasses import replace
import pytest, torch, torch.nn.functional as F
from torch import nn
from fedlit.batches import batches_of
from fedlit.data import Flip, load
from fedlit.ground.draws import seed_of
from fedlit.local import SGD, Adam, Local, Rates
from fedlit.methods.fedgkt import fedgkt, imitation
from fedlit.models import build, wrap
from fedlit.partition import dirichlet
from by_hand import descend

TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train[:400], 4, .5, seed=0)
LOCAL = Local(epochs=2, batch_size=16, lr=.05, momentum=.9, weight_decay=1e-3)

def kl(student, teacher, T):
    "Sum by sum."
    out = 0.
    for s, t in zip(student, teacher):
        p, q = (t/T).exp()/(t/T).exp().sum(), (s/T).exp()/(s/T).exp().sum()
        out = out + T*T*(p*(p/q).log()).sum()
    return out/len(student)

def test_imitation_sum_by_sum():
    a, b = torch.randn(3, 4, dtype=torch.double), torch.randn(3, 4, dtype=torch.double)
    assert math.isclose(imitation(a, b, 3.).item(), kl(a, b, 3.).item(), rel_tol=1e-9)
    assert abs(imitation(a, a, 2.).item()) < 1e-12

def sgd(net): return torch.optim.SGD(net.parameters(), LOCAL.lr, LOCAL.momentum, weight_decay=LOCAL.weight_decay)

def test_three_rounds_by_hand():
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10))
    small = build('mlp', TASK, seed=0, hidden=(), features=16)
    got, table = fedgkt(small, server, TASK, CLIENTS, 3, LOCAL, seed=5, epochs=2, T=2., alpha=.7)
    nets, deep, said = [copy.deepcopy(small) for _ in CLIENTS], copy.deepcopy(server), {}
    for r in range(3):
        rows = []
        for k, net in enumerate(nets):
            opt, data = sgd(net), batches_of(TASK, CLIENTS, [k], LOCAL, 5, r)
            for t in range(data.counts.shape[1]):
                at = data.index[0, t, :data.counts[0, t]].tolist()
                if not at: continue
                logits = net(TASK.normalise(TASK.x_train[at]))[1]
                loss = F.cross_entropy(logits, TASK.y_train[at])
                if said: loss = loss + .7*kl(logits, torch.stack([said[i] for i in at]), 2.)
                descend(opt, loss)
            with torch.no_grad():
                for i in CLIENTS[k].tolist(): rows.append((i, *(v[0] for v in net(TASK.normalise(TASK.x_train[[i]])))))
        gen, opt = torch.Generator().manual_seed(seed_of('server', 5, r)), sgd(deep)
        orders = [torch.randperm(len(rows), generator=gen) for _ in range(2)]
        for order in orders:
            for some in order.split(16):
                y = TASK.y_train[[rows[j][0] for j in some]]
                mine = deep(torch.stack([rows[j][1] for j in some]))
                loss = F.cross_entropy(mine, y) + .7*kl(mine, torch.stack([rows[j][2] for j in some]), 2.)
                descend(opt, loss)
        with torch.no_grad(): said = {i: deep(z[None])[0] for i, z, _ in rows}
    for a, b in zip([deep, *nets], [got.server, *got.clients]):
        assert max((u - v).abs().max() for u, v in zip(a.parameters(), b.parameters())) < 1e-4
    x = TASK.normalise(TASK.x_test)
    with torch.no_grad(): right = [(deep(n(x)[0]).argmax(1) == TASK.y_test).double().mean() for n in nets]
    assert abs(sum(right)/4 - table.server.iloc[-1]) < .02 and table['round'].tolist() == [1, 2, 3]

def test_nothing_of_the_callers_networks_changes_and_a_seed_repeats():
    server, small = nn.Linear(16, 10), build('mlp', TASK, seed=0, hidden=(), features=16, norm='batch')
    before = copy.deepcopy([server.state_dict(), small.state_dict()])
    tables = [fedgkt(small, server, TASK, CLIENTS, 2, Local(), seed=s)[1] for s in (0, 0, 1)]
    assert tables[0].equals(tables[1]) and not tables[0].equals(tables[2])
    for a, b in zip(before, [server.state_dict(), small.state_dict()]): assert all(torch.equal(a[k], b[k]) for k in a)

def test_what_is_said_of_an_image_is_of_the_image_that_is_trained_on():
    torch.manual_seed(0)
    server, small = nn.Linear(16, 10), build('mlp', TASK, seed=0, hidden=(), features=16)
    flipped = replace(TASK, augment=(Flip(),))
    nets = [fedgkt(small, server, task, CLIENTS, 2, LOCAL)[0].clients for task in (TASK, flipped)]
    for one, other in zip(*nets):
        assert all(torch.equal(u, v) for u, v in zip(one.parameters(), other.parameters()))

def test_clients_and_server_train_as_local_says():
    "The learning rate of the round, and the optimiser: two steps of Adam, by hand."
    torch.manual_seed(0)
    server, small = nn.Linear(16, 10), build('mlp', TASK, seed=0, hidden=(), features=16)
    local = Local(epochs=1, batch_size=500, lr=Rates((.01, .001)), optimizer=Adam())
    got, _ = fedgkt(small, server, TASK, CLIENTS, 2, local, alpha=0.)
    net = copy.deepcopy(small)
    for lr in (.01, .001): # the optimiser begins anew in every round
        opt = torch.optim.Adam(net.parameters(), lr)
        F.cross_entropy(net(TASK.normalise(TASK.x_train[CLIENTS[0]]))[1], TASK.y_train[CLIENTS[0]]).backward()
        opt.step()
        opt.zero_grad()
    assert max((u - v).abs().max() for u, v in zip(net.parameters(), got.clients[0].parameters())) < 1e-5
    with pytest.raises(ValueError, match='take kept=False'):
        fedgkt(small, server, TASK, CLIENTS, 1, Local(optimizer=SGD(kept=True)))

@pytest.mark.parametrize('wrong, right', [
    (dict(T=0.), 'positive'), (dict(T=float('nan')), 'positive'), (dict(epochs=0), 'at least 1'),
    (dict(alpha=-1.), 'at least 0'), (dict(alpha=float('nan')), 'at least 0')], ids=str)
def test_what_it_cannot_be_is_refused(wrong, right):
    small, server = build('mlp', TASK, seed=0, hidden=(), features=16), nn.Linear(16, 10)
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f'{name}={value}, but it must be {right}'):
        fedgkt(small, server, TASK, CLIENTS, 1, LOCAL, **wrong)

def test_what_a_network_draws_is_determined_by_the_seed():
    net = lambda *size: nn.Sequential(nn.Linear(*size), nn.Dropout(.5))
    small, server = wrap(nn.Sequential(nn.Flatten(), net(64, 16), nn.Linear(16, 10)), '2'), net(16, 10)
    before, got = torch.random.get_rng_state(), []
    for _ in range(2):
        got.append(fedgkt(small, server, TASK, CLIENTS, 2, LOCAL)[0].server[0].weight)
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(1)
        before = torch.random.get_rng_state()
    assert torch.equal(*got)

def test_clients_may_be_masks_as_for_federate():
    server, small = nn.Linear(16, 10), build('mlp', TASK, seed=0, hidden=(), features=16)
    masks = (torch.zeros(len(TASK.y_train), dtype=torch.bool).index_fill(0, c.sort().values, True) for c in CLIENTS)
    as_masks, as_numbers = (fedgkt(small, server, TASK, c, 2, LOCAL)[1]
                            for c in (masks, [c.sort().values for c in CLIENTS]))
    assert as_masks.equals(as_numbers)
