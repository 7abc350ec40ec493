"""Federations written out by hand, to compare with: plain torch and plain arithmetic, nothing of fedlit in the
oracles but the batches that it draws.

Two problems: a straight line, whose gradient is a formula, and a small classifier."""
import copy
import torch
from torch import nn
from torch.nn import functional as F
from fedlit.batches import batches_of
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import start

SIZES = torch.tensor([12., 9., 4.]) # samples of the classifier's three clients

def gap(a, b): return max((a[k] - b[k]).abs().max().item() for k in b)

def sgd(
    net, batches,                                   # a network, which stays as it is; pairs (x, y)
    term=lambda net, x, y, t: 0.,                   # what is added to the loss of step t
    criterion=F.cross_entropy,
    grad=lambda net, x, y: None,                    # what is done to the gradient
    **how,                                          # of torch.optim.SGD: lr, momentum, weight_decay
):
    "A copy of the network after a step for each batch."
    net = copy.deepcopy(net).train()
    opt = torch.optim.SGD(net.parameters(), **how)
    for t, (x, y) in enumerate(batches):
        opt.zero_grad()
        (criterion(net(x)[1], y) + term(net, x, y, t)).backward()
        grad(net, x, y)
        opt.step()
    return net

def descend(opt, loss):
    "A step of an optimiser."
    opt.zero_grad()
    loss.backward()
    opt.step()

def averaged(net, ends, who, sizes=SIZES):
    "Into `net` goes the average of the networks with which the clients `who` ended, by size; counters are rounded."
    p = sizes[who].double()/sizes[who].double().sum()
    mean = {n: sum(q*e.state_dict()[n].double() for q, e in zip(p, ends)) for n in net.state_dict()}
    net.load_state_dict({n: v if net.state_dict()[n].is_floating_point() else v.round() for n, v in mean.items()})

def drawn(task, clients, k, local, round=0, least=1):
    "The batches that fedlit draws for client `k`: pairs (x, y)."
    data = batches_of(task, clients, [k], local, 0, round, least)
    return [(x, y) for t, n in enumerate(data.counts[0].tolist()) if n for (x,), (y,) in [data.at(t, [0], n)]]

# ---- a straight line: features x, prediction x.w, loss (x.w - y)^2/2 ----

W0 = torch.tensor([.5, -1., .2], dtype=torch.double)    # where the server begins
_g = torch.Generator().manual_seed(3)
X = torch.randn(2, 3, 4, 3, dtype=torch.double, generator=_g)   # (clients, steps, samples, features)
Y = torch.randn(2, 3, 4, dtype=torch.double, generator=_g)
FULL = [[4, 4, 4], [4, 4, 4]]                                   # samples of every step of both clients

class Line(nn.Module):
    "No fedlit needs to know that its only weights are `W0`."
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad(): self.head.weight.copy_(W0[None])
    def forward(self, x): return x, self.head(x)

def square(out, y): return (out[:, 0] - y).square().mean()/2
def slope(w, x, y): return ((x@w - y)[:, None]*x).mean(0)

def ended(k, w):
    "Where client `k` ends that begins at `w`."
    for t in range(3): w = w - .1*slope(w, X[k, t], Y[k, t])
    return w

def fit(method, rounds, who, live, local, sizes=(1., 1.), executor='loop'):
    "The state after `rounds` of fedlit on the line; `who(round)` are the participants."
    net = Line()
    state = start(method, net, 2)
    for r in range(rounds):
        ks = who(r)
        data = dict(x=X[ks], y=Y[ks], counts=torch.tensor(live)[ks])
        state = fed_round(Broadcast(method, net, state, local, criterion=square), ks, data, [sizes[k] for k in ks],
                          executor=executor)
    return state

# ---- a classifier of three inputs, with or without BatchNorm, in double precision ----

EXECUTORS = 'loop', 'vmap'

class Classifier(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.head = nn.Linear(5, 2)
        self.double()
    def forward(self, x):
        z = self.norm(self.body(x)).tanh()
        return z, self.head(z)

def classifier(norm=False):
    torch.manual_seed(0)
    return Classifier(norm)

def batches(steps=(3, 3, 1), samples=4, seed=1):
    "Random batches of clients that take different numbers of steps."
    g, most = torch.Generator().manual_seed(seed), max(steps)
    live = torch.tensor([[t < s for t in range(most)] for s in steps])
    return dict(x=torch.randn(len(steps), most, samples, 3, generator=g, dtype=torch.double),
                y=torch.randint(0, 2, (len(steps), most, samples), generator=g), counts=live)

def classify(method, rounds=1, model=None, data=None, local=None, executor='loop', weights=SIZES):
    "The state after `rounds` of fedlit on the classifier."
    model, data, local = (model or classifier(), data or batches(),
                          local or Local(lr=.1, momentum=.9, weight_decay=.01))
    everyone = list(range(len(data['y'])))
    state = start(method, model, len(everyone))
    for _ in range(rounds): state = fed_round(Broadcast(method, model, state, local), everyone, data, weights, executor)
    return state

def same(a, b):
    "Are two states equal to the bit?"
    return (all(torch.equal(a.params[k], v) for k, v in b.params.items())
            and all(torch.equal(a.buffers[k], v) for k, v in b.buffers.items()))

def by_torch(
    rounds,
    term=lambda net, received: 0.,                  # what a client adds to its loss
    server=lambda before, mean, memory: mean,       # what the server makes of the clients' average
    model=None,
    grad=lambda net, x, y: None,                    # what a client does to its gradient
):
    "The same federation in torch: deep copies, `optim.SGD`, averages of state dicts; the last state dict."
    model, data, share, memory = copy.deepcopy(model or classifier()), batches(), (SIZES/SIZES.sum()).double(), {}
    for _ in range(rounds):
        mean, received = {}, {k: v.detach().clone() for k, v in model.named_parameters()}
        for k in range(len(share)):
            n = int(data['counts'][k].sum())
            local = sgd(model, zip(data['x'][k, :n], data['y'][k, :n]), lambda net, *_, r=received: term(net, r),
                        grad=grad, lr=.1, momentum=.9, weight_decay=.01)
            for n, v in local.state_dict().items():
                if v.is_floating_point(): mean[n] = mean.get(n, 0) + share[k]*v
        before = {n: v.clone() for n, v in model.state_dict().items() if n in mean}
        model.load_state_dict({**model.state_dict(), **server(before, mean, memory)})
    return model.state_dict()
