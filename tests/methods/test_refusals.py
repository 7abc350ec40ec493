"""What a hyperparameter cannot be: refused with the name of its method, its own, the value, and what would be right.
And which methods cannot be added; what stands beside DP is in test_privacy.py."""
import re
import pytest
from fedlit.methods import (
    APFL, Clip, CoordinateMedian, DepthFL, Ditto, DP, DSFL, ExactDecorr, FedAdagrad, FedAdam, FedALA, FedAMP, FedAS,
    FedAsync, FedAvgM, FedBABU, FedBN, FedCAC, FedDBE, FedDecomp, FedDecorr, FedDF, FedDSE, FedDyn, FederatedDropout,
    FedET, FedExP, FedNova, FedPAC, FedPara, FedPer, FedProto, FedProx, FedRep, FedRoD, FedRolex, FedSAM, FedYogi,
    FIARSE, FjORD, FlexLoRA, HeteroFL, IFCA, Krum, MaskedCE, MOON, NormClipping, OwnLabels, PerFedAvg, pFedMe, Quantize,
    SCAFFOLD, TopK, TrimmedMean)

SHARES = 'a tuple of numbers in (0, 1]'
CANNOT = [ # method, hyperparameter, values that it cannot have, what it must be
    (FedProx, 'mu', [-1e-9, float('nan'), -3], 'at least 0'),
    (MOON, 'mu', [-1], 'at least 0'), (MOON, 'tau', [0, -.5], 'positive'),
    (MOON, 'form', ['Paper'], "'released' or 'paper'"), (MOON, 'variant', ['L2'], "'contrastive' or 'l2'"),
    (FedDecorr, 'beta', [-1], 'at least 0'), (FedDecorr, 'form', ['x'], "'released' or 'paper'"),
    (ExactDecorr, 'of', ['x'], "'correlation' or 'covariance'"),
    (FedAvgM, 'momentum', [1., -.1], 'in [0, 1)'), (FedAvgM, 'form', ['ema'], "'released', 'paper' or 'nesterov'"),
    (Krum, 'attackers', [-1], 'at least 0'), (Krum, 'best', [0], 'at least 1'),
    (TopK, 'share', [0., 2.], 'in (0, 1]'), (Quantize, 'bits', [1, 32], 'from 2 to 16'),
    (DP, 'clip', [0.], 'positive'), (DP, 'noise', [-1.], 'at least 0'), (DP, 'delta', [1.], 'in (0, 1)'),
    (DP, 'at', ['nowhere'], "'server' or 'client'"), (DP, 'per', ['layer'], "'update' or 'tensor'"),
    (DP, 'source', ['time'], "'seed' or 'system'"),
    (FedDyn, 'alpha', [0], 'positive'), (FedProto, 'rule', ['second'], "'head' or 'nearest'"),
    (FlexLoRA, 'ranks', [(), (2, 1.5)], 'a tuple of whole numbers, at least 1'), (FlexLoRA, 'alpha', [0.], 'positive'),
    (HeteroFL, 'rates', [(), (0.,), (1.1,)], SHARES), (HeteroFL, 'assign', ['static'], "'fixed' or 'dynamic'"),
    (FedRolex, 'rates', [()], SHARES), (FedRolex, 'direction', ['left'], "'backward' or 'forward'"),
    (FederatedDropout, 'rates', [(2.,)], SHARES), (FIARSE, 'rates', [(0.,)], SHARES),
    (FjORD, 'rates', [(1.5,)], SHARES), (FjORD, 'widths', [(0.,)], SHARES),
    (FedDSE, 'temperature', [-1.], 'at least 0'), (FedDSE, 'rounding', ['off'], "'up' or 'down'"),
    (DSFL, 'lr', [0., -1.], 'positive'), (DSFL, 'batch_size', [0, -4], 'at least 1'), (DSFL, 'T', [0.], 'positive'),
    (DepthFL, 'levels', [(), (0,), (2.5, 1), 4], 'a tuple of whole numbers, at least 1'),
    (DepthFL, 'ramp', [0], 'at least 1'), (DepthFL, 'exits', ['first'], "'all' or 'last'"),
    (MaskedCE, 'fill', ['one'], "'zero' or 'inf'"), (Clip, 'norm', [0.], 'positive')]

@pytest.mark.parametrize('kind, name, value, right', [
    pytest.param(kind, name, v, right, id=f'{kind.__name__}({name}={v!r})')
    for kind, name, values, right in CANNOT for v in values])
def test_what_a_hyperparameter_cannot_be_is_named(kind, name, value, right):
    said = f'{kind.__name__}: {name}={value!r}, but it must be {right}'
    with pytest.raises(ValueError, match=re.escape(said)): kind(**{name: value})

@pytest.mark.parametrize('kind, name', [(FedPer, 'head'), (FedAS, 'head'), (FlexLoRA, 'head'), (FedET, 'shared'),
                                        (MOON, 'form'), (DP, 'source')], ids=lambda v: getattr(v, '__name__', v))
@pytest.mark.parametrize('value', [None, -1, .5, True, ('head',)])
def test_a_text_is_a_text(kind, name, value):
    with pytest.raises(TypeError, match=re.escape(f'{kind.__name__}: {name}={value!r}, but it must be a text')):
        kind(**{name: value})

PART = 'asks the network of every client, .* train only a part'
ENTRY = 'an entry that a client does not train would count as'
ADDED = [ # in this order or, of the second list, in either
    (FedCAC(), FedPer(), 'decide `keep` alone'), (FedBN(), FedCAC(), 'decide `keep` alone'),
    (FedPer(), IFCA(), 'decide `keep` alone'), (HeteroFL(), IFCA(), 'decide `mask`'),
    (FedCAC(), HeteroFL(), 'decide `mask` alone'), (FIARSE(), FedAMP(), 'decide `mask` alone'),
    (FedDecomp(), FedRep(), 'decide `mask` alone'), (FedRep(), FedPara(), 'decide `mask` alone'),
    (HeteroFL(), Ditto(), 'to decide `mask` alone'), (FIARSE(), HeteroFL(), 'which coordinates a client has'),
    (FlexLoRA(), FedAvgM(), 'decide `merge` alone'), (FlexLoRA(), CoordinateMedian(), 'decide `combine` alone'),
    (FedNova(), FlexLoRA(), 'decide `weigh` alone'), (FedAS(), FedNova(), 'has to decide `weigh` alone'),
    (FedBABU(), Ditto(), r'write FedBABU\(steps=0\) . Ditto'), (APFL(), FedBABU(), r'write FedBABU\(steps=0\) . APFL'),
    (APFL(), FedDBE(), 'write FedDBE . APFL'), (Ditto(), Ditto(lam=1.), 'which second network a client has'),
    (FedAdam(), FedAvgM(), "both decide the server's optimiser"), (HeteroFL(), DepthFL(), 'cannot be added'),
    (FedAvgM(), FedAvgM(.5), "both decide the server's optimiser"),
    (FedYogi(), FedAdagrad(), "both decide the server's optimiser"),
    (CoordinateMedian(), TrimmedMean(), 'both decide how the clients are combined'),
    (Krum(), CoordinateMedian(), 'both decide how the clients are combined'),
    (Krum(), HeteroFL(), ENTRY), (Krum(), IFCA(), ENTRY),   # the shortest update would be nearest to all
    (SCAFFOLD(), FedSAM(), 'must come before'), (FedProx(), FedSAM(), 'must come before'),
    (FedSAM(), FedSAM(), 'must come before'), (PerFedAvg(), FedSAM(), 'both make the gradient anew'),
    (pFedMe(), PerFedAvg(), 'both make the gradient anew'),
    (HeteroFL(), FedDF(), PART), (IFCA(), FedDF(), PART), (DepthFL(), FedET(), PART), (HeteroFL(), DSFL(), PART)]
EITHER = [
    (FedBABU(), FedDBE(), 'takes away the head'), (FedRoD(), FedDBE(), 'features without the vector'),
    (FedNova(), FedALA(), 'FedALA moves a client before its first step'),
    (FedExP(), TopK(), "compares the clients' updates with their mean, and TopK changes"),
    (FedExP(), NormClipping(), 'and NormClipping changes'), (FedExP(), FedAsync(), 'and FedAsync changes'),
    (FedPAC(), HeteroFL(), 'mixes whole heads'), (FedPAC(), OwnLabels(), 'mixes whole heads'),
    (DepthFL(), PerFedAvg(), 'PerFedAvg trains on one answer before use')]

@pytest.mark.parametrize('one, other, said', [*ADDED, *EITHER, *((b, a, said) for a, b, said in EITHER)],
                         ids=lambda v: getattr(v, 'name', ''))
def test_methods_that_cannot_be_added_say_why(one, other, said):
    with pytest.raises(ValueError, match=said): one + other

@pytest.mark.parametrize('one, other', [
    (FedRep(), Krum()), (FedRep(), FedDF()), (FedRep(), FedET()), (FedRep(), DSFL()), # all is trained, part after part
    (FedSAM(), SCAFFOLD()), (DepthFL(), PerFedAvg(steps=0))], ids=lambda m: m.name)
def test_what_is_near_to_these_can(one, other): assert (one + other).parts == (one, other)
