"Methods as released code has them where it leaves its paper: each is fedlit's with one change."
import torch
from fedlit.ground.tree import sqnorm, zeros
from fedlit.method import Method
from fedlit.methods.apfl import APFL
from fedlit.methods.ditto import mine
from fedlit.methods.fedala import FedALA
from fedlit.methods.feddyn import FedDyn
from fedlit.methods.fednova import FedNova
from fedlit.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlit.methods.fedproto import FedProto, class_means, prototypes
from fedlit.methods.fedrod import FedRoD
from fedlit.methods.robust import Krum
from fedlit.methods.scaffold import SCAFFOLD, response

# ---- how the server averages ----

class PlainLength(FedNova):
    "The length of plain momentum for Nesterov's."
    def weigh(self, weights, steps, momentum, lr): return super().weigh(weights, steps, momentum, lr)

class MeanSteps(FedNova):
    "The server steps by the mean number of steps instead of the mean length."
    def weigh(self, weights, steps, momentum, lr):
        lengths = torch.stack([response(k, lr, momentum, self.mu)[1]/lr for k in steps])
        return weights*(weights*steps).sum()/lengths

class ScaledNetworks(FedNova):
    "Weights that do not sum to one are applied to networks, and not to what changed."
    def merge(self, delta, server, params, weights, steps, momentum, lr):
        left = self.weigh(weights, steps, momentum, lr).sum() - 1
        return {k: d + left*params[k] for k, d in delta.items()}, server

class BySamples(Krum):
    "The chosen count by their samples."
    def combine(self, deltas, weights, params):
        deltas, chosen = super().combine(deltas, weights, params)
        mine = weights*(chosen > 0)
        return deltas, mine/mine.sum()

# ---- the server's optimiser ----

class FromZero:
    "The mean of squares begins at zero."
    def merge(self, delta, server, params):
        return super().merge(delta, server or dict(mean=zeros(delta), second=zeros(delta)), params)

class ZeroAdagrad(FromZero, FedAdagrad): pass
class ZeroYogi(FromZero, FedYogi): pass
class ZeroAdam(FromZero, FedAdam): pass

class BiasCorrection:
    "Adam's bias correction, with an exponent of one more than the number of the round, which begins at one."
    def merge(self, delta, server, params, round):
        step, server = super().merge(delta, server, params)
        correction = (1 - self.beta2**(round + 2))**.5/(1 - self.beta1**(round + 2))
        return {k: correction*v for k, v in step.items()}, server

class CorrectedAdam(BiasCorrection, FedAdam): pass
class CorrectedZeroAdam(BiasCorrection, FromZero, FedAdam): pass

class Shortened:
    "What the clients changed is multiplied by the rate of the server's optimiser before the optimiser sees it."
    def merge(self, delta, server, params):
        return super().merge({k: self.lr*d for k, d in delta.items()}, server, params)

class ShortAdagrad(Shortened, FedAdagrad): pass
class ShortAdam(Shortened, FedAdam): pass
class ShortYogi(Shortened, FedYogi): pass
class ShortZeroAdagrad(Shortened, FromZero, FedAdagrad): pass
class ShortZeroAdam(Shortened, FromZero, FedAdam): pass
class ShortZeroYogi(Shortened, FromZero, FedYogi): pass

# ---- how a client trains ----

class OutsideMomentum(SCAFFOLD):
    "The correction is applied after the step, so momentum does not add it up."
    def grad(self, grads, server, client, momentum, step):
        part = 1 - momentum*(torch.as_tensor(step) > 0).double() # what momentum has kept is taken off again
        return {k: g + part*(server['c'][k] - client['c'][k]) for k, g in grads.items()}

class InnerDecay(Method):
    "Added to pFedMe, whose pull replaces the gradient, a loss acts in the inner steps alone."
    mu: float = .001
    def loss(self, params): return self.mu/2*sqnorm(params)

class OwnClock(Method):
    "The learning rate decays with the rounds in which a client has taken part."
    gamma: float = .8
    def init(self, params): return params, {}, dict(rounds=next(iter(params.values())).new_zeros(()))
    def grad(self, grads, client, round):
        return {k: g*self.gamma**(client['rounds'] - round) for k, g in grads.items()}
    def done(self, client): return dict(rounds=client['rounds'] + 1), {}

class UnsquaredSpring(FedDyn):
    "The spring is the distance, not its square, so its pull does not grow."
    def grad(self, grads, params, received, client):
        apart = {k: params[k] - received[k] for k in grads}
        far = sqnorm(apart).sqrt().clamp(min=1e-300)
        return {k: g - client['g'][k] + self.alpha/2*apart[k]/far for k, g in grads.items()}

class SpringBySize(FedDyn):
    "A client's spring is the softer, the more samples it has."
    sizes: tuple = ()
    def grad(self, grads, params, received, client, kept, number):
        n, pulled = torch.tensor(self.sizes, dtype=torch.double), super().grad(grads, params, received, client, kept)
        own = n.index_select(0, number.reshape(1))[0] # torch 2.6 would read a number of a stacked client
        return {k: g + (pulled[k] - g)*n.mean()/own for k, g in grads.items()}

# ---- networks of their own ----

class CopiedHead(FedRoD):
    "The personal head begins as a copy of the generic one."
    def init(self, params, model):
        params, server, client = super().init(params, model)
        own = {k: params[k.removeprefix('own.')].clone() for k in params if k.startswith('own.')}
        return {**params, **own}, server, client

class Forgetful(FedProto):
    "A class that no client of the last round has is not known any more."
    def merge(self, delta, server, uploads):
        means, known = prototypes(uploads['means'], uploads['counts'], self.form)
        return delta, dict(means=means, known=known.to(means))

class WhileTraining(FedProto):
    "Prototypes are means of the features met while training, each with the weights of that moment."
    def init(self, params, model):
        params, server, client = super().init(params, model)
        return params, server, client, dict(met=zeros(server)['means'], often=zeros(server)['known'])
    def loss(self, features, y, server, buffers):
        means, counts = class_means(features.detach(), y, len(server['known']))
        now = dict(met=buffers['met'] + counts[:, None]*means, often=buffers['often'] + counts)
        return super().loss(features, y, server), now
    def done(self, client, buffers, received):
        met, often = (buffers[k] - received[k] for k in ('met', 'often'))
        return client, dict(means=met/often.clamp(min=1)[:, None], counts=often)

class EveryoneMixes(FedALA):
    "All clients mix in every round, and only some train and count."
    who: tuple = ()
    def _here(self, number, round):
        return (torch.tensor(self.who[round]) == torch.as_tensor(number)[..., None]).any(-1)
    def grad(self, grads, number, round): return {k: g*self._here(number, round) for k, g in grads.items()}
    def weigh(self, weights, round):
        mine = weights*self._here(torch.arange(len(weights)), round)
        return mine/mine.sum()

def _next_alpha(a, lr, apart, own, common):
    "FedTorch's step of the mixture's weight, with a decay of .02; `own` and `common` are the last gradients."
    slope = sum((d*(a*own[k] + (1 - a)*common[k])).sum() for k, d in apart.items())
    return dict(alpha=(a - lr*(slope + .02*a)).clamp(0, 1))

class TrainedAlone(APFL):
    "A client's own network is trained at itself, not at the mixture, and mixed into itself after every round."
    def init(self, params, buffers):
        params, server, _, more = super().init(params, buffers)
        return params, server, dict(end={k: v.clone() for k, v in self.use(params).items()}), more
    def loss(self, params, buffers, x, y, forward, criterion):
        return criterion(forward(mine(params), mine(buffers), x)[1], y)
    def grad(self, grads, params, buffers, lr):
        own, common = mine(grads), self.use(grads)
        apart = {k: (v - lr*own[k]) - (params[k] - lr*common[k]) for k, v in mine(params).items()}
        return grads, _next_alpha(buffers['alpha'], lr, apart, own, common)
    def done(self, params): return dict(end=self.use(params)), {}
    def begin(self, params, buffers, client):
        a = buffers['alpha']
        return {**params, **{f'own.{k}': a*v + (1 - a)*client['end'][k] for k, v in mine(params).items()}}, client
    def deploy(self, params, buffers, client):
        return {**params, **mine(self.begin(params, buffers, client)[0])}

class TwoSteps(APFL):
    "Outputs are mixed, and the common network takes a second step, with the gradient of the first."
    def loss(self, logits): return 0*logits.sum()
    def grad(self, grads, params, buffers, x, y, lr, forward, criterion):
        a, own, common = buffers['alpha'], mine(params), self.use(grads)
        ahead = {k: params[k] - lr*g for k, g in common.items()}
        logits = forward(ahead, {}, x)[1].detach()
        g = torch.func.grad(lambda v: criterion(a*forward(v, {}, x)[1] + (1 - a)*logits, y))(own)
        apart = {k: (v - lr*g[k]) - (ahead[k] - lr*common[k]) for k, v in own.items()}
        return ({**{k: 2*v for k, v in common.items()}, **{f'own.{k}': v for k, v in g.items()}},
                _next_alpha(a, lr, apart, g, common))
