"The laws of the theory notebooks on random input: what descent is, what is conserved, the rank of the pull."
import pytest, torch, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from fedlit.papers.theory import balanced_layers, descent, flow, product, pull

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10_000)

def rand(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

def client(classes=5, inputs=12, present=5, n=40, noise=.3, seed=0):
    "Gaussian classes, every present one with n/present samples"
    y = torch.arange(n) % present
    return 2*rand(classes, inputs, seed=seed)[y] + noise*rand(n, inputs, seed=seed + 1), y

@quick
@given(depth=st.integers(1, 4), seed=seeds)
def test_descent_is_autograd(depth, seed):
    x, y = client(seed=seed)
    ws = [rand(o, i, seed=seed + i).div(i**.5).requires_grad_() for i, o in zip([12] + [7]*depth, [7]*depth + [5])]
    F.cross_entropy(x @ product(ws).T, y, reduction='sum').backward()
    for w, v in zip(ws, descent(ws, x, y)): torch.testing.assert_close(-w.grad, v, rtol=1e-9, atol=1e-9)

def test_clients_side_by_side_flow_as_one_by_one():
    cs = [client(present=p, seed=p) for p in (1, 5)]
    ws = balanced_layers([12, 7, 5, 5], .5*torch.linspace(1, .5, 5, dtype=torch.float64))
    both = flow([w.expand(2, *w.shape) for w in ws], *map(torch.stack, zip(*cs)), 1e-3, 20)
    for i, (x, y) in enumerate(cs):
        for a, b in zip(both, flow(ws, x, y, 1e-3, 20)): torch.testing.assert_close(a[:, i], b, rtol=1e-10, atol=1e-12)

@pytest.mark.parametrize('L', (1, 2, 3))
@pytest.mark.parametrize('M', (0., .3))
def test_neighbours_keep_their_difference(L, M):
    x, y = client()
    start = balanced_layers([12] + [8]*(L - 1) + [5, 5], .6*torch.linspace(1, .6, 5, dtype=torch.float64), M)
    W = flow(start, x, y, 2e-5, 400)
    for a, b in zip(W[:-1], W[1:]):
        D = b.mT @ b - a @ a.mT
        torch.testing.assert_close(D, D[:1].expand_as(D), rtol=0, atol=1e-9)
    torch.testing.assert_close(D[-1], M*torch.eye(5, dtype=D.dtype), rtol=0, atol=1e-9)

def test_the_forms_of_the_pull_agree_where_images_of_a_class_do():
    ws = balanced_layers([12, 8, 5, 5], torch.linspace(1.2, .8, 5, dtype=torch.float64))
    for noise, same in ((0., True), (1., False)):
        x, y = client(noise=noise)
        assert torch.allclose(pull(ws, x, y), pull(ws, x, y, 'means'), rtol=0, atol=1e-10) is same

@quick
@given(present=st.integers(1, 5), seed=seeds)
def test_rank_of_the_pull(present, seed):
    x, y = client(present=present, seed=seed)
    ws = [rand(o, i, seed=seed + i).div(i**.5) for i, o in ((12, 8), (8, 5))]
    rank = lambda x, form: torch.linalg.matrix_rank(pull(ws, x, y, form), atol=1e-9).item()
    assert rank(x, 'means') == min(present, 4)
    assert rank(x - x.mean(0), 'means') == present - 1
    assert rank(x, 'exact') <= 4
    torch.testing.assert_close(pull(ws, x, y).sum(0), torch.zeros(12, dtype=torch.float64), rtol=0, atol=1e-12)

@pytest.mark.parametrize('call, says', [
    (lambda: balanced_layers([6, 3, 4], torch.ones(4)), 'width 3'),
    (lambda: balanced_layers([6, 5, 4], torch.ones(3), M=.1), 'needs 5'),
    (lambda: balanced_layers([6, 4, 4], torch.ones(4), M=-2.), 'M=-2.0'),
    (lambda: pull([torch.ones(2, 3)], torch.ones(4, 3), torch.zeros(4, dtype=torch.long), 'mean'), "'mean'")])
def test_refusals(call, says):
    with pytest.raises(ValueError, match=says): call()
