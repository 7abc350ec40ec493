"What a hyperparameter cannot be: refused with the name of its method, its own, the value, and what would be right."
import re
import pytest
from fedlit.methods import (
    Clip, DepthFL, DP, ExactDecorr, FedAvgM, FedDecorr, FedDSE, FedDyn, FederatedDropout, FedProto, FedProx, FedRolex,
    FIARSE, FjORD, FlexLoRA, HeteroFL, Krum, MaskedCE, MOON, Quantize, TopK)

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
    (DP, 'clip', [0.], 'positive and finite'), (DP, 'noise', [-1.], 'at least 0'), (DP, 'delta', [1.], 'in (0, 1)'),
    (DP, 'at', ['nowhere'], "'server' or 'client'"), (DP, 'per', ['layer'], "'update' or 'tensor'"),
    (DP, 'source', ['time'], 'seed or system'),
    (FedDyn, 'alpha', [0], 'positive'), (FedProto, 'rule', ['second'], "'head' or 'nearest'"),
    (FlexLoRA, 'ranks', [(), (2, 1.5)], 'a tuple of whole numbers, at least 1'), (FlexLoRA, 'alpha', [0.], 'positive'),
    (HeteroFL, 'rates', [(), (0.,), (1.1,)], SHARES), (HeteroFL, 'assign', ['static'], "'fixed' or 'dynamic'"),
    (FedRolex, 'rates', [()], SHARES), (FedRolex, 'direction', ['left'], "'backward' or 'forward'"),
    (FederatedDropout, 'rates', [(2.,)], SHARES), (FIARSE, 'rates', [(0.,)], SHARES),
    (FjORD, 'rates', [(1.5,)], SHARES), (FjORD, 'widths', [(0.,)], SHARES),
    (FedDSE, 'temperature', [-1.], 'at least 0'), (FedDSE, 'rounding', ['off'], "'up' or 'down'"),
    (DepthFL, 'levels', [(), (0,)], 'a tuple of depths, each at least 1'), (DepthFL, 'ramp', [0], 'at least 1'),
    (DepthFL, 'exits', ['first'], "'all' or 'last'"),
    (MaskedCE, 'fill', ['one'], "'zero' or 'inf'"), (Clip, 'norm', [0.], 'positive')]

@pytest.mark.parametrize('kind, name, value, right', [
    pytest.param(kind, name, v, right, id=f'{kind.__name__}({name}={v!r})')
    for kind, name, values, right in CANNOT for v in values])
def test_what_a_hyperparameter_cannot_be_is_named(kind, name, value, right):
    said = f'{kind.__name__}: {name}={value!r}, but it must be {right}'
    with pytest.raises(ValueError, match=re.escape(said)): kind(**{name: value})
