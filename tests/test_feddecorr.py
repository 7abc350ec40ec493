"FedDecorr in both forms and the exact penalty, against NumPy."
import numpy as np, pytest, torch
from fedlit.methods import ExactDecorr, FedDecorr

def oracle(z, form):
    n, d = z.shape
    std = np.sqrt(z.var(0, ddof=1) + 1e-8)
    zhat = (z - z.mean(0))/std
    C = zhat.T@zhat
    if form == 'paper': return ((C/(n-1))**2).sum()/d**2
    off = C[~np.eye(d, dtype=bool)]
    return (off**2).mean()/n

@pytest.mark.parametrize('form', ['released', 'paper'])
@pytest.mark.parametrize('shape', [(64, 128), (16, 4), (5, 7), (2, 3), (64, 1280), (130, 17)])
def test_both_forms(shape, form):
    z = np.random.default_rng(0).normal(size=shape) @ np.random.default_rng(1).normal(size=(shape[1], shape[1]))
    got = FedDecorr(beta=.3, form=form).loss(features=torch.from_numpy(z)).item()
    assert got == pytest.approx(.3*oracle(z, form), rel=1e-6)
    single = FedDecorr(beta=.3, form=form).loss(features=torch.from_numpy(z).float()).item()
    assert single == pytest.approx(got, rel=1e-4)

@pytest.mark.parametrize('form', ['released', 'paper'])
def test_a_constant_feature(form):
    z = np.random.default_rng(0).normal(size=(20, 6))
    z[:, 2] = 3.
    t = torch.from_numpy(z).requires_grad_()
    loss = FedDecorr(beta=1., form=form).loss(features=t)
    loss.backward()
    assert loss.item() == pytest.approx(oracle(z, form), rel=1e-6) and torch.isfinite(t.grad).all()

@pytest.mark.parametrize('m', [FedDecorr(), FedDecorr(form='paper'), ExactDecorr(), ExactDecorr(of='covariance')],
                         ids=repr)
def test_a_batch_of_one_is_zero(m):
    z = torch.randn(1, 5, requires_grad=True)
    m.loss(features=z).backward()
    assert m.loss(features=z).item() == 0 and z.grad.eq(0).all()

@pytest.mark.parametrize('m', [FedDecorr(beta=1.), FedDecorr(beta=1., form='paper'),
                               ExactDecorr(beta=1.), ExactDecorr(beta=1., of='covariance')], ids=repr)
@pytest.mark.parametrize('shape', [(7, 4), (4, 7)])
def test_gradients(m, shape):
    z = torch.randn(*shape, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: m.loss(features=f), z, atol=1e-5)

@pytest.mark.parametrize('n', [8, 32, 64])
def test_the_scale_between_the_forms(n):
    z, d = torch.randn(n, 12, dtype=torch.double), 12
    m = torch.corrcoef(z.T)[~torch.eye(d, dtype=torch.bool)].square().mean().item()
    assert FedDecorr(beta=1.).loss(features=z).item() == pytest.approx((n-1)**2/n*m, rel=1e-5)
    assert FedDecorr(beta=1., form='paper').loss(features=z).item() == pytest.approx(1/d + (d-1)/d*m, rel=1e-5)

def test_exact_is_feddecorr_up_to_scale():
    z = torch.randn(32, 6, dtype=torch.double)
    assert (ExactDecorr(beta=1.).loss(features=z).item()
            == pytest.approx(6*FedDecorr(beta=1., form='paper').loss(features=z).item() - 1, rel=1e-6))

def test_identical_features_cost_most():
    z = torch.randn(64, 1, dtype=torch.double).expand(64, 9)
    assert FedDecorr(beta=1.).loss(features=z).item() == pytest.approx(63**2/64, rel=1e-5)

@pytest.mark.parametrize('make,word', [(lambda: FedDecorr(beta=-1), 'beta=-1'),
                                       (lambda: FedDecorr(form='x'), "form='x'"),
                                       (lambda: ExactDecorr(of='x'), "of='x'")])
def test_bad_values(make, word):
    with pytest.raises(ValueError, match=word): make()
