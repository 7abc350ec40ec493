"Random federations beside a plain loop: torch.optim.SGD, deep copies and a weighted sum."
import copy, random, warnings
import pytest, torch
from torch import nn
from fedlit.data import Task, load
from fedlit.methods import DeCov, FedAvg, FedAvgM, FedBN, FedDecorr, FedProx, HeteroFL, MOON, SCAFFOLD
from fedlit.local import Local
from fedlit.models import Net
from fedlit.participation import draw_clients
from fedlit.run import federate
from by_hand import drawn, sgd
from federation import difference

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore')] # of what cannot be stacked, and of rounding

PICTURES = load('digits').subset(200, seed=0, test=40)
TOKENS = torch.randint(0, 12, (200, 6), generator=torch.Generator().manual_seed(0))
WORDS = Task('words', TOKENS, (TOKENS.sum(1) % 3).long(), TOKENS[:40], (TOKENS.sum(1) % 3)[:40].long(), classes=3)

class Gate(nn.Module):
    "Mixes the samples of a batch as soon as it is open; closed to begin with."
    def __init__(self):
        super().__init__()
        self.open = nn.Parameter(torch.zeros(1))
    def forward(self, x): return x + self.open*(x - x.mean(0))

class Scaled(nn.Module):
    "The gradient that comes back is not that of what was computed."
    def forward(self, x):
        y = x*1.
        if y.requires_grad: y.register_hook(lambda g: .7*g)
        return y

class Bag(nn.Module):
    def __init__(self, **kw):
        super().__init__()
        self.words = nn.Embedding(12, 8, **kw)
    def forward(self, x): return self.words(x).mean(1)

def network(r, task, drops, simple):
    "A random network; with `simple` one whose axes can be found."
    torch.manual_seed(r.randrange(1000))
    act = lambda: r.choice([nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus])()
    norms = [nn.Identity, lambda: nn.BatchNorm1d(12), lambda: nn.LayerNorm(12), lambda: nn.GroupNorm(3, 12)]
    if task is WORDS: first = [Bag(padding_idx=r.choice([None, 0, 11])), nn.Linear(8, 12)]
    elif r.random() < .5: first = [nn.Flatten(), nn.Linear(64, 12)]
    else: first = [nn.Conv2d(1, 3, 3, padding=1), act(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 12)]
    middle = [r.choice(norms[:2] if simple else norms)(), act()]
    if drops: middle.append(nn.Dropout(.3))
    if not simple: middle.append(r.choice([nn.Identity, nn.Identity, Gate, Scaled])())
    return Net(nn.Sequential(*first, *middle), nn.Linear(12, task.classes))

def clients_of(r, task):
    "Two to six clients of unequal sizes, from three samples up."
    order, cuts = torch.randperm(200, generator=torch.Generator().manual_seed(r.randrange(1000))), [0]
    for _ in range(r.randint(2, 6)): cuts.append(cuts[-1] + r.choice([3, 8, 16, 21, 30]))
    return [order[a:b] for a, b in zip(cuts, cuts[1:])]

def by_hand(net, task, clients, local, rounds, participation, prox=0., home=False, beta=None):
    "The server's tensors after some rounds, and for each client what it keeps."
    server = {k: v.clone() for k, v in net.state_dict().items()}
    stays = {f'{m}.{k}' for m, mod in net.named_modules() if home and isinstance(mod, nn.BatchNorm1d)
             for k in mod.state_dict()}
    kept, velocity = [{k: server[k] for k in stays} for _ in clients], None
    least = 2 if any(isinstance(m, nn.BatchNorm1d) for m in net.modules()) else 1
    for t in range(rounds):
        who = draw_clients(len(clients), participation, 0, t)
        ends = []
        for k in who:
            begun = copy.deepcopy(net)
            begun.load_state_dict({**server, **kept[k]})
            def near(mine, x, y, begun=begun):
                for v, was in zip(mine.parameters(), begun.parameters()): v.grad.add_((v - was).detach(), alpha=prox)
            ends.append(sgd(begun, drawn(task, clients, k, local, t, least), grad=near, lr=local.lr,
                            momentum=local.momentum, weight_decay=local.weight_decay).state_dict())
            kept[k] = {n: ends[-1][n] for n in stays}
        shares = torch.tensor([float(len(clients[k])) for k in who])
        shares /= shares.sum()
        step = {k: sum(s*(e[k] - server[k]) for s, e in zip(shares, ends)) for k in server if k not in stays}
        if beta is not None:
            velocity = {k: beta*(velocity[k] if velocity else 0.) + v for k, v in step.items()}
            step = {k: velocity[k] if k in dict(net.named_parameters()) else v for k, v in step.items()}
        server |= {k: server[k] + v for k, v in step.items()}
    return server, kept

def apart(one, two): return max((one[k].double() - two[k].double()).abs().max().item() for k in one
                                if one[k].is_floating_point())

def seeds(some, most): # the rest once a week
    return [*range(some), *(pytest.param(s, marks=pytest.mark.long) for s in range(some, most))]

@pytest.mark.parametrize('seed', seeds(15, 30))
def test_a_random_federation_is_the_plain_loop(seed):
    r = random.Random(seed)
    task = r.choice([PICTURES, PICTURES, WORDS])
    net, clients = network(r, task, drops=False, simple=False), clients_of(r, task)
    normed = any(isinstance(m, nn.BatchNorm1d) for m in net.modules())
    local = Local(epochs=r.choice([1, 2]), batch_size=r.choice([4, 8, 16]), lr=.05, momentum=r.choice([0., .9]),
                  weight_decay=r.choice([0., .01]))
    prox, home, beta = r.choice([0., .5]), normed and r.random() < .5, r.choice([None, None, .5])
    parts = [FedProx(mu=prox)]*(prox > 0) + [FedBN()]*home + [FedAvgM(beta or 0., form='paper')]*(beta is not None)
    method, participation = sum(parts[1:], start=parts[0]) if parts else FedAvg(), r.choice([1., .6])
    server, kept = by_hand(net, task, clients, local, 3, participation, prox, home, beta)
    far = apart(server, net.state_dict())
    for executor in ('auto', 'loop', 'vmap'):
        for record in (True, False):
            run = federate(net, task, clients, method, 3, local, participation, executor=executor, record=record,
                           progress=False, device='cpu', evaluate_every=3)
            held = {**run.state.params, **run.state.buffers}
            for k in run.state.personal: held.pop(k, None)
            assert far > 1e-2 and apart({k: v for k, v in held.items() if k in server}, server) < 1e-3*far, \
                (executor, record, method, net)
            if home:
                for k, own in enumerate(kept):
                    mine = {n: run.state.personal[n][k] for n in own}
                    assert apart(mine, own) < 1e-3*max(far, 1), (executor, record, method, net)

@pytest.mark.parametrize('seed', seeds(10, 20))
def test_a_random_sum_is_the_same_in_every_executor(seed):
    "Methods that look at features, cut the network or draw: no loop by hand, but the plainest way of ours."
    r = random.Random(seed)
    cuts = r.random() < .4
    task = PICTURES if cuts else r.choice([PICTURES, WORDS]) # the axes of an Embedding have no names
    net, clients = network(r, task, drops=not cuts and r.random() < .5, simple=cuts), clients_of(r, task)
    parts = r.sample([MOON(mu=1), FedDecorr(beta=.1), DeCov(weight=.1), FedProx(mu=.1), SCAFFOLD()], r.randint(1, 3))
    if cuts: parts = [HeteroFL(rates=(1., .5)), *(p for p in parts if not isinstance(p, SCAFFOLD))]
    method = sum(parts[1:], start=parts[0])
    local = Local(epochs=1, batch_size=r.choice([8, 16]), lr=.02)
    runs = {}
    for executor in ('loop', 'auto', 'vmap', *['extract']*cuts):
        for record in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                runs[executor, record] = federate(net, task, clients, method, 3, local, executor=executor, device='cpu',
                                                  record=record, progress=False, evaluate_every=3).state
    plain = runs['loop', False]
    far = apart(plain.params, net.state_dict())
    for how, state in runs.items(): assert difference(plain, state) < 1e-2*max(far, .1), (how, method, net)
    for e in ('loop', 'auto', 'vmap'): assert difference(runs[e, False], runs[e, True]) == 0, (e, method, net)
