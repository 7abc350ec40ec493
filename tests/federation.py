"The small federation of `fedlit.laws`, with biases even before BatchNorm, and the methods that are tried in it."
import torch
from safetensors.torch import save_file
from torch import nn
from fedlit import laws
from fedlit.laws import CLIENTS, COUNTS, K, Small as Net, batches, difference, small_world, draw_cohort # noqa: F401
from fedlit.methods import (
    FedAvg, SOLO, FedProx, MOON, FedDecorr, ExactDecorr, DeCov, StructuredDeCov, SCAFFOLD, FedAvgM, FedNova,
    FedAdagrad, FedAdam, FedYogi, FedExP,
    FedBN, FedPer, FedRep, LGFedAvg, FedCAC, FedDecomp, FedPara, pFedPara, FFALoRA, FlexLoRA, FedDBE, FedPAC, FedAS,
    FedDF, DSFL, FedET, FedMD, FedDyn,
    HeteroFL, FedRolex, FederatedDropout, FjORD, DepthFL, FedDSE, FedGSE, FIARSE,
    CoordinateMedian, TrimmedMean, NormClipping, Krum, FedAsync, FedBuff, FedRS, FedLC, FedNTD, FedSAM, FedBABU, FedUV,
    FedAMP, Scaler, MaskedCE, OwnLabels, Clip, OldCounts, DP, DPSGD, TopK, Quantize,
    Ditto, FedProto, APFL, FedRoD, pFedMe, PerFedAvg, FedALA, IFCA)

class Bag(nn.Module):
    "The mean of the vectors of a text's words, and a head."
    def __init__(self, vocabulary=20, width=8, classes=2, **kw): # the rest is of torch.nn.Embedding
        super().__init__()
        self.e, self.head = nn.Embedding(vocabulary, width, **kw), nn.Linear(width, classes)
    def forward(self, x):
        z = self.e(x).mean(1)
        return z, self.head(z)

SIZES = COUNTS.sum(1).float()
PROXY = small_world().proxy   # unlabelled inputs of the server

def model(norm=True, seed=0): return small_world(norm, True, seed).model

def train(method, executor='loop', rounds=3, norm=True, local=None, **kw):
    "Some rounds in double precision with four of six clients; the state."
    return laws.train(method, small_world(norm, True), executor, rounds, local=local, **kw)

def same(a, b):
    "Are two runs the same to the bit, in all that their states hold and in their histories but for the clock?"
    one, two = (laws.contents(run.state) for run in (a, b))
    rows, others = (run.history.drop(columns=['seconds', 'peak_mb']) for run in (a, b))
    return list(one) == list(two) and all(torch.equal(v, two[k]) for k, v in one.items()) and rows.equals(others)

HALVES = (1., .5)
CUTTING = [
    HeteroFL(rates=HALVES), HeteroFL(rates=HALVES, assign='dynamic'),
    FedRolex(rates=HALVES), FedRolex(rates=HALVES, direction='forward'), FederatedDropout(rates=HALVES),
    FjORD(rates=HALVES), FjORD(rates=HALVES, distill=False),
    FedDSE(rates=HALVES), FedDSE(rates=HALVES, temperature=1., samples=5),
    FedGSE(rates=HALVES, pool=12), FedGSE(rates=HALVES, pool=12, form='released')]
METHODS = [
    FedAvg(), SOLO(),
    # local objective
    FedProx(mu=.1), MOON(mu=1.), MOON(mu=1., form='paper'),
    FedDecorr(beta=.1), FedDecorr(beta=.1, form='paper'),
    ExactDecorr(beta=.1), ExactDecorr(beta=.1, of='covariance'),
    DeCov(), StructuredDeCov(groups=3), StructuredDeCov(groups=2, within=.5), FedRS(), FedLC(tau=.3),
    FedNTD(), FedNTD(beta=2., tau=3.), FedUV(),
    # local gradient
    FedSAM(), FedSAM(rho=.5), SCAFFOLD(), SCAFFOLD(form='paper'), FedDyn(), FedDyn(alpha=1.),
    # aggregation
    FedAvgM(momentum=.5), FedAvgM(momentum=.5, form='paper'), FedAvgM(momentum=.5, form='nesterov'), FedNova(),
    FedAdagrad(), FedAdam(), FedYogi(tau=1e-2), FedExP(),
    CoordinateMedian(), TrimmedMean(trim=.25), NormClipping(), NormClipping(norm=.5), Krum(attackers=0, best=2),
    FedAsync(), FedAsync(alpha=.5, form='hinge'), FedBuff(lr=.7),
    # what stays at home
    FedBN(), FedPer(), FedBABU(), FedRep(), LGFedAvg(), FedCAC(),
    FedDecomp(), FedDecomp(form='paper', lora_epochs=3), FedPara(), pFedPara(),
    FFALoRA(), FFALoRA(rank=2, both=True), FlexLoRA(), FlexLoRA(ranks=(3, 1)), FedDBE(), FedDBE(kappa=5., momentum=.3),
    FedPAC(), FedPAC(lam=3., least=.2), FedAS(), FedAS(lr=.1, batch=4),
    # server distillation
    FedDF(steps=3), DSFL(steps=3, batch_size=4), FedET(steps=3),
    FedMD(samples=8, epochs=2, batch_size=4),
    # what is sent
    TopK(share=.1), Quantize(),
    # a network for each client
    Ditto(lam=1., lr=.02), APFL(), APFL(mix='outputs'), pFedMe(lam=5., steps=2),
    PerFedAvg(alpha=.1, form='hf', delta=.1), FedProto(), FedRoD(), FedAMP(),
    FedALA(layers=2, share=.5, batch=4, most=3), IFCA(), IFCA(clusters=3, noise=.1),
    # sub-models
    FIARSE(rates=HALVES), FIARSE(rates=(1., .5, .25), assign='dynamic', rounding='down'), *CUTTING]
TRIMMED = [HeteroFL(rates=HALVES) + t
           for t in (Scaler(), MaskedCE(), OwnLabels(), Clip(), Scaler() + MaskedCE() + OwnLabels() + Clip(),
                     FedDecorr(), MOON(), FedDyn(), FedAvgM() + FedProx(mu=.1), TopK(share=.1) + Quantize(),
                     NormClipping() + CoordinateMedian())] + [
           FedDSE(rates=HALVES) + OldCounts()]
# networks without BatchNorm only, tests/methods/test_privacy.py
PRIVATE = [DP(clip=.1), DP(clip=.1, at='client', per='tensor'), DPSGD(), DP(clip=.1) + FedAvgM(), DPSGD() + SCAFFOLD()]
# trimmings stand in TRIMMED; DepthFL needs a network with exits, tests/methods/submodels/test_depthfl.py
ELSEWHERE = [Scaler(), MaskedCE(), OwnLabels(), Clip(), OldCounts(), DepthFL(), DP(), DPSGD()]
SUMS = [MOON() + FedDecorr(), FedAvgM() + MOON() + FedDecorr(), FedProx(mu=.1) + FedAvgM() + FedDecorr(),
        FedNova() + TrimmedMean(trim=.25) + FedAvgM(), SCAFFOLD() + FedBN() + CoordinateMedian(),
        FedBN() + FedDecorr(), SCAFFOLD() + FedProx() + FedAvgM(), FedPer() + MOON(),
        FedDecomp() + FedDecorr(), FedBN() + FedPer() + SCAFFOLD(), pFedPara() + MOON(),
        FedProx() + FedDF(steps=3), FedPara() + FedDF(steps=3), pFedPara() + SCAFFOLD() + FedNova(),
        FedYogi() + MOON() + FedBN(), SCAFFOLD() + FedAdam(), FedBN() + TopK(share=.1) + DP(clip=.1),
        Ditto() + MOON() + FedBN(), SCAFFOLD() + PerFedAvg(alpha=.1) + MOON(),
        FedALA() + FedPer() + FedProx(mu=.1), *TRIMMED]
NEUTRAL = [FedProx(mu=0.),
           FedAvgM(momentum=0.), FedAvgM(momentum=0., form='paper'), FedAvgM(momentum=0., form='nesterov'),
           FedDecorr(beta=0.), ExactDecorr(beta=0.), MOON(mu=0.),
           FIARSE(rates=(1.,)), FedExP(eps=1e9), FedNTD(beta=0.), FedSAM(rho=0.), FedUV(lam=0., mu=0.),
           FedRS(alpha=1.), FedLC(tau=0.), DeCov(weight=0.), StructuredDeCov(weight=0., groups=2),
           MOON(mu=0., form='paper'), MOON(mu=0., variant='l2'),
           HeteroFL(rates=(1.,)), FedRolex(rates=(1.,)), FederatedDropout(rates=(1.,)),
           FjORD(rates=(1.,), widths=(1.,), distill=False),
           TopK(share=1.), NormClipping(norm=float("inf")), FedDecomp(lora_epochs=0), FedDF(steps=0), FedET(steps=0),
           Ditto(lam=1.), APFL()]

def sites(folder, task, parts, **more):
    "Folders for Flower's sites, with a part of the task each, and its test samples; the run config that finds them."
    for k, i in enumerate(parts):
        (folder/str(k)).mkdir()
        save_file(dict(x=task.x_train[i], y=task.y_train[i]), folder/str(k)/'train.safetensors')
    save_file(dict(x=task.x_test, y=task.y_test), folder/'test.safetensors')
    shape = str(tuple(task.x_train.shape[1:]))
    return {'method': 'FedAvg()', 'clients': len(parts), 'rounds': 2, 'wait': .1, 'timeout': 1., 'sites': str(folder),
            'test': str(folder/'test.safetensors'), 'task.shape': shape, 'task.classes': task.classes,
            'model.name': 'mlp', 'local.epochs': 2, **more}

class Patches(nn.Module):
    "A vision transformer's beginning: an embedding of the places of four patches, not of what is in a picture."
    def __init__(self, side): # pixels of a patch
        super().__init__()
        self.cut, self.places, self.head = nn.Conv2d(1, 5, side, side), nn.Embedding(4, 5), nn.Linear(5, 3)
    def forward(self, x):
        z = (self.cut(x).flatten(2).mT + self.places(torch.arange(4, device=x.device))).mean(1)
        return z, self.head(z)
