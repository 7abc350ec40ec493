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
class Noise(Method):
    "Noise on every tensor, what the user froze among them."
    sigma: float = .01
    def merge(self, delta, server): return {k: v + self.sigma*torch.randn_like(v) for k, v in delta.items()}, server

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

@caught('declared')
class Forgetful(Method):
    "Momentum between rounds, without an `init` that declares it."
    def grad(self, grads, client): return {k: v + .1*client[k] if k in client else v for k, v in grads.items()}
    def done(self, client, delta): return delta, {}

@caught('whole')
class HeadFirst(Method):
    "Steps for the head, and none for what it does not mention."
    def merge(self, delta, server): return {k: 2*v for k, v in delta.items() if 'head' in k}, server

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

@caught('number')
class Vector(Method):
    "A penalty for each sample."
    def loss(self, features): return features.norm(dim=1)

@caught('number')
class Nothing(Method):
    "No return."
    def loss(self, features): features.square().mean()

@caught('declared')
class OneThing(Method):
    "What it sends, but not what it remembers."
    def done(self, delta): return delta

@caught('whole')
class NoStep(Method):
    "What it remembers is missing."
    def merge(self, delta): return delta

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

@caught('runs')
class Typo(Method):
    "Asks for something that a round does not have."
    def loss(self, feature): return feature.square().mean()

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
