"Small federations that the tests share: fixed batches, ragged clients, short batches, a network with BatchNorm."
import torch, torch.nn.functional as F
from torch import nn
from fedlit.methods import (FedAvg, SOLO, FedProx, MOON, FedDecorr, ExactDecorr, DeCov, StructuredDeCov, SCAFFOLD, FedAvgM, FedNova, FedBN, FedPer, FedRep, LGFedAvg,
    FedCAC, FedDecomp, FedPara, pFedPara, FedDF, DSFL, FedET, FedDyn, HeteroFL, FedRolex, FederatedDropout, FjORD, DepthFL, FedDSE, FedGSE, Scaler, MaskedCE, OwnLabels, Clip, OldCounts)
from fedlit.round import Local, fed_round, start
from fedlit.tree import flatten

class Net(nn.Module):
    "Convolutions, BatchNorm, a linear representation of six numbers and a head."
    def __init__(self, norm=True):
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Identity()
        self.c2, self.n2 = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity()
        self.fc, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
    def forward(self, x):
        x = F.relu(self.n2(self.c2(F.relu(self.n1(self.c1(x))))))
        z = self.fc(x.mean((-1, -2)))
        return z, self.head(z)

CLIENTS, K, T, B = 6, 4, 3, 8
COUNTS = torch.tensor([[8, 8, 5], [8, 3, 0], [8, 8, 8], [6, 0, 0]])        # ragged, with short last batches
SIZES = torch.tensor([21., 11., 24., 6.])
PROXY = torch.randn(12, 1, 6, 6, dtype=torch.double, generator=torch.Generator().manual_seed(99))   # unlabelled inputs of the server

def batches(r):
    g = torch.Generator().manual_seed(r)
    return dict(x=torch.randn(K, T, B, 1, 6, 6, generator=g), y=torch.randint(0, 3, (K, T, B), generator=g), live=COUNTS)

def who(r): return torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(r))[:K].tolist()

def model(norm=True, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(norm).double()

def train(method, executor='loop', rounds=3, norm=True, local=None, **kw):
    "Some rounds in double precision with four of six clients; the state."
    net = model(norm)
    state = start(method, net, CLIENTS)
    for r in range(rounds):
        data = batches(r)
        state = fed_round(method, net, state, who(r), dict(data, x=data['x'].double()), SIZES, local or Local(lr=.1, momentum=.9, weight_decay=.01), executor=executor, **{'proxy': PROXY, **kw})
    return state

def gap(a, b):
    "Largest difference between two states, over all they hold."
    ta, tb = (flatten(dict(params=s.params, buffers=s.buffers, server=s.server, client=s.client, personal=s.personal)) for s in (a, b))
    assert set(ta) == set(tb), set(ta) ^ set(tb)
    return max(((ta[k].double()-tb[k].double()).abs().max().item() for k in ta if ta[k].numel()), default=0.)

METHODS = [FedAvg(), SOLO(), FedProx(mu=.1), FedAvgM(momentum=.5), FedAvgM(momentum=.5, form='paper'), FedAvgM(momentum=.5, form='nesterov'),
           MOON(mu=1.), MOON(mu=1., form='paper'), FedDecorr(beta=.1), FedDecorr(beta=.1, form='paper'), ExactDecorr(beta=.1), ExactDecorr(beta=.1, of='covariance'),
           DeCov(), StructuredDeCov(groups=3), StructuredDeCov(groups=2, within=.5), SCAFFOLD(), SCAFFOLD(form='paper'), FedNova(),
           FedBN(), FedPer(), FedRep(), LGFedAvg(), FedCAC(), FedDecomp(), FedDecomp(form='paper', lora_epochs=3), FedPara(), pFedPara(),
           FedDF(steps=3), DSFL(steps=3, batch_size=4), FedET(steps=3), FedDyn(), FedDyn(alpha=1.)]
HALVES = (1., .5)
CUTTING = [HeteroFL(rates=HALVES), HeteroFL(rates=HALVES, assign='dynamic'), FedRolex(rates=HALVES), FedRolex(rates=HALVES, direction='forward'), FederatedDropout(rates=HALVES),
           FjORD(rates=HALVES), FjORD(rates=HALVES, distill=False), FedDSE(rates=HALVES), FedDSE(rates=HALVES, temperature=1.), FedGSE(rates=HALVES, pool=12), FedGSE(rates=HALVES, pool=12, form='released')]
TRIMMED = [HeteroFL(rates=HALVES) + t for t in (Scaler(), MaskedCE(), OwnLabels(), Clip(), Scaler() + MaskedCE() + OwnLabels() + Clip(), FedDecorr(), MOON(), FedDyn(), FedAvgM() + FedProx(mu=.1))] + [FedDSE(rates=HALVES) + OldCounts()]
METHODS += CUTTING
ELSEWHERE = [Scaler(), MaskedCE(), OwnLabels(), Clip(), OldCounts(), DepthFL()] # trimmings stand in TRIMMED; DepthFL needs a network with exits, tests/test_depthfl.py
SUMS = [MOON() + FedDecorr(), FedAvgM() + MOON() + FedDecorr(), FedProx(mu=.1) + FedAvgM() + FedDecorr(), FedBN() + FedDecorr(), SCAFFOLD() + FedProx() + FedAvgM(), FedPer() + MOON(),
        FedDecomp() + FedDecorr(), FedBN() + FedPer() + SCAFFOLD(), pFedPara() + MOON(), FedProx() + FedDF(steps=3), FedPara() + FedDF(steps=3), FedDecomp() + SCAFFOLD() + FedNova(), *TRIMMED]
NEUTRAL = [FedProx(mu=0.), FedAvgM(momentum=0.), FedAvgM(momentum=0., form='paper'), FedAvgM(momentum=0., form='nesterov'), FedDecorr(beta=0.), ExactDecorr(beta=0.), MOON(mu=0.),
           DeCov(weight=0.), StructuredDeCov(weight=0., groups=2), FedDecomp(lora_epochs=0), FedDF(steps=0), FedET(steps=0)]
