"What stays at home: exactly which tensors, phases, circles, low-rank corrections, and what the server averages."
import copy
import numpy as np, pytest, torch
from torch import nn
from fedlit.method import FedAvg, Method
from fedlit.methods import (
    APFL, Ditto, DP, FedAvgM, FedBABU, FedBN, FedCAC, FedDBE, FedDecomp, FedDecorr, FedPara, FedPer, FedProx, FedRep,
    FedRoD, FFALoRA, FlexLoRA, LGFedAvg, OldCounts, pFedMe, pFedPara, SCAFFOLD, SOLO)
from fedlit.methods.fedcac import circles, critical
from fedlit.methods.fedpara import best_factors, factors
from fedlit.models import alexnet_bn
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.server import network_for
from fedlit.state import start
from by_hand import (EXECUTORS, SIZES as OF_THREE, averaged, batches as few, by_torch, classifier, classify, descend,
                     gap, sgd)
from federation import CLIENTS, SIZES, batches, model, train, draw_cohort

# ---- FedBN ----

def test_fedbn_keeps_exactly_the_norms_of_alexnet():
    net = alexnet_bn((3, 64, 64), 10)
    norms = {f'{n}.{k}' for n, m in net.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))
             for k in m.state_dict()}
    assert set(start(FedBN(), net, 2).personal) == norms and len(norms) == 35

def test_fedbn_does_not_go_by_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            # a Linear called bn, a norm that is not
            self.bn, self.calm, self.ln = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
        def forward(self, x): return (z := self.ln(self.calm(self.bn(x)))), z
    assert set(start(FedBN(), Odd(), 2).personal) == {'calm.weight', 'calm.bias', 'calm.running_mean',
                                                      'calm.running_var', 'calm.num_batches_tracked'}

# ---- FedPer, LG-FedAvg, FedRep ----

def test_fedper_and_lgfedavg_split_the_network():
    net = model()
    head, rest = set(start(FedPer(), net, 2).personal), set(start(LGFedAvg(), net, 2).personal)
    assert head == {'head.weight', 'head.bias'} and head | rest == set(net.state_dict()) and not head & rest
    for m in (FedPer(head='nose'), LGFedAvg(head='nose'), FedRep(head='nose')):
        with pytest.raises(ValueError, match="head='nose' must name a part of the network"): start(m, net, 2)

def test_fedrep_trains_the_head_then_the_body():
    "By hand: two head steps on frozen features, then one body step with the head held, momentum from rest."
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 2, bias=False).double(), nn.Linear(2, 1, bias=False).double()
        def forward(self, x): return (z := self.body(x)), self.head(z)
    torch.manual_seed(0)
    net, lr, rho = Two(), .1, .9
    x, y = torch.randn(1, 3, 4, 2, dtype=torch.double), torch.randn(1, 3, 4, dtype=torch.double)
    square = lambda out, y: (out[:, 0] - y).square().mean()/2
    b, h, v = net.body.weight.detach().clone(), net.head.weight.detach().clone()[0], torch.zeros(2, dtype=torch.double)
    for t in range(2):
        z = x[0, t]@b.T
        v = rho*v + ((z@h - y[0, t])[:, None]*z).mean(0)
        h = h - lr*v
    e = (x[0, 2]@b.T@h - y[0, 2])[:, None]
    b = b - lr*torch.einsum('n,i,nj->ij', e[:, 0], h, x[0, 2])/4
    s = fed_round(Broadcast(FedRep(), net, start(FedRep(), net, 1), Local(epochs=3, lr=lr, momentum=rho),
                            criterion=square), [0], dict(x=x, y=y), [1.])
    assert (torch.allclose(s.personal['head.weight'][0, 0], h, atol=1e-5)
            and torch.allclose(s.params['body.weight'], b, atol=1e-5))

@pytest.mark.parametrize('executor', EXECUTORS)
def test_fedbabu_is_the_plain_loop_with_a_head_that_stands_still(executor):
    net = classifier(norm=True)
    state, still = classify(FedBABU(), 3, net, executor=executor), classifier(norm=True)
    still.head.requires_grad_(False)
    want = by_torch(3, model=still)
    assert set(state.fixed) == {'head.weight', 'head.bias'} and not set(state.fixed) & set(state.params)
    assert gap(want, {**state.params, **{k: v for k, v in state.buffers.items() if v.is_floating_point()},
                      **state.fixed}) < 1e-6
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in state.fixed.items())

@pytest.mark.parametrize('steps', [0, 3])
def test_a_client_of_fedbabu_tunes_the_whole_network_before_use(steps):
    net, m = classifier(norm=True), FedBABU(steps=steps, lr=.2)
    state, mine = classify(m, 2, net), classifier(norm=True)
    mine.load_state_dict({**state.params, **state.buffers, **state.fixed})
    x, y = few()['x'][1, 0], few()['y'][1, 0]
    opt = torch.optim.SGD(mine.eval().parameters(), lr=.2)
    for _ in range(steps):
        descend(opt, nn.functional.cross_entropy(mine(x)[1], y))
    params, buffers = network_for(m, state, 1, (x, y), net)
    assert gap(mine.state_dict(), {**params, **buffers}) < 1e-9 and 'head.weight' in params
    common = network_for(m, state)[0]
    assert torch.equal(common['head.weight'], net.head.weight)
    assert (gap(common, params) > 1e-3) == (steps > 0)

def test_fedbabu_does_not_tune_what_is_frozen():
    net = classifier(norm=True)
    net.head.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r'head.bias is frozen; FedBABU\(steps=0\) tunes nothing'):
        classify(FedBABU(), 1, net)
    still = classify(FedBABU(steps=0), 1, net)
    assert torch.equal(network_for(FedBABU(steps=0), still)[0]['head.weight'], net.head.weight)

def test_kept_tensors_are_exempt_from_scaffold():
    a, b = train(FedPer() + SCAFFOLD(), rounds=1), train(FedPer(), rounds=1)
    assert torch.allclose(a.personal['head.weight'], b.personal['head.weight'], atol=1e-12)
    later, plain = train(FedPer() + SCAFFOLD(), rounds=3), train(FedPer(), rounds=3)
    assert not torch.allclose(later.params['c1.weight'], plain.params['c1.weight'], atol=1e-6)

# ---- FedCAC ----

def test_fedcac_masks_and_circles_by_hand():
    now, old = torch.tensor([[4., 1.], [-2., .1]]), torch.tensor([[3.9, 0.], [-1., .1]])         # |dw w| = .4, 1, 2, 0
    assert critical({'w': now}, {'w': old}, .5)['w'].tolist() == [[0., 1.], [1., 0.]]
    # overlaps: 01 .5, 02 0, 03 1, 12 .5, 13 .5, 23 0
    masks = {'w': torch.tensor([[1., 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [1., 1, 0, 0]])}
    mean, most = (2*(.5+0+1+.5+.5+0))/12, 1.
    for r, beta in ((0, 10.), (5, 10.), (9, 10.), (20, 10.)):
        level = mean + (r+1)/beta*(most - mean)
        o = torch.tensor([[0, .5, 0, 1], [.5, 0, .5, .5], [0, .5, 0, 0], [1, .5, 0, 0]])
        want = (o >= level - 1e-9) & ~torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool)
        assert torch.equal(circles(masks, r, beta), want), (r, level)

@pytest.mark.parametrize('K', [2, 3])
def test_after_beta_rounds_circles_are_closed_even_among_equals(K):
    "All overlaps are equal, so each is the mean and the maximum."
    alike = {'w': torch.tensor([[1., 1, 0], [0, 1, 1], [1, 0, 1]])[:K]}
    assert [circles(alike, r, 3.).sum().item() for r in range(5)] == [K*K]*3 + [K]*2

def test_rounding_chooses_no_critical_entries():
    "A bias before BatchNorm has no gradient but rounding; which of its entries are critical is the same in a stack."
    w = dict(b=torch.rand(8, dtype=torch.double), w=torch.rand(8, dtype=torch.double))
    masks = []
    for seed in range(4):
        noise = torch.randn(8, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        masks.append(critical(dict(b=w['b'] + 1e-16*noise, w=w['w'] + .1*w['w']), w, .5))
    assert all(torch.equal(m[k], masks[0][k]) for m in masks for k in w)
    assert masks[0]['w'].nonzero()[:, 0].tolist() == sorted(w['w'].argsort()[4:].tolist())

def test_fedcac_gives_critical_entries_the_circle_and_others_the_mean():
    net, m = model(norm=False), FedCAC(beta=5.)
    data = dict(batches(0), x=batches(0)['x'].double())
    local = Local(lr=.1)
    s = fed_round(Broadcast(m, net, start(m, net, 4), local), range(4), data, SIZES)
    ends = [fed_round(Broadcast(FedAvg(), net, start(FedAvg(), net, 1), local), [0],
                      {k: v[i:i+1] for k, v in data.items()}, [1.]).params
            for i in range(4)]
    first, p = dict(net.named_parameters()), (SIZES/SIZES.sum()).double()
    masks = [critical({k: v for k, v in e.items()}, first, .5) for e in ends]
    circle = circles({k: torch.stack([m[k] for m in masks]) for k in first}, 0, 5.)
    for k in first:
        mean = sum(pk*e[k] for pk, e in zip(p, ends))
        assert torch.allclose(s.params[k], mean, atol=1e-5)
        for i in range(4):
            own = torch.stack([ends[j][k] for j in range(4) if circle[i, j]]).mean(0)
            assert torch.allclose(s.personal[k][i], torch.where(masks[i][k] > 0, own, mean), atol=1e-5)

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('mu', [0., 1.])
def test_fedcac_begins_with_the_newest_average_where_it_is_not_critical(mu, executor):
    "Four of six take part in a round; all six use their networks after it. FedProx holds a client where it began."
    net, local = model(norm=False), Local(lr=.1, momentum=.5)
    m = FedCAC(share=.3, beta=4.) + (FedProx(mu=mu) if mu else FedAvg())
    state, p = start(m, net, CLIENTS), SIZES.double()/SIZES.sum()
    mean, near, masks = {k: v.detach() for k, v in net.named_parameters()}, {}, {}
    def own(k): return {n: torch.where(masks[k][n] > 0, near[k][n], v) for n, v in mean.items()} if k in masks else mean
    for r in range(4):
        ks, data, ends = draw_cohort(r), batches(r), []
        data = dict(data, x=data['x'].double())
        for x, y, counts in zip(*data.values()):
            begun = {n: v.clone() for n, v in own(ks[len(ends)]).items()}
            net.load_state_dict(begun)
            end = sgd(net, [(x[t, :n], y[t, :n]) for t, n in enumerate(counts) if n], lr=.1, momentum=.5,
                      term=lambda net, *_, w=begun: mu/2*sum((v - w[n]).square().sum()
                                                             for n, v in net.named_parameters()))
            ends.append({n: v.detach() for n, v in end.named_parameters()})
        masks |= {k: critical(end, own(k), .3) for k, end in zip(ks, ends)}
        circle = circles({n: torch.stack([masks[k][n] for k in ks]) for n in mean}, r, 4.)
        for k, row in zip(ks, circle):
            near[k] = {n: torch.stack([e[n] for e, alike in zip(ends, row) if alike]).mean(0) for n in mean}
        mean = {n: sum(q*e[n] for q, e in zip(p, ends)) for n in mean}
        state = fed_round(Broadcast(m, net, state, local), ks, data, SIZES, executor)
        assert gap(state.params, mean) < 1e-10
        assert all(gap(network_for(m, state, k)[0], own(k)) < 1e-10 for k in range(CLIENTS)), r
    assert gap(train(FedCAC(share=0.), executor).params, train(FedAvg(), executor).params) < 1e-10

# ---- FedDecomp ----

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
        bound = shape[1]**-.5*(shape[2]**-.5 if len(shape) > 2 else 1)
        assert not p['tau.0.weight.B'].any()
        assert (p['tau.0.weight.A'].abs().max() <= bound) == (form == 'released')

@pytest.mark.parametrize('form,scale', [('released', 1/2), ('paper', 1.)])
def test_feddecomp_reconstructs_a_convolution(form, scale):
    "Entry by entry, with a grouped convolution and kernels that are not square as well."
    for groups, size in ((1, 3), (2, 3), (1, (3, 1)), (1, (1, 3))):
        conv = nn.Conv2d(4, 4, size, groups=groups, bias=False)
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
    params, _ = network_for(FedDecomp(lora_epochs=5, form=form), every, 0)
    delta = (params['c2.weight'] - net.c2.weight).detach().reshape(8*3, 4*3)
    assert torch.linalg.matrix_rank(delta) <= min(24, 12, every.personal['tau.c2.weight.A'].shape[1])

@pytest.mark.parametrize('form, tail', [('paper', True), ('released', False)])
def test_feddecomp_draws_a_as_its_source_says(form, tail):
    "Gaussian in the text, uniform in the code; both with a variance of a third of one over the columns."
    net = nn.Linear(300, 200)
    a = FedDecomp(form=form, r_l=1., rank=200).init(dict(net.named_parameters()), net)[0]['tau.weight.A']
    assert abs(a.var()*3*300 - 1) < .03
    kurtosis = ((a/a.std())**4).mean()
    assert abs(kurtosis - (3 if tail else 1.8)) < .1

def test_feddecomp_plus_feddecorr_is_another_method():
    a, b = train(FedDecomp() + FedDecorr(), rounds=2), train(FedDecomp(), rounds=2)
    assert (max((a.params[k] - b.params[k]).abs().max().item() for k in a.params) > 1e-6
            and set(a.personal) == set(b.personal))

# ---- FedPara and pFedPara ----

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

# ---- FFA-LoRA ----

class Corrected(nn.Module):
    "The classifier of `by_hand`, frozen but for its head, with W + s B A in the place of its first weight."
    def __init__(self, A, s, both):
        super().__init__()
        self.net, self.s = classifier(norm=True), s
        for k, v in self.net.named_parameters(): v.requires_grad_(k.startswith('head.'))
        self.A, self.B = nn.Parameter(A.clone(), requires_grad=both), nn.Parameter(torch.zeros(5, len(A)).double())
    def forward(self, x):
        body = self.net.body
        z = self.net.norm(nn.functional.linear(x, body.weight + self.s*self.B@self.A, body.bias)).tanh()
        return z, self.net.head(z)

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('both', [False, True])
def test_ffalora_is_the_plain_loop_with_a_frozen_network(both, executor):
    net, m = classifier(norm=True), FFALoRA(rank=2, alpha=3., both=both)
    first = start(m, net, 3)
    A = {**first.fixed, **first.params}['lora.body.weight.A']
    state, want = classify(m, 3, net, executor=executor), by_torch(3, model=Corrected(A, 1.5, both))
    have = {**state.params, **state.buffers, **state.fixed}
    names = {k: dict(A='lora.body.weight.A', B='lora.body.weight.B').get(k, k.removeprefix('net.')) for k in want}
    own = {k: v for k, v in want.items() if v.is_floating_point()}
    assert gap({k: have[n] for k, n in names.items()}, own) < 1e-6
    assert set(state.params) == {'head.weight', 'head.bias', 'lora.body.weight.B', *['lora.body.weight.A'][:both]}
    assert torch.equal(A, have['lora.body.weight.A']) != both
    used = network_for(m, state)[0]['body.weight']
    assert torch.allclose(used, want['net.body.weight'] + 1.5*want['B']@want['A'], atol=1e-6)

def test_ffalora_refuses_a_network_with_nothing_to_correct():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)
        def forward(self, x): return x, self.head(x)
    with pytest.raises(ValueError, match="no layer to correct besides 'head'"): start(FFALoRA(), Only(), 2)

# ---- FlexLoRA ----

def signed_svd(W):
    "U, singular values and V' by numpy, the largest entry of every column of U being positive."
    U, s, V = np.linalg.svd(W.numpy(), full_matrices=False)
    for j in range(len(s)):
        sign = np.sign(U[np.abs(U[:, j]).argmax(), j])
        U[:, j], V[j] = sign*U[:, j], sign*V[j]
    return torch.tensor(U), torch.tensor(s), torch.tensor(V)

def flexlora(A, ranks, alpha, rounds):
    "The server's network and the mean of the products, with clients that really have factors of their rank."
    server, data, B = classifier(norm=True), few(), torch.zeros(5, len(A)).double()
    for some in rounds:
        p, ends, W = OF_THREE[some].double()/OF_THREE[some].sum(), [], 0.
        for q, k in zip(p, some):
            net = Corrected(A[:ranks[k]], alpha/max(ranks), True)
            net.net.load_state_dict(server.state_dict())
            with torch.no_grad(): net.B.copy_(B[:, :ranks[k]])
            learned = [v for v in net.parameters() if v.requires_grad]
            opt = torch.optim.SGD(learned, lr=.1, momentum=.9, weight_decay=.01)
            for t in range(int(data['counts'][k].sum())):
                descend(opt, nn.functional.cross_entropy(net.train()(data['x'][k, t])[1], data['y'][k, t]))
            ends.append(net.net)
            W = W + q*(net.B@net.A).detach()
        averaged(server, ends, some)
        U, s, V = signed_svd(W)
        s = torch.where(s > 1e-12, s, 0.)
        B, A = (U*s.sqrt())[:, :len(A)], (s.sqrt()[:, None]*V)[:len(A)]
    return server, B, A, W

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('ranks', [(3, 2, 1), (1, 2, 2), (2, 2, 2)])
def test_flexlora_is_the_plain_loop_of_clients_with_factors_of_their_rank(ranks, executor):
    net, rounds, m = classifier(norm=True), ([0, 1, 2], [2, 1], [0, 2], [0, 1, 2]), FlexLoRA(ranks, alpha=3.)
    state, local = start(m, net, 3), Local(lr=.1, momentum=.9, weight_decay=.01)
    server, B, A, W = flexlora(state.params['lora.body.weight.A'], ranks, 3., rounds)
    for some in rounds:
        sent, data = Broadcast(m, net, state, local), {k: v[some] for k, v in few().items()}
        state = fed_round(sent, some, data, OF_THREE[some], executor)
    have, own = {**state.params, **state.buffers}, server.state_dict()
    assert gap(have, {k: own[k] for k in ('head.weight', 'head.bias', 'norm.running_mean', 'norm.running_var')}) < 1e-8
    assert gap({f: have[f'lora.body.weight.{f}'] for f in 'AB'}, dict(A=A, B=B)) < 1e-8
    lost = np.linalg.svd(W.numpy())[1][max(ranks):]
    assert abs((B@A - W).norm().item() - (lost**2).sum()**.5) < 1e-8
    U, s, V = signed_svd(W)
    for k, r in enumerate(ranks):
        best = own['body.weight'] + 3/max(ranks)*(U[:, :r]*s[:r])@V[:r]
        assert torch.allclose(network_for(m, state, k)[0]['body.weight'], best, atol=1e-8), k
    assert torch.allclose(network_for(m, state)[0]['body.weight'], own['body.weight'] + 3/max(ranks)*B@A, atol=1e-8)

def test_best_factors_do_not_depend_on_the_signs_that_a_decomposition_chose():
    g = torch.Generator().manual_seed(0)
    W = torch.randn(7, 4, dtype=torch.double, generator=g)
    turn = torch.diag(torch.tensor([1., -1., -1., 1.], dtype=torch.double))
    B, A = best_factors(W, 3)
    assert (B.gather(0, B.abs().argmax(0, keepdim=True)) > 0).all()
    turned, back = best_factors(W.T, 3), best_factors(W@turn, 3)
    for b, a in ((turned[1].T, turned[0].T), (back[0], back[1]@turn)):
        assert torch.allclose(b@a, B@A, atol=1e-12)
    assert torch.allclose(best_factors(W@turn, 3)[0], B, atol=1e-12)
    for dtype in (torch.float32, torch.double):
        b, a = best_factors(torch.ones(4, 3, dtype=dtype), 3)
        assert b.dtype == dtype and (b[:, 1:] == 0).all() and torch.allclose(b@a, torch.ones(4, 3, dtype=dtype))

def test_a_few_weak_clients_leave_a_server_of_a_lower_rank():
    m, net = FlexLoRA((3, 1, 1)), classifier(norm=True)
    state, local = start(m, net, 3), Local(lr=.1)
    go = lambda who: fed_round(Broadcast(m, net, state, local), who, {k: v[who] for k, v in few().items()},
                               torch.ones(len(who)), 'loop')
    state = go([1])
    B = state.params['lora.body.weight.B']
    assert (B[:, 1:] == 0).all() and (state.params['lora.body.weight.A'][1:] == 0).all() and B[:, 0].norm() > 1e-3
    state = go([0, 2])
    assert torch.linalg.matrix_rank(state.params['lora.body.weight.B'], atol=1e-9) == 2

# ---- FedDBE ----

def feddbe(kappa, mu, rounds):
    "The server's network, the clients' vectors, and the common mean, by deep copies and torch.optim.SGD."
    server, data, shifts, common = classifier(norm=True), few(), torch.zeros(3, 5, dtype=torch.double), None
    for some in rounds:
        ends, means, p = [], [], OF_THREE[some].double()/OF_THREE[some].sum()
        for k in some:
            net, b, running = copy.deepcopy(server).train(), shifts[k].clone().requires_grad_(), torch.zeros(5).double()
            opt = torch.optim.SGD([*net.parameters(), b], lr=.1, momentum=.9, weight_decay=.01)
            for t in range(int(data['counts'][k].sum())):
                opt.zero_grad(set_to_none=False)
                z = net(data['x'][k, t])[0]
                running = (1 - mu)*running.detach() + mu*z.mean(0)
                out, term = (net.head(z), 0.) if common is None else (
                    net.head(z + b), kappa/2*(running - common).square().mean())
                (nn.functional.cross_entropy(out, data['y'][k, t]) + term).backward()
                opt.step()
            ends.append(net)
            means.append(running.detach())
            shifts[k] = b.detach()
        if common is None: common = sum(q*m for q, m in zip(p, means))
        averaged(server, ends, some)
    return server, shifts, common

@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('kappa,mu', [(0., 1.), (4., 1.), (4., .3)])
def test_feddbe_is_the_plain_loop_with_a_vector_at_home(kappa, mu, executor):
    net, rounds, m = classifier(norm=True), ([0, 1], [0, 1, 2], [2, 1], [0, 2]), FedDBE(kappa, mu)
    state, local = start(m, net, 3), Local(lr=.1, momentum=.9, weight_decay=.01)
    for some in rounds:
        data = {k: v[some] for k, v in few().items()}
        state = fed_round(Broadcast(m, net, state, local), some, data, OF_THREE[some], executor)
    server, shifts, common = feddbe(kappa, mu, rounds)
    own = {n: v for n, v in server.state_dict().items() if v.is_floating_point()}
    assert gap({**state.params, **state.buffers}, own) < 1e-9
    assert torch.allclose(state.personal['own_shift'][:], shifts, atol=1e-9) and shifts.abs().amin(1).max() > 1e-3
    assert torch.allclose(state.server['FedDBE']['mean'], common, atol=1e-9)
    mine = network_for(m, state, 1)[0]
    assert torch.allclose(mine['head.bias'], server.head.bias + server.head.weight@shifts[1], atol=1e-9)

def test_feddbe_refuses_a_head_without_a_bias():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        def forward(self, x): return (z := self.body(x)), self.head(z)
    with pytest.raises(ValueError, match='the linear layer on the features, with a bias'): start(FedDBE(), Bare(), 2)

@pytest.mark.parametrize('other', [SOLO(), LGFedAvg()], ids=repr)
def test_feddbe_refuses_to_leave_the_mean_feature_at_home(other):
    with pytest.raises(ValueError, match='the mean feature of all clients, but feature_mean stays at home'):
        start(FedDBE() + other, classifier(False), 2)

class Halve(Method):
    "Its server takes half of every step."
    def merge(self, delta, server): return {k: v/2 for k, v in delta.items()}, server

@pytest.mark.parametrize('other', [FedAvgM(), FedAvgM(form='paper'), OldCounts(), Halve()], ids=repr)
def test_feddbe_remembers_the_mean_feature_as_the_clients_sent_it(other):
    "What may change the step of the buffers comes after."
    with pytest.raises(ValueError, match=f'write FedDBE . {other.name}$'): other + FedDBE()
    mean = lambda m: train(m, norm=False, rounds=1).server['FedDBE']['mean']
    assert torch.equal(mean(FedDBE() + other), mean(FedDBE()))

@pytest.mark.parametrize('dp', [DP(), DP(at='client')], ids=repr)
def test_feddbe_refuses_dp_which_sends_no_mean_feature(dp):
    for make in (lambda: dp + FedDBE(), lambda: FedDBE() + dp):
        with pytest.raises(ValueError, match='DP sends no buffers, and the mean feature is one'): make()

@pytest.mark.parametrize('early,late', [(Ditto(), FedBABU(steps=0)), (pFedMe(), FedBABU(steps=0)),
                                        (FedRoD(), FFALoRA()), (APFL(), FFALoRA()),
                                        (FedDBE(), FFALoRA()), (FedDecomp(), FedBABU())])
def test_a_part_that_takes_tensors_away_comes_first(early, late):
    "Another part would build on tensors that are gone; the other order runs."
    with pytest.raises(ValueError, match=f'write {late.name} . {early.name}$'): start(early + late, model(), 2)
    assert train(late + early, rounds=1).params
