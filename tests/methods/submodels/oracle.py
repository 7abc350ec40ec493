"""Sub-models as the papers print them: the server cuts a small network out of its own, the client trains it, and every
entry is averaged over the clients that had it. Plain tensors; of fedlit only `trained`, which is compared with them."""
import torch, torch.nn.functional as F
from math import ceil
from torch import nn
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import start

INPUTS, HIDDEN, CLASSES = 3, (8, 5), 4
CLIENTS, STEPS, SAMPLES = 3, 4, 6
OWNED = [[0, 1], [1, 2], [0, 1]]                    # labels of the three clients; class 3 is nobody's
UNIFORM, BY_DATA = [1., 1., 1.], [30., 20., 50.]    # weights of the three clients
LR, MOMENTUM, DECAY = .2, .5, .01

class Perceptron(nn.Module):
    "Hidden layers a and b, and a head."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(INPUTS, HIDDEN[0]), nn.Linear(*HIDDEN), nn.Linear(HIDDEN[1], CLASSES))
    def forward(self, x):
        z = F.relu(self.b(F.relu(self.a(x))))
        return z, self.head(z)

def perceptron():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Perceptron().double()

def data(round):
    "Random samples of both labels of every client."
    g = torch.Generator().manual_seed(round)
    which = torch.randint(0, 2, (CLIENTS, STEPS, SAMPLES), generator=g)
    which[:, 0, :2] = torch.tensor([0, 1]) # every client shows both of its labels
    return dict(x=torch.randn(CLIENTS, STEPS, SAMPLES, INPUTS, generator=g, dtype=torch.double),
                y=torch.stack([torch.tensor(OWNED[c])[which[c]] for c in range(CLIENTS)]))

def trained(method, weights=BY_DATA, rounds=2, executor='loop'):
    "The server's parameters after some rounds of fedlit."
    net = perceptron()
    state = start(method, net, CLIENTS)
    for r in range(rounds):
        state = fed_round(Broadcast(method, net, state, Local(lr=LR, momentum=MOMENTUM, weight_decay=DECAY)),
                          range(CLIENTS), data(r), weights, executor=executor)
    return state.params

def differ(a, b): return max((a[k] - b[k]).abs().max().item() for k in b)

# ---- the same, written out ----

def first(rate): return [list(range(ceil(n*rate - 1e-9))) for n in HIDDEN]

def nested(rates):
    "HeteroFL's choice: client c keeps the first channels of every layer."
    return lambda round, client: first(rates[client])

def logits(params, x, widths=None, rescale=False):
    "The network on small tensors, or on their first channels; with the scaler behind each layer that was cut."
    n, m = widths or (len(params['a.bias']), len(params['b.bias']))
    scale_a, scale_b = (HIDDEN[0]/n, HIDDEN[1]/m) if rescale else (1, 1)
    h = F.relu(scale_a*(x@params['a.weight'][:n].T + params['a.bias'][:n]))
    z = F.relu(scale_b*(h@params['b.weight'][:m, :n].T + params['b.bias'][:m]))
    return z@params['head.weight'][:, :m].T + params['head.bias']

def plain_loss(round, client, step, params, x, y): return F.cross_entropy(logits(params, x), y)

def rows_and_columns(a, b):
    "Where the small tensors of a client lie that keeps channels `a` and `b` of the hidden layers."
    inputs, classes = range(INPUTS), range(CLASSES)
    return {'a.weight':    (a, inputs),  'a.bias':    (a,),
            'b.weight':    (b, a),       'b.bias':    (b,),
            'head.weight': (classes, b), 'head.bias': (classes,)}

def entries(index): return torch.meshgrid(*(torch.tensor(list(i)) for i in index), indexing='ij')

def local_training(params, batches, loss, clip=None, fixed=()):
    "SGD with momentum and weight decay; gradients of a norm above `clip` are shortened, rows `fixed` of the head stay."
    velocity = {k: torch.zeros_like(v) for k, v in params.items()}
    for step, (x, y) in enumerate(batches):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(step, leaves, x, y), leaves.values())))
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        shrink = min(1., clip/(norm.item() + 1e-6)) if clip else 1.
        velocity = {k: MOMENTUM*velocity[k] + shrink*grads[k] + DECAY*v for k, v in params.items()}
        moved = {k: v - LR*velocity[k] for k, v in params.items()}
        for k in ('head.weight', 'head.bias'): moved[k][list(fixed)] = params[k][list(fixed)]
        params = moved
    return params

def averaged(server, returned):
    "Each entry's mean over the clients that had it, by weight; where it was, if none had it."
    total, weight = ({k: torch.zeros_like(v) for k, v in server.items()} for _ in range(2))
    for index, params, w in returned:
        for k, v in params.items():
            total[k][entries(index[k])] += w*v
            weight[k][entries(index[k])] += w
    return {k: torch.where(weight[k] > 0, total[k]/weight[k].clamp(min=1e-9), v) for k, v in server.items()}

def written_out(
    keep,                   # (round, client) -> the channels of both layers that the client trains
    weights=BY_DATA,        # how much each client counts
    rounds=2,
    loss=plain_loss,        # (round, client, step, params, x, y) -> what the client descends
    clip=None,              # the longest gradient
    owned=None,             # the labels of each client, if it trains and sends only their rows of the head
):
    "The server's parameters after some rounds."
    server = {k: v.detach().clone() for k, v in perceptron().named_parameters()}
    for r in range(rounds):
        returned, batches = [], data(r)
        for c in range(CLIENTS):
            index = rows_and_columns(*keep(r, c))
            small = {k: v[entries(index[k])] for k, v in server.items()}
            others = [i for i in range(CLASSES) if owned and i not in owned[c]]
            small = local_training(small, zip(batches['x'][c], batches['y'][c]),
                                   lambda step, *rest: loss(r, c, step, *rest), clip, fixed=others)
            if owned:
                index.update({k: (owned[c], *index[k][1:]) for k in ('head.weight', 'head.bias')})
                small.update({k: small[k][owned[c]] for k in ('head.weight', 'head.bias')})
            returned.append((index, small, weights[c]))
        server = averaged(server, returned)
    return server
