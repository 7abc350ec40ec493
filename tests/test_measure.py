"""What the notebooks of measure and figure leave out: oracles, random input, devices, the state override, overlaps."""
import math
import matplotlib.pyplot as plt, numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from matplotlib.text import Text
from scipy import stats
from torch import nn
from fedlit import figure as fig
from fedlit.measure import (Spread, accuracy, agreement, drift, effective_rank, evaluate, feature_layer,
                            features_of, local_global_gap, count_large, spectrum, spread)

devices = ['cpu'] + (['cuda'] if torch.cuda.is_available() else [])
quick = settings(max_examples=25, deadline=None)
positive = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30)

def cloud(n, d, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, d, generator=g, dtype=torch.float64)
            @ torch.randn(d, d, generator=g, dtype=torch.float64)).to(dtype)

class Net(nn.Module):
    "Features after batch normalisation and dropout: wrong in training mode, so a forgotten eval() shows"
    def __init__(self, d=5, width=4, classes=3):
        super().__init__()
        self.body, self.norm, self.drop, self.head = (
            nn.Linear(d, width), nn.BatchNorm1d(width), nn.Dropout(.5), nn.Linear(width, classes))

    def forward(self, x):
        z = self.drop(self.norm(self.body(x)))
        return z, self.head(z)

@pytest.fixture
def net():
    torch.manual_seed(0)
    m = Net()
    m.norm.running_mean.normal_()
    m.norm.running_var.uniform_(.5, 2)
    return m

@pytest.fixture
def xy():
    g = torch.Generator().manual_seed(1)
    return torch.randn(53, 5, generator=g), torch.randint(0, 3, (53,), generator=g)

# ---- spectrum

@pytest.mark.parametrize('device', devices)
@pytest.mark.parametrize('n,d', [(2, 1), (2, 7), (7, 2), (40, 12), (12, 40)])
def test_spectrum_is_the_covariances(n, d, device):
    z = cloud(n, d)
    want = np.linalg.eigvalsh(np.cov(z.double().numpy(), rowvar=False, bias=True).reshape(d, d))[::-1]
    got = spectrum(z.to(device))
    assert got.shape == (d,) and got.dtype == torch.float64 and got.device.type == 'cpu'
    assert (got.diff() <= 0).all() and (got >= 0).all()
    np.testing.assert_allclose(got, want, atol=1e-12 * want[0])

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_spectrum_takes_any_float(dtype):
    z = cloud(30, 4, dtype=dtype)
    torch.testing.assert_close(spectrum(z), spectrum(z.double()))

@quick
@given(st.integers(2, 20), st.integers(1, 20), st.integers(0, 999), st.floats(.01, 100))
def test_spectrum_scales_with_the_square_and_sums_to_the_variance(n, d, seed, c):
    z = cloud(n, d, seed, torch.float64)
    s = spectrum(z)
    torch.testing.assert_close(spectrum(c*z), c*c*s, rtol=1e-6, atol=1e-9 * c*c * s[0].item())
    torch.testing.assert_close(s.sum(), z.var(0, correction=0).sum())
    assert count_large(s, 1e-12*s[0].item()) <= min(n - 1, d)

def test_dead_and_copied_features_are_exact_zeros():
    z = cloud(50, 4)
    s = spectrum(torch.cat([z, z[:, :2], torch.full((50, 3), 7.)], 1))
    assert (s[:4] > 0).all() and (s[4:] == 0).all()

def test_constant_features_have_no_dimension():
    s = spectrum(torch.ones(9, 3))
    assert ((s == 0).all() and effective_rank(s) == count_large(s) == 0
            and local_global_gap(s, s) == 0)

@pytest.mark.parametrize('n, d', [(3, 4), (1000, 8), (9973, 3), (2, 500)])
@pytest.mark.parametrize('v', [.1, -1/3, 1e5/7, 1e-30])
def test_what_rounding_leaves_of_constant_features_is_no_dimension(n, d, v):
    s = spectrum(torch.full((n, d), v, dtype=torch.float64))
    assert (s == 0).all() and effective_rank(s) == 0
    z = torch.full((n, d), v) # the least that float32 can vary
    z[0, 0] = torch.nextafter(z[0, 0], torch.tensor(torch.inf))
    assert effective_rank(spectrum(z)) == pytest.approx(1)

def test_top_keeps_the_largest():
    z = cloud(30, 9)
    assert torch.equal(spectrum(z, top=3), spectrum(z)[:3]) and len(spectrum(z, top=100)) == 9

def test_spectrum_leaves_no_graph_and_no_trace():
    z = cloud(9, 3).requires_grad_()
    before = z.detach().clone()
    assert not spectrum(z).requires_grad and torch.equal(z, before)

@pytest.mark.parametrize('bad', [torch.ones(3), torch.ones(2, 3, 4), torch.ones(1, 3),
                                 torch.tensor([[1., math.inf], [0., 1.]]), torch.tensor([[1., math.nan], [0., 1.]])])
def test_spectrum_refuses(bad):
    with pytest.raises(ValueError): spectrum(bad)

# ---- counts

@quick
@given(positive, st.floats(1e-3, 1e3))
def test_counts_lie_between_one_and_d_and_ignore_scale(s, c):
    s = torch.tensor(s, dtype=torch.float64)
    assert 1 - 1e-9 <= effective_rank(s) <= len(s) + 1e-9
    assert effective_rank(c*s) == pytest.approx(effective_rank(s))
    assert effective_rank(torch.cat([s, torch.zeros(3)])) == pytest.approx(effective_rank(s))
    assert s.sum()**2/(s**2).sum() <= effective_rank(s) + 1e-9  # Renyi entropies fall with their order

# ---- R

@quick
@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=30), st.floats(1e-3, 1e3))
def test_gap_is_the_mean_log_ratio_antisymmetric_and_free_of_a_common_scale(pairs, c):
    l, g = (torch.tensor(v, dtype=torch.float64) for v in zip(*pairs))
    r = local_global_gap(l, g)
    assert r == pytest.approx(np.mean([math.log(a/b) for a, b in pairs]), abs=1e-9)
    assert (local_global_gap(g, l) == pytest.approx(-r, abs=1e-9)
            and local_global_gap(c*l, c*g) == pytest.approx(r, abs=1e-9))

@pytest.mark.parametrize('count', [effective_rank, count_large])
def test_counts_refuse_features_in_place_of_their_spectrum(count):
    with pytest.raises(ValueError, match=r'got shape \(9, 4\); give spectrum\(features\)'): count(cloud(9, 4))

def test_gap_cuts_at_top():
    l = torch.ones(150)
    g = torch.cat([torch.ones(100), torch.full((50,), 1e-3)])
    assert local_global_gap(l, g, top=100) == 0 and local_global_gap(l, g) == pytest.approx(math.log(1e3)/3)

# ---- drift

def test_nan_is_no_gap_and_no_rank():
    bad, good = torch.tensor([2., math.nan, 1]), torch.tensor([2., 1, 0])
    assert all(map(math.isnan, (local_global_gap(bad, good), local_global_gap(good, bad), local_global_gap(bad, bad),
                                effective_rank(bad), effective_rank(bad*math.nan))))

def test_drift_and_agreement_against_a_loop():
    g = torch.Generator().manual_seed(0)
    K = 4
    params = dict(a=torch.randn(3, 2, generator=g), b=torch.randn((), generator=g))
    stacked = {n: p + torch.randn(K, *p.shape, generator=g) for n, p in params.items()}
    u = torch.stack([torch.cat([(stacked[n][k] - params[n]).flatten() for n in params]) for k in range(K)])
    cos = [torch.cosine_similarity(u[i], u[j], 0).item() for i in range(K) for j in range(i)]
    assert drift(stacked, params) == pytest.approx(u.norm(dim=1).mean().item(), rel=1e-5)
    assert agreement(stacked, params) == pytest.approx(np.mean(cos), rel=1e-4)
    shuffled = dict(reversed(stacked.items()))
    assert drift(shuffled, params) == pytest.approx(drift(stacked, params))

def test_clients_that_did_not_move():
    params = dict(w=torch.randn(3))
    stacked = dict(w=params['w'].expand(2, 3))
    assert drift(stacked, params) == 0 and agreement(stacked, params) == 0
    with pytest.raises(ValueError, match='at least 2'): agreement(dict(w=torch.ones(1, 3)), params)

# ---- evaluation

@pytest.mark.parametrize('device', devices)
@pytest.mark.parametrize('batch', [1, 10, 53, 1000])
def test_evaluate_against_plain_torch(net, xy, batch, device):
    x, y = xy
    with torch.no_grad(): z, logits = net.eval()(x)
    net.train().to(device)
    got = evaluate(net, x, y, batch=batch)  # x and y stay on the CPU
    assert (got['accuracy'] == pytest.approx(accuracy(logits, y))
            and got['loss'] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-4))
    f = features_of(net, x, batch=batch)
    assert f.device.type == 'cpu' and not f.requires_grad
    torch.testing.assert_close(f, z, rtol=1e-3, atol=1e-3)

@pytest.mark.parametrize('target, shape, y', [
    ('class', (6, 3), torch.zeros(6).long()), ('dense', (6, 3, 4), torch.zeros(6, 4).long()),
    ('labels', (6, 3), torch.ones(6, 3)), ('numbers', (6, 3), torch.ones(6, 3))])
@pytest.mark.parametrize('bad', [slice(0, 1), slice(None)])
def test_what_a_network_says_is_nan_and_so_are_its_scores(target, shape, y, bad):
    class Said(nn.Module):
        def forward(self, x): return x, x
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert all(map(math.isfinite, evaluate(Said(), x, y, target=target).values()))
    x[bad] = math.nan
    assert all(map(math.isnan, evaluate(Said(), x, y, target=target, batch=2).values()))
    if target == 'class': assert math.isnan(accuracy(x, y))

def test_nothing_is_left_behind(net, xy):
    net.norm.eval()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    evaluate(net, *xy)
    features_of(net, xy[0])
    with pytest.raises(RuntimeError): evaluate(net, xy[0][:, :2], xy[1])
    assert net.training and net.drop.training and not net.norm.training
    assert (all(torch.equal(before[n], t) for n, t in net.state_dict().items())
            and all(p.grad is None for p in net.parameters()))

def test_state_stands_in_for_the_model(net, xy):
    x, y = xy
    torch.manual_seed(5)
    other = Net()
    other.norm.running_mean.fill_(.3)
    state = dict(other.named_parameters()), dict(other.named_buffers())
    before = {n: t.clone() for n, t in net.state_dict().items()}
    assert evaluate(net, x, y, state=state) == evaluate(other, x, y)
    assert torch.equal(features_of(net, x, state=state), features_of(other, x))
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())

@pytest.mark.parametrize('n', [2, 5])
def test_a_network_that_returns_logits_alone_is_refused(n):
    x, plain = torch.zeros(n, 5), nn.Linear(5, 3)
    for ask in features_of, feature_layer, lambda net, x: evaluate(net, x, torch.zeros(n).long()):
        with pytest.raises(TypeError, match=r'Linear must return \(features, logits\), .* a Tensor; .*models.wrap'):
            ask(plain, x)

def test_prepare_sees_every_batch(net, xy):
    x, y = xy
    seen = []
    def prepare(b):
        seen.append(len(b))
        return b.float()/10
    assert (evaluate(net, (10*x).double(), y, batch=20, prepare=prepare)['loss']
            == pytest.approx(evaluate(net, x, y)['loss'], rel=1e-5))
    assert seen == [20, 20, 13]

def test_evaluate_refuses(net, xy):
    x, y = xy
    with pytest.raises(ValueError, match='53 inputs and 5 labels'): evaluate(net, x, y[:5])
    with pytest.raises(ValueError, match='empty'): evaluate(net, x[:0], y[:0])
    with pytest.raises(ValueError, match='empty'): features_of(net, x[:0])

# ---- spread

def test_spread():
    assert spread(torch.tensor([1., 2., 3.])) == Spread(2, 1, 3) and f'{spread([1, 2, 3]):.1f}' == '2.0 ± 2.5'
    assert f'{spread([1, 3]):+.1f}' == '+2.0 ± 12.7'
    assert math.isnan(spread([1]).sd) and str(spread([1])) == '1.000 (n=1)'
    with pytest.raises(ValueError): spread([])

# ---- figures

def overlaps(ax):
    ax.figure.canvas.draw()
    b = [Text.get_window_extent(t) for t in ax.texts]
    return sum(p.overlaps(q) for i, p in enumerate(b) for q in b[:i])

def pooled(h, gap):
    "Positions by pooling adjacent violators, written out."
    order, pools, out = np.argsort(h, kind='stable'), [], np.empty(len(h))
    for v in np.asarray(h)[order] - gap*np.arange(len(h)):
        pools.append([v])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]): pools[-2:] = [pools[-2] + pools[-1]]
    out[order] = np.concatenate([np.full(len(p), np.mean(p)) for p in pools]) + gap*np.arange(len(h))
    return out

@quick
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12), st.floats(.1, 10))
def test_apart(h, gap):
    out = fig.space_out(h, gap)
    i = np.argsort(h, kind='stable')
    assert (np.diff(out[i]) >= gap - 1e-9).all() and np.mean(out) == pytest.approx(np.mean(h), abs=1e-6)
    np.testing.assert_allclose(fig.space_out(out, gap), out, atol=1e-9)
    np.testing.assert_allclose(out, pooled(h, gap), atol=1e-9)
    low = fig.space_out(h, gap, low=-5, high=-5 + gap*len(h))
    assert low.min() >= -5 - 1e-9 and low.max() <= -5 + gap*len(h) + 1e-9

@pytest.mark.parametrize('n', [1, 2, 8, 14])
def test_names_never_overlap_and_stay_in_the_figure(n):
    curves = {f'curve {i}': np.stack([.5 + .3*np.linspace(0, 1, 20) + 1e-4*i + .01*s for s in range(3)])
              for i in range(n)}
    for ax in (fig.against_rounds(curves), fig.against_rounds(curves, accent='curve 0'),
               fig.spectra({l: v[:, ::-1] for l, v in curves.items()})):
        assert overlaps(ax) == 0 and len(ax.texts) == n and tuple(ax.figure.get_size_inches()) == (6, 3)

def test_names_do_not_overlap_where_a_later_panel_changes_the_limits():
    whole, (one, two) = plt.subplots(1, 2, sharey=True)
    for ax, low in (one, .85), (two, -9): fig.against_rounds({str(k): [low, .9 + .02*k] for k in range(4)}, ax=ax)
    whole.draw_without_rendering()
    assert overlaps(one) == overlaps(two) == 0
    plt.close(whole)

def test_a_dead_spectrum_ends_its_line():
    ax = fig.spectra({'alive': torch.tensor([1., .1, .01, .001]), 'dead': torch.tensor([1., .1, 0., 0.])},
                     accent='dead')
    assert np.isfinite(ax.lines[1].get_ydata()).sum() == 2 and overlaps(ax) == 0
    fig.spectra({'all dead': torch.zeros(3), 'alive': torch.ones(3)})

def test_bars_hold_the_means_and_start_at_zero():
    ax = fig.bars({('FedAvg', 'a'): {'without': [.4, .6], 'with': .7},
                   ('FedAvg', 'b'): {'without': spread([.1, .3]), 'with': [.9]}})
    assert (sorted(round(p.get_height(), 6) for p in ax.patches) == [.2, .5, .7, .9]
            and all(p.get_y() == 0 for p in ax.patches))
    assert [t.get_text() for t in ax.texts] == ['FedAvg'] and [t.get_text() for t in ax.get_xticklabels()] == ['a', 'b']

def test_lines_and_bands_are_intervals_of_the_mean():
    seen = np.random.default_rng(0).normal(size=(5, 4))
    ends = [stats.ttest_1samp(seen[:, k], 0).confidence_interval() for k in range(4)]
    band = fig.against_rounds({'a': seen}, accent='a').collections[0].get_paths()[0].get_extents()
    assert np.allclose([band.ymin, band.ymax], [min(e.low for e in ends), max(e.high for e in ends)])
    line, = [c.get_segments()[0] for c in fig.bars({'x': {'a': seen[:, 0]}}).collections]
    assert np.allclose(sorted(line.max(0) - line.min(0)), [0, ends[0].high - ends[0].low])

def test_an_axes_of_the_callers():
    _, ax = plt.subplots()
    assert fig.bars({'lost': {'a': [1., 2.]}}, ax=ax) is ax
    assert fig.against_rounds({'a': [1, 2, 3]}, ax=plt.subplots()[1]).get_xlabel() == 'communication round'

def test_style_is_undone_and_mistakes_leave_no_figure():
    before = dict(plt.rcParams)
    with fig.style(): assert not plt.rcParams['axes.spines.top']
    assert dict(plt.rcParams) == before
    for call in (lambda: fig.spectra({}), lambda: fig.spectra({'a': [1.]}, accent='b'), lambda: fig.against_rounds({}),
                 lambda: fig.bars({}), lambda: fig.bars({'a': {'s': 1}}, accent='t')):
        with pytest.raises(ValueError): call()
    assert not plt.get_fignums()
