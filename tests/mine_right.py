"Methods written from their papers as a user would, one with a value to be given: `fedlit check` finds nothing here."
import torch
from fedlit.method import Method

class FedLC(Method):
    "Logits calibrated by how often a class occurs at a client (Zhang et al., ICML 2022); `counts` has a row a client."
    counts: tuple
    tau: float = .1
    def output(self, logits, number):
        n = torch.tensor(self.counts, dtype=logits.dtype, device=logits.device).index_select(0, number.reshape(1))[0]
        return logits - self.tau*n.clamp(min=1)**-.25

mine = FedLC(counts=tuple((8*k + 1, 3*(k % 3) + 1, 20) for k in range(6)))

class ServerAdam(Method):
    "FedAdam: the average change is the gradient of Adam on the server (Reddi et al., ICLR 2021)."
    lr: float = .01
    beta1: float = .9
    beta2: float = .99
    tau: float = 1e-3
    ranges = dict(lr='positive')
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
