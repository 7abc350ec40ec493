"Unusual methods in which nothing is broken, and the laws that ask to look, since it may be a mistake."
import torch
from torch.nn import functional as F
from fedlit.method import Method

ASKED = {} # class -> the laws that ask
def asked_by(*laws):
    def note(cls):
        ASKED[cls] = list(laws)
        return cls
    return note

@asked_by('shares')
class Unweighted(Method):
    "A mean over clients, however much data they have."
    def done(self, client, delta): return client, delta
    def merge(self, delta, server, uploads):
        return {k: uploads[k].mean(0) if k in uploads else v for k, v in delta.items()}, server

@asked_by('equal')
class Patient(Method):
    "The server takes half of a step."
    def merge(self, delta, server, params): return {k: v/2 if k in params else v for k, v in delta.items()}, server

@asked_by('acts')
class Itself(Method):
    "The distance of parameters from themselves."
    def loss(self, params): return .1*sum((v - v.detach()).square().sum() for v in params.values())

@asked_by('acts')
class RoundZero(Method):
    "Keeps near the weights of the first round, which are never renewed."
    def init(self, params): return params, dict(start=params), {}
    def loss(self, params, server): return .1*sum((v - server['start'][k]).square().sum() for k, v in params.items())

@asked_by('fresh')
class OneMask(Method):
    "The same coins for every client in every step of a round."
    def grad(self, grads, round):
        g = torch.Generator().manual_seed(round)
        return {k: v*(torch.rand(v.shape, generator=g) < .5) for k, v in grads.items()}

@asked_by('signs', 'names')
class Targets(Method):
    "Every class has a fixed target, which makes no class twice another."
    def loss(self, features, y): return .1*(features - torch.eye(6).to(features)[y]).square().mean()

@asked_by('names')
class Places(Method):
    "Two of three entries learn; which ones is remembered by shape, and depends on nothing else."
    def grad(self, grads):
        for v in grads.values(): KEPT.setdefault(v.shape, torch.arange(v.numel()).reshape(v.shape) % 3 > 0)
        return {k: v*KEPT[v.shape] for k, v in grads.items()}

KEPT = {}

@asked_by()
class Contrast(Method):
    "Samples of one class attract each other: a loss of pairs, which is no mean over samples."
    def loss(self, features, y):
        z, same = F.normalize(features, dim=1), y[:, None] == y
        apart = (z @ z.T/.5).log_softmax(1)
        return -.1*(apart*same).sum()/same.sum()

@asked_by()
class Nuclear(Method):
    "The sum of the singular values of a batch of features."
    def loss(self, features): return .01*torch.linalg.matrix_norm(features, 'nuc')

@asked_by()
class Centred(Method):
    "Gradients whose mean over inputs is zero, which uses a weight's place in its row."
    def grad(self, grads):
        return {k: v - v.mean([*range(1, v.dim())], keepdim=True) if v.dim() > 1 else v for k, v in grads.items()}

@asked_by()
class LastKnown(Method):
    "The mean of the last updates of all clients, of which the server has a table; a number is a row and no quantity."
    def init(self, params, clients):
        return params, {k: torch.zeros(clients, *v.shape, dtype=v.dtype) for k, v in params.items()}, {}
    def done(self, client, delta, number):
        return client, {**{k: v for k, v in delta.items() if v.is_floating_point()}, 'who': torch.as_tensor(number)}
    def merge(self, delta, server, uploads):
        new = {k: v.index_copy(0, uploads['who'].long(), uploads[k]) for k, v in server.items() if k in uploads}
        return {k: new[k].mean(0) if k in new else v for k, v in delta.items()}, {**server, **new}

@asked_by('near')
class Away(Method):
    "A client is pushed away from what it received: the sign of a proximal term."
    def loss(self, params, received): return -.05*sum((v - received[k]).square().sum() for k, v in params.items())

@asked_by('near')
class AwayByGrad(Method):
    "The same as a correction of the gradient."
    def grad(self, grads, params, received): return {k: g + .1*(received[k] - params[k]) for k, g in grads.items()}

@asked_by()
class Smooth(Method):
    "Clients use the mean of the last rounds' networks; they train as in FedAvg."
    def init(self, params): return params, params, {}
    def merge(self, delta, server, params):
        return delta, {k: v/2 + (params[k] + delta[k] if k in delta else params[k])/2 for k, v in server.items()}
    def deploy(self, params, server): return {**params, **server}

@asked_by('equal')
class Cautious(Method):
    "Clients that went far step less far, as in q-FedAvg."
    def done(self, client, delta): return client, dict(far=sum(v.square().sum() for v in delta.values()))
    def weigh(self, weights, uploads): return weights/(1 + uploads['far'])

@asked_by('order')
class Hops(Method):
    "Networks hop from client to client, as in FedSkip."
    def keep(self, name): return True
    def merge(self, delta, server, trained, participants):
        to = torch.randperm(participants)
        return delta, server, {k: v[to] for k, v in trained.items()}
