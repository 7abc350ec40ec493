"Eight methods that are not in fedlit, written from their papers as a user would: `fedlit check` finds nothing here."
import torch
from fedlit.method import Method, require
from fedlit.ground.tree import sqnorm

class FedRS(Method):
    "Logits of classes that a client does not have are scaled down (Li & Zhan, KDD 2021)."
    alpha: float = .5
    def output(self, logits, labels): return torch.where(labels, logits, self.alpha*logits)

class FedLC(Method):
    "Logits calibrated by how often a class occurs at a client (Zhang et al., ICML 2022); `counts` has a row a client."
    counts: tuple
    tau: float = .1
    def output(self, logits, number):
        n = torch.tensor(self.counts, dtype=logits.dtype, device=logits.device).index_select(0, number.reshape(1))[0]
        return logits - self.tau*n.clamp(min=1)**-.25

mine = FedLC(counts=tuple((8*k + 1, 3*(k % 3) + 1, 20) for k in range(6)))

class FedExP(Method):
    "The server extrapolates where clients disagree (Jhunjhunwala et al., ICLR 2023)."
    epsilon: float = 1e-3
    def done(self, client, delta):
        return client, dict(size=sqnorm({k: v for k, v in delta.items() if v.is_floating_point()}))
    def merge(self, delta, server, uploads, weights):
        eta = (weights @ uploads['size'].to(weights)/(2*(sqnorm(delta) + self.epsilon))).clamp(min=1)
        return {k: v*eta.to(v) for k, v in delta.items()}, server

class ServerAdam(Method):
    "FedAdam: the average change is the gradient of Adam on the server (Reddi et al., ICLR 2021)."
    lr: float = .01
    beta1: float = .9
    beta2: float = .99
    tau: float = 1e-3
    def __post_init__(self): require(self, lr=(self.lr > 0, 'positive'))
    def init(self, params):
        return params, {n: {k: torch.zeros_like(v) for k, v in params.items()} for n in 'mv'}, {}
    def _ema(self, old, new, beta): return {k: beta*old[k] + (1-beta)*v for k, v in new.items()}
    def merge(self, delta, server):
        own = {k: delta[k] for k in server['m'] if k in delta} # beside FedBN some stay at home
        m, v = (self._ema(server['m'], own, self.beta1),
                self._ema(server['v'], {k: d.square() for k, d in own.items()}, self.beta2))
        return ({**delta, **{k: self.lr*m[k]/(v[k].sqrt() + self.tau) for k in own}},
                dict(m={**server['m'], **m}, v={**server['v'], **v}))

class Ditto(Method):
    "Beside the shared model every client trains one of its own, kept near the shared one (Li et al., ICML 2021)."
    lam: float = .1
    def init(self, params): return {**params, **{f'own.{k}': v.clone() for k, v in params.items()}}, {}, {}
    def keep(self, name): return name.startswith('own.')
    def use(self, params): return {k: v for k, v in params.items() if not k.startswith('own.')}
    def loss(self, params, received, buffers, x, y, forward, criterion):
        own = {k[4:]: v for k, v in params.items() if k.startswith('own.')}
        near = sum((v - received[k]).square().sum() for k, v in own.items())
        return criterion(forward({**params, **own}, buffers, x)[1], y) + self.lam/2*near

class TopK(Method):
    "Only the largest entries of each tensor are sent; what is left out is remembered and added to the next change."
    share: float = .1
    def init(self, params): return params, {}, {k: torch.zeros_like(v) for k, v in params.items()}
    def _largest(self, v):
        flat = v.abs().flatten()
        return torch.where(v.abs() >= flat.topk(max(1, int(self.share*flat.numel()))).values[-1],
                           v, torch.zeros_like(v))
    def done(self, client, delta):
        whole = {k: delta[k] + v for k, v in client.items()}
        sent = {k: self._largest(v) for k, v in whole.items()}
        return {k: whole[k] - sent[k] for k in client}, sent
    def merge(self, delta, server, uploads, weights):
        return {k: torch.einsum('k,k...->...', weights.to(uploads[k]), uploads[k]) if k in uploads else v
                for k, v in delta.items()}, server

class SAM(Method):
    "The gradient is taken where the loss is largest near by (FedSAM, Qu et al., ICML 2022)."
    rho: float = .05
    def loss(self, params, buffers, x, y, forward, criterion):
        at = lambda p: criterion(forward(p, buffers, x)[1], y)
        grads = torch.func.grad(at)(params)
        size = sqnorm(grads).sqrt() + 1e-12
        return at({k: v + self.rho*(grads[k]/size).detach() for k, v in params.items()}) - at(params)

class DPNoise(Method):
    "Noise on the average change of what is trained (central differential privacy); the round names the draw."
    sigma: float = .01
    def merge(self, delta, server, params, generator):
        noise = {k: self.sigma*torch.randn(v.shape, generator=generator, dtype=v.dtype, device=v.device)
                 for k, v in delta.items() if k in params}
        return {k: v + noise[k] if k in noise else v for k, v in delta.items()}, server
