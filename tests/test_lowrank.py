"FedDecomp's shapes, reconstruction and ends in both forms; FedPara's product and its widths."
import pytest, torch
from torch import nn
from fedlit.method import FedAvg
from fedlit.methods import FedDecomp, FedDecorr, FedPara, pFedPara
from fedlit.methods.fedpara import factors
from fedlit.models import feddecomp_resnet8, feddecomp_resnet10
from fedlit.round import deployed, start
from federation import CLIENTS, model, train

# weight, R_c, rank, R_l -> shapes of A and B, released and paper
TABLE = [((64, 3, 7, 7), .6, 4, .6, (266, 21), (448, 266), (7, 21), (448, 7)),
         ((64, 64, 3, 3), .6, 4, .6, (114, 192), (192, 114), (114, 192), (192, 114)),
         ((128, 64, 3, 3), .6, 4, .6, (228, 192), (384, 228), (114, 192), (384, 114)),
         ((128, 64, 1, 1), .6, 4, .6, (76, 64), (128, 76), (38, 64), (128, 38)),
         ((10, 256), .6, 4, .6, (4, 256), (10, 4), (6, 256), (10, 6)),
         ((100, 512), .8, 40, .5, (40, 512), (100, 40), (50, 512), (100, 50))]

@pytest.mark.parametrize('shape,r_c,rank,r_l,a,b,pa,pb', TABLE, ids=str)
def test_feddecomp_shapes(shape, r_c, rank, r_l, a, b, pa, pb):
    layer = nn.Linear(shape[1], shape[0]) if len(shape) == 2 else nn.Conv2d(shape[1], shape[0], shape[2])
    for form, want_a, want_b in (('released', a, b), ('paper', pa, pb)):
        p = start(FedDecomp(r_c=r_c, rank=rank, r_l=r_l, form=form), nn.Sequential(layer), 1).params
        assert (tuple(p['tau.0.weight.A'].shape), tuple(p['tau.0.weight.B'].shape)) == (want_a, want_b)
        assert (not p['tau.0.weight.B'].any()
                and p['tau.0.weight.A'].abs().max() <= shape[1]**-.5*(shape[2]**-.5 if len(shape) > 2 else 1))

@pytest.mark.parametrize('net,m,shared,private', [
    (feddecomp_resnet8((3, 32, 32), 10), FedDecomp(r_c=.6, rank=4), 1_235_274, 1_826_938),
    (feddecomp_resnet10((3, 32, 32), 100), FedDecomp(r_c=.8, rank=40), 4_957_092, 9_374_121)],
    ids=['ResNet-8', 'ResNet-10'])
def test_feddecomp_counts(net, m, shared, private):
    s = start(m, net, 1)
    assert (sum(v.numel() for k, v in s.params.items() if k not in s.personal) == shared
            and sum(v.numel() for v in s.personal.values()) == private)

@pytest.mark.parametrize('form,scale', [('released', 1/2), ('paper', 1.)])
def test_feddecomp_reconstructs_a_convolution(form, scale):
    "Entry by entry, with a grouped convolution as well."
    for groups in (1, 2):
        conv = nn.Conv2d(4, 4, 3, groups=groups, bias=False)
        m = FedDecomp(r_c=.5, form=form)
        p = start(m, nn.Sequential(conv), 1).params
        g = torch.Generator().manual_seed(0)
        A, B = torch.randn(p['tau.0.weight.A'].shape, generator=g), torch.randn(p['tau.0.weight.B'].shape, generator=g)
        s = scale if form == 'paper' or groups == 1 else 1/2
        out = m.use({**p, 'tau.0.weight.A': A, 'tau.0.weight.B': B})
        assert set(out) == {'0.weight'}
        flat = [sum(B[i, r].item()*A[r, j].item() for r in range(A.shape[0]))*s
                for i in range(B.shape[0]) for j in range(A.shape[1])]
        assert torch.allclose(out['0.weight'].flatten(), conv.weight.detach().flatten() + torch.tensor(flat), atol=1e-5)

@pytest.mark.parametrize('form', ['released', 'paper'])
def test_feddecomp_ends(form):
    net, fed = model(), train(FedAvg(), rounds=2)
    none = train(FedDecomp(lora_epochs=0, form=form), rounds=2)
    assert all(torch.equal(none.params[k], v) for k, v in fed.params.items())
    every = train(FedDecomp(lora_epochs=5, form=form), rounds=2)          # Local() has five epochs
    assert all(torch.equal(every.params[k], v) for k, v in net.named_parameters())
    moved = [k for k, v in every.personal.items() if k.endswith('.B') and v.any()]
    assert len(moved) == 4
    params, _ = deployed(FedDecomp(lora_epochs=5, form=form), every, 0)
    delta = (params['c2.weight'] - net.c2.weight).detach().reshape(8*3, 4*3) if True else None
    assert torch.linalg.matrix_rank(delta) <= min(24, 12, every.personal['tau.c2.weight.A'].shape[1])

def test_feddecomp_plus_feddecorr_is_another_method():
    a, b = train(FedDecomp() + FedDecorr(), rounds=2), train(FedDecomp(), rounds=2)
    assert (max((a.params[k] - b.params[k]).abs().max().item() for k in a.params) > 1e-6
            and set(a.personal) == set(b.personal))

def test_fedpara_product():
    "By loops, a linear layer and a convolution."
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16, bias=False), nn.Conv2d(8, 6, 3, bias=False))
    for m, join in ((FedPara(), lambda a, b: a*b), (pFedPara(), lambda a, b: a*(b + 1))):
        p = {k: torch.randn(v.shape, generator=g) for k, v in start(m, net, 1).params.items()}
        assert not {'0.weight', '1.weight'} & set(p)
        out = m.use(p)
        X1, Y1, X2, Y2 = (p[f'0.weight.{n}'] for n in ('X1', 'Y1', 'X2', 'Y2'))
        for o, i in ((0, 0), (3, 7), (15, 19)):
            a, b = (sum(X[o, r]*Y[i, r] for r in range(X.shape[1])) for X, Y in ((X1, Y1), (X2, Y2)))
            assert out['0.weight'][o, i].item() == pytest.approx(join(a, b).item(), abs=1e-5)
        a, b = (sum(p[f'1.weight.X{j}'][2, r]*p[f'1.weight.Y{j}'][5, s]*p[f'1.weight.T{j}'][r, s, 1, 2]
                    for r in range(p[f'1.weight.X{j}'].shape[1]) for s in range(p[f'1.weight.Y{j}'].shape[1]))
                for j in (1, 2))
        assert out['1.weight'][2, 5, 1, 2].item() == pytest.approx(join(a, b).item(), abs=1e-4)

@pytest.mark.parametrize('shape', [(64, 64), (100, 40), (32, 16, 3, 3)])
def test_fedpara_widths(shape):
    "The smallest width reaches full rank, the largest still saves, one more would not."
    o, i, *k = shape
    low, high = factors(shape, 0.), factors(shape, 1.)
    cost = lambda r: 2*r*(o + i + (r*9 if k else 0))
    full = o*i*(9 if k else 1)
    assert low**2 >= min(o, i) > (low-1)**2 and cost(high) < full <= cost(high+1) and low <= factors(shape, .5) <= high
    if not k:
        x = [torch.randn(n, low, dtype=torch.double, generator=torch.Generator().manual_seed(j))
             for j, n in enumerate((o, i, o, i))]
        assert torch.linalg.matrix_rank((x[0]@x[1].T)*(x[2]@x[3].T)) == min(o, i)
    assert factors((4, 4), .1) == 0

def test_pfedpara_sends_one_factor_and_keeps_the_other():
    state = train(pFedPara())
    assert (state.personal and {k[-1] for k in state.personal} == {'2'}
            and len({tuple(v.flatten().tolist())
                     for v in next(v for k, v in state.personal.items() if k.endswith('Y2'))}) == CLIENTS)
    with pytest.raises(ValueError, match='no layer of this network becomes smaller'):
        start(FedPara(), nn.Sequential(nn.Linear(4, 3)), 1)
