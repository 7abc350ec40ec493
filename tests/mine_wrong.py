"Methods with a mistake that runs, or ends deep inside torch, and the law for it: `fedlit check tests/mine_wrong.py`."
import random
import numpy as np
import torch
from fedlit.method import Method

CAUGHT = {} # class -> the first law that is broken
def caught(law):
    def note(cls):
        CAUGHT[cls] = law
        return cls
    return note

@caught('frozen')
class Thaw(Method):
    "Begins with all parameters of the network, what the user froze among them."
    def init(self, params, model): return {k: v.detach().clone() for k, v in model.named_parameters()}, {}, {}

@caught('sealed')
class Coin(Method):
    "Drops a tensor's gradient where a coin of Python says so."
    def grad(self, grads): return {k: v if random.random() < .5 else 0*v for k, v in grads.items()}

@caught('sealed')
class Quantised(Method):
    "Stochastic rounding with NumPy's coins."
    def done(self, client, delta): return client, {k: v.sign()*np.random.rand() for k, v in delta.items()}
    def merge(self, delta, server, uploads):
        return {k: v + .01*uploads[k].mean(0) if k in uploads else v for k, v in delta.items()}, server

@caught('sums')
class OnlyOne(Method):
    "Takes for granted that all parameters travel, which they do not beside FedBN."
    def init(self, params): return params, {k: torch.zeros_like(v) for k, v in params.items()}, {}
    def merge(self, delta, server):
        speed = {k: .5*v + delta[k] for k, v in server.items()}
        return {**delta, **speed}, speed

@caught('runs')
class Forgetful(Method):
    "Momentum between rounds, without an `init` that declares it."
    def grad(self, grads, client): return {k: v + .1*client[k] if k in client else v for k, v in grads.items()}
    def done(self, client, delta): return delta, {}

@caught('whole')
class Rows(Method):
    "A step for each output, the mean over its inputs, which is broadcast to all of them."
    def merge(self, delta, server):
        return {k: v.mean(1, keepdim=True) if v.dim() == 2 else v for k, v in delta.items()}, server

SEEN = []

@caught('repeats')
class Schedule(Method):
    "Counts rounds in a list of the module, and goes on counting in the next run."
    def merge(self, delta, server):
        SEEN.append(1)
        return {k: v/len(SEEN) for k, v in delta.items()}, server

@caught('executors')
class Branch(Method):
    "Python decides by a value, which a stack of clients does not have one of."
    def loss(self, features, logits):
        penalty = features.square().mean()
        return penalty if penalty > .05 else 0*logits.sum()

@caught('untouched')
class InPlace(Method):
    "Moves what it received towards the client, for all who come after."
    def grad(self, grads, params, received):
        for k, v in params.items(): received[k].lerp_(v.detach(), .01)
        return grads

@caught('runs')
class Vector(Method):
    "A penalty for each sample."
    def loss(self, features): return features.norm(dim=1)

class _Square(torch.autograd.Function):
    "A square whose backward forgot the factor of two."
    generate_vmap_rule = True
    @staticmethod
    def forward(x): return x.square()
    @staticmethod
    def setup_context(ctx, inputs, output): ctx.save_for_backward(*inputs)
    @staticmethod
    def backward(ctx, g): return g*ctx.saved_tensors[0]

@caught('slope')
class Factor(Method):
    "A function of one's own with a wrong derivative."
    def loss(self, features): return .1*_Square.apply(features).mean()

@caught('order')
class First(Method):
    "Believes the first participant."
    def done(self, client, delta): return client, delta
    def merge(self, delta, server, uploads):
        return {k: uploads[k][0] if k in uploads else v for k, v in delta.items()}, server

@caught('types')
class Wide(Method):
    "A decay computed in double precision."
    def merge(self, delta, server):
        return {k: v*torch.linspace(1., 1., 1, dtype=torch.float64) if v.dim() else v for k, v in delta.items()}, server

@caught('text')
class Percent(Method):
    "Given in percent and kept as a share, which is what it prints."
    share: float = 50.
    def __post_init__(self): object.__setattr__(self, 'share', self.share/100)
    def weigh(self, weights): return self.share*weights

@caught('slope')
class NoGrad(Method):
    "The whole term under no_grad, so that nothing is learned from it."
    def loss(self, features):
        with torch.no_grad(): return features.square().mean()

@caught('slope')
class Later(Method):
    "A wrong gradient, which shows when parameters have left those that were received."
    def loss(self, params, received): return sum(_Square.apply(v - received[k]).sum() for k, v in params.items())

@caught('runs')
class HeadAtHome(Method):
    "Parameters that every client remembers; the server, which tests its network, remembers none."
    def init(self, params): return params, {}, {'head.weight': params['head.weight']}
    def use(self, params, client): return {**params, 'head.weight': client['head.weight']}

BEFORE = {}

@caught('resumed')
class Aside(Method):
    "A memory beside the round's, which another process does not have."
    def merge(self, delta, server, round):
        if round == 0: BEFORE.clear()
        old = BEFORE.get('delta', {})
        BEFORE['delta'] = delta
        return {k: v + .1*old[k] if k in old else v for k, v in delta.items()}, server

# one for each law that finds what the laws above do not

@caught('finer')
class Halved(Method):
    "Sends half precision."
    def send(self, delta, client): return {k: v.half().to(v) for k, v in delta.items()}, client

@caught('finer')
class Listed(Method):
    "A penalty that has been a number of Python, and is a tensor of single precision again."
    def merge(self, delta, server):
        return {k: torch.tensor(v.tolist()).reshape(v.shape).to(v) for k, v in delta.items()}, server

@caught('fresh')
class OneNoise(Method):
    "A generator that every client seeds alike in every step."
    def grad(self, grads):
        g = torch.Generator().manual_seed(1)
        return {k: v + .01*torch.randn(v.shape, generator=g).to(v) for k, v in grads.items()}

@caught('participants')
class Adds(Method):
    "Adds up the clients' signs, as if there were always four."
    def done(self, client, delta): return client, {k: v.sign() for k, v in delta.items()}
    def merge(self, delta, server, uploads):
        agreed = {k: v.sum(0).abs()/4 for k, v in uploads.items()}
        return {k: v*agreed[k] if k in agreed else v for k, v in delta.items()}, server

@caught('numbers')
class Numbered(Method):
    "A client's number is taken for its importance."
    def loss(self, features, number): return .01*(number + 1)*features.square().mean()

@caught('names')
class Ordinal(Method):
    "Classes are taken for numbers, of which two is twice one."
    def loss(self, logits, y):
        return .1*((logits.softmax(1)*torch.arange(logits.shape[1])).sum(1) - y).square().mean()

@caught('signs')
class Unsigned(Method):
    "Adds the sizes of a gradient, without its directions."
    def grad(self, grads): return {k: v + .1*v.abs() for k, v in grads.items()}

@caught('equal')
class Unscaled(Method):
    "Weights that no longer sum to one."
    def weigh(self, weights, steps): return weights*steps

@caught('statistics')
class Still(Method):
    "A momentum for parameters, and nothing for the rest."
    def merge(self, delta, server, params): return {k: v if k in params else 0*v for k, v in delta.items()}, server

@caught('batch')
class SumOfAll(Method):
    "A mean over eight samples, whatever a batch has."
    def loss(self, features): return .1*features.square().sum(1).sum()/8

@caught('twice')
class Scale(Method):
    "A parameter of its own, which it takes out again, so that a second one does not find it."
    def init(self, params): return {**params, 'scale': torch.ones(1, dtype=params['head.weight'].dtype)}, {}, {}
    def use(self, params):
        return {k: v*params['scale'] if k == 'head.weight' else v for k, v in params.items() if k != 'scale'}

ANCHOR = {}

@caught('repeats')
class Anchored(Method):
    "Keeps near the first weights that anybody in this process began with."
    def loss(self, params, received):
        if not ANCHOR: ANCHOR.update(received)
        return .01*sum((v - ANCHOR[k]).square().sum() for k, v in params.items())

# what was only asked about before

@caught('acts')
class NoSpeed(Method):
    "A momentum whose speed is never written down: what it remembers is zero in every round."
    def init(self, params): return params, {k: torch.zeros_like(v) for k, v in params.items()}, {}
    def merge(self, delta, server, params):
        speed = {k: .9*v for k, v in server.items()}
        return {k: v + speed[k] if k in params else v for k, v in delta.items()}, speed

@caught('statistics')
class Slow(Method):
    "A step size of the server, for running statistics too."
    def merge(self, delta, server): return {k: .5*v for k, v in delta.items()}, server

@caught('fresh')
class Even(Method):
    "Evenly distributed noise, the same in every step of a round."
    def grad(self, grads, round):
        g = torch.Generator().manual_seed(round)
        return {k: v + .01*(torch.rand(v.shape, generator=g).to(v) - .5) for k, v in grads.items()}

@caught('executors')
class Distil(Method):
    "Asks the network that was received in training mode, where it writes the statistics that all clients share."
    def loss(self, features, params, buffers, received, x, forward):
        theirs = forward({k: received[k] for k in params}, {k: received[k] for k in buffers}, x)[0]
        return .1*(features - theirs).square().mean()

@caught('names')
class Ruler(Method):
    "Every feature is drawn to the number of the class."
    def loss(self, features, y): return .01*(features - y[:, None].to(features)).square().mean()

@caught('batch')
class Twice(Method):
    "A mean over the batch, and divided by its size again."
    def loss(self, features): return .5*features.square().mean(1).mean()/len(features)

@caught('acts')
class NoTeacher(Method):
    "An average of a client's networks, asked from the beginning, when it is zero."
    def init(self, params): return params, {}, {k: torch.zeros_like(v) for k, v in params.items()}
    def loss(self, features, client, buffers, x, forward):
        return .1*(features - forward(client, buffers, x, train=False)[0].detach()).square().mean()
    def done(self, client, params): return {k: .9*v + .1*params[k] for k, v in client.items()}, {}

@caught('fresh')
class SameNoise(Method):
    "A generator that is seeded alike for every tensor of a round."
    def merge(self, delta, server, params, round):
        def noise(v): return torch.randn(v.shape, generator=torch.Generator().manual_seed(round)).to(v)
        return {k: v + .01*noise(v) if k in params else v for k, v in delta.items()}, server
