"Top-k and few bits with error feedback: against loops by hand, against what theory promises, and on the wire."
import math
import numpy as np, pytest, torch
import fedlit.laws as laws
from fedlit.data import load
from fedlit.methods import DP, FedAvg, FedBN, FedPer, FedRolex, HeteroFL, Quantize, SCAFFOLD, TopK
from fedlit.methods.compression import largest, quantise
from fedlit.local import Local
from fedlit.models import build
from fedlit.parse import methods_by_name
from fedlit.partition import iid
from fedlit.run import federate
from fedlit.scale.capacity import traffic
from fedlit.ground.tree import sqnorm, sub
from by_hand import FULL, W0, ended, fit

LR = Local(lr=.1, momentum=0.)

def tree(seed=0):
    gen = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=gen, dtype=torch.double) for k, s in dict(a=(3, 4), b=(5,), c=()).items()}

# ---- what is sent ----

@pytest.mark.parametrize('m', [TopK(share=.001), Quantize(bits=2), DP(clip=1e-3, noise=0.)], ids=lambda m: m.name)
@pytest.mark.parametrize('executor', ['loop', 'vmap'])
def test_a_client_has_the_network_that_it_trained_and_not_what_it_sent_of_it(m, executor):
    task = load('digits').subset(120, seed=0, test=60)
    plain, some = (federate(build('mlp', task, seed=0), task, iid(task.y_train, 3), method, 1, Local(epochs=3),
                            tests=[torch.arange(60)]*3, keep_locals=True, progress=False, device='cpu',
                            executor=executor) for method in (FedAvg(), m))
    assert not torch.allclose(plain.state.params['head.weight'], some.state.params['head.weight'], atol=1e-3)
    for k, v in plain.locals['params'].items(): assert torch.allclose(v, some.locals['params'][k], atol=1e-6), k
    assert plain.last['personal_after'] == pytest.approx(some.last['personal_after'])

@pytest.mark.parametrize('share', [.01, .1, .5, 1.])
def test_the_largest_entries_of_the_whole_update(share):
    v = tree()
    flat = lambda t: torch.cat([x.flatten() for x in t.values()])
    k, whole, kept = math.ceil(share*18), flat(v), flat(largest(v, share))
    top = whole.abs().topk(k).indices
    assert kept.count_nonzero() == k and torch.equal(kept[top], whole[top])
    assert (kept - whole).square().sum() <= (1 - k/18)*whole.square().sum() + 1e-12 # a contraction

def test_of_equal_entries_as_many_as_there_should_be():
    assert largest(dict(a=torch.ones(10)), .3)['a'].tolist() == [1]*3 + [0]*7
    assert not largest(dict(a=torch.zeros(10)), .3)['a'].any()

@pytest.mark.parametrize('share, n, few', [(.07, 100, 7), (.1, 30, 3), (.29, 100, 29), (.2, 11, 3), (1e-9, 5, 1)])
def test_a_share_of_whole_entries_is_not_one_more(share, n, few):
    ".07*100 is a little more than 7 in double precision."
    assert int((largest(dict(w=torch.arange(1., n + 1)), share)['w'] != 0).sum()) == few

def test_of_a_part_of_the_network_the_share_of_that_part():
    v, mask = dict(a=torch.arange(1., 9).reshape(4, 2), b=torch.tensor([9., 10.])), dict(a=torch.tensor([1., 0, 1, 0]))
    assert largest(v, .5, mask)['a'].tolist() == [[0, 0], [0, 0], [0, 6], [0, 0]]
    assert largest(v, .5, mask)['b'].tolist() == [9, 10]

@pytest.mark.parametrize('bits', [2, 4, 8])
def test_rounding_is_to_a_neighbour_and_right_on_average(bits):
    levels = 2**(bits - 1) - 1
    torch.manual_seed(0)
    v = torch.randn(40)
    step = v.abs().max()/levels
    many = torch.stack([quantise(v, levels) for _ in range(4000)])
    whole = many/step
    assert (whole - whole.round()).abs().max() < 1e-3 and whole.abs().max() <= levels*(1 + 1e-6)
    assert ((many - v).abs() <= step*(1 + 1e-4)).all()
    f = (v/step) % 1    # the variance of a number that is rounded by lot is f (1 - f) steps squared
    far = (many.mean(0) - v).abs()/(step*(f*(1 - f)/4000).sqrt() + 1e-6)
    assert far.max() < 4.5
    assert many.var(0).sum().item() == pytest.approx((step**2*(f*(1 - f)).sum()).item(), rel=.05)
    assert not quantise(torch.zeros(3), levels).any()
    assert len(torch.stack([Quantize(bits).send(dict(v=v), {}, {})[0]['v'] for _ in range(99)]).unique()) < 2**bits

def test_rounding_for_feedback_is_a_contraction():
    "By omega over 1 + omega, on average; with few bits plain rounding is none."
    v = torch.full((1000,), 1e-2)
    v[0] = 1.
    torch.manual_seed(0)
    for levels in (1, 7):
        f = (v*levels) % 1
        omega = ((f*(1 - f)).sum()/(v*levels).square().sum()).item()
        lost = lambda d, n=levels: np.mean([((quantise(v, n, d) - v).square().sum()/v.square().sum()).item()
                                            for _ in range(2000)])
        assert lost(False) == pytest.approx(omega, rel=.1)
        assert lost(True) == pytest.approx(omega/(1 + omega), rel=.1)
        assert levels > 1 or omega > 1

def test_two_bits_do_not_run_away():
    "A fed-back residual of updates of length one, one entry huge."
    from fedlit.methods.compression import feed_back
    gen, left = torch.Generator().manual_seed(0), torch.zeros(2000)
    for _ in range(150):
        d = .02*torch.randn(2000, generator=gen)
        d[0] = 1.
        left = feed_back(lambda t: {'a': quantise(t['a'], 1, True)}, dict(a=d), dict(residual=dict(a=left)), {})[1]
        left = left['residual']['a']
    assert left.norm() < 40

# ---- over rounds ----

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('feedback', [True, False])
@pytest.mark.parametrize('participate', [lambda r: [0, 1], lambda r: [r % 2]], ids=['all', 'one in turn'])
def test_top_k_with_error_feedback_by_hand(participate, feedback, executor):
    "One entry of three, four rounds."
    w, left = W0.clone(), [torch.zeros(3, dtype=torch.double) for _ in range(2)]
    for r in range(4):
        sent = []
        for k in participate(r):
            wanted = ended(k, w) - w + (left[k] if feedback else 0)
            sent.append(torch.where(wanted.abs() == wanted.abs().max(), wanted, 0.))
            left[k] = wanted - sent[-1]
        w = w + torch.stack(sent).mean(0)
    s = fit(TopK(share=.3, feedback=feedback), 4, participate, FULL, LR, executor=executor)
    assert torch.allclose(s.params['head.weight'][0], w, atol=1e-9)
    if feedback:
        have = s.client['TopK']['residual']['head.weight'][:, 0]
        assert torch.allclose(have, torch.stack(left), atol=1e-9)
    else: assert s.client['TopK'] == {}

@pytest.mark.parametrize('m', [TopK(share=.2), Quantize(bits=3), TopK(share=.2) + Quantize(bits=3)], ids=repr)
def test_nothing_is_lost(m):
    "All that was sent and what is left are all that was to be sent, round after round; here one client, for itself."
    w, moved = W0.clone(), torch.zeros(3, dtype=torch.double)
    for r in range(5):
        s = fit(m, r+1, lambda r: [0], FULL, LR)
        moved += ended(0, w) - w
        w = s.params['head.weight'][0]
        left = sum(s.client[p.name]['residual']['head.weight'][0, 0] for p in m.parts)
        assert torch.allclose(w - W0 + left, moved, atol=1e-9)

@pytest.mark.parametrize('m', [TopK(share=.1) + Quantize(bits=4), TopK(share=.5) + TopK(share=.2)], ids=repr)
def test_what_is_sent_is_what_is_counted(m):
    "In every round, whatever the later part held back."
    gen = torch.Generator().manual_seed(0)
    memory = [p.init(dict(w=torch.zeros(1000)), lambda k: False)[2] for p in m.parts]
    for _ in range(6):
        d = dict(w=torch.randn(1000, generator=gen)**3)
        for i, p in enumerate(m.parts): d, memory[i] = p.send(d, memory[i], {})
        assert d['w'].count_nonzero() <= 100

def test_quantize_alone_sends_its_error_of_an_entry_that_did_not_change():
    torch.manual_seed(0)
    left = dict(residual=dict(w=torch.tensor([0., 1.])))
    sent, kept = Quantize(bits=2).send(dict(w=torch.tensor([1., 0.])), left, {})
    assert sent['w'][1] and torch.equal(sent['w'] + kept['residual']['w'], torch.ones(2))

def test_rounding_comes_last():
    with pytest.raises(ValueError, match=r'write TopK\(share=0.1, feedback=True\) \+ Quantize'):
        Quantize() + TopK(share=.1)
    for m in (TopK(share=1.), TopK(feedback=False)): Quantize() + m # these leave rounded numbers as they are

@pytest.mark.parametrize('cut', [HeteroFL(rates=(1., .5)), FedRolex(rates=(1., .5))], ids=repr)
def test_what_a_client_does_not_have_stays_in_the_residual(cut):
    m, world = cut + TopK(share=.1), laws.small_world(bias=True)
    seen = laws.check_executors(m, world)
    assert seen.holds and 'extract' in seen.reason, seen
    assert laws.check_masked(m, world).holds
    left = laws.train(m, world).client['TopK']['residual']
    assert all(v[:].any() for k, v in left.items() if k.endswith('weight'))

def test_residuals_only_of_what_travels():
    state = laws.train(FedBN() + FedPer() + TopK(share=.1), laws.small_world())
    assert not set(state.client['TopK']['residual']) & set(state.personal)
    assert set(state.client['TopK']['residual']) == set(state.params) - set(state.personal)

@pytest.mark.parametrize('compress', [TopK(share=.1), Quantize()], ids=repr)
@pytest.mark.parametrize('name', sorted({*methods_by_name()} - {'DepthFL', 'FedExP'})) # another network; refused
def test_beside_any_method(name, compress):
    "Before and after any exported method, for a round."
    m = methods_by_name()[name](**(dict(groups=3) if name == 'StructuredDeCov' else {}))
    world = laws.small_world(norm=False)
    for pair in ((compress, m), (m, compress)):
        if name == 'DP' and pair[0] is m: continue # has to come last
        if (pair[0].name, pair[1].name) == ('Quantize', 'TopK'): continue # rounding comes last
        state = laws.train(pair[0] + pair[1], world, rounds=1)
        assert all(v.isfinite().all() for v in state.params.values()), pair

# ---- bytes ----

def up(m, **kw):
    world = laws.small_world(norm=kw.pop('norm', False), bias=True)
    return traffic(m, world.model.float(), (1, 6, 6), 3, **kw).up.to_numpy(), sum(
        p.numel() for p in world.model.parameters()), len(list(world.model.parameters()))

def encoded(v, bits):
    "An update of whole numbers with few of them: a bit for every entry, then the numbers."
    flat, there = v.numpy(), v.numpy() != 0
    return np.packbits(there).tobytes() + flat[there].astype({8: np.int8, 32: np.float32}[bits]).tobytes()

def test_bytes_are_those_of_an_encoding():
    plain, n, tensors = up(FedAvg())
    assert (plain == 4*n).all()
    share, few = .25, math.ceil(.25*n)
    v = largest(dict(a=torch.randn(n)), share)['a']
    assert (up(TopK(share=share))[0] == len(encoded(v, 32))).all() and len(encoded(v, 32)) == math.ceil(n/8) + 4*few
    assert (up(Quantize())[0] == n + 4*tensors).all() and (up(Quantize(bits=4))[0] == math.ceil(n/2) + 4*tensors).all()
    whole = (v/v.abs().max()*127).round()
    whole = torch.where((v != 0) & (whole == 0), 1., whole)
    assert (up(TopK(share=share) + Quantize())[0] == len(encoded(whole, 8)) + 4*tensors).all()
    assert (up(TopK(share=.01))[0] == math.ceil(math.ceil(.01*n)*(32 + math.ceil(math.log2(n)))/8)).all() # a list

def test_bytes_of_a_part_of_the_network_and_of_what_others_send():
    rates = HeteroFL(rates=(1., .5))
    bare, cut = up(rates)[0], up(rates + Quantize())[0]
    tensors = up(FedAvg())[2]
    assert len(set(bare)) == 2 and (cut == np.ceil(bare/4) + 4*tensors).all()
    control, n, _ = up(SCAFFOLD() + TopK(share=.25))
    assert (control == up(TopK(share=.25))[0] + 4*n).all()
    stats = up(FedAvg(), norm=True)[0] - 4*up(FedAvg(), norm=True)[1]
    assert (stats > 0).all() and (up(Quantize(), norm=True)[0] - stats == sum(
        [up(Quantize(), norm=True)[1], 4*up(Quantize(), norm=True)[2]])).all()

def test_noise_at_a_client_fills_an_update_up():
    assert (up(TopK() + DP(at='client'))[0] == up(FedAvg())[0]).all()
    assert (up(TopK() + DP())[0] == up(TopK())[0]).all()

def test_a_residual_does_not_grow_without_bound():
    "Error feedback of a contraction with factor 1 - k/n: what is left stays below a multiple of what came."
    v, left, most = tree(), None, 0.
    for r in range(200):
        new = tree(r)
        wanted = new if left is None else {k: new[k] + left[k] for k in new}
        left = sub(wanted, largest(wanted, .2))
        most = max(most, sqnorm(left).item()/sqnorm(v).item())
    assert most < (2*(1 - .2)/.2)**2 and most > 1
