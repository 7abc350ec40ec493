"DepthFL against plain loops: losses of exits, averages over depths, memories of FedDyn; executors; refusals."
import copy, math
import pytest, torch
from torch.nn import functional as F
from fedlit.methods import DepthFL, FedDyn, MaskedCE
from fedlit.methods.depthfl import Exits, exits_cnn, exits_cnn4, exits_mlp, exits_resnet18, mutual, ramp
from fedlit.models import cnn4, count
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import start
from federation import difference

CLIENTS, LEVELS = 8, (3, 3, 1, 2)       # two clients of each level, in this order
K, STEPS, SAMPLES = 4, 4, 6
LR, MOMENTUM, DECAY = .1, .9, .01
LOCAL = Local(lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

def who(round): return [[0, 3, 5, 6], [1, 2, 4, 7]][round]   # depths 3 3 1 2 both times
def depth_of(client): return LEVELS[client*len(LEVELS)//CLIENTS]

def three_stages():
    torch.manual_seed(3)
    return exits_mlp((5,), 4, hidden=6, depth=3).double()

def data(round):
    g = torch.Generator().manual_seed(round)
    return dict(x=torch.randn(K, STEPS, SAMPLES, 5, generator=g, dtype=torch.double),
                y=torch.randint(0, 4, (K, STEPS, SAMPLES), generator=g))

def trained(method, net, rounds=2, executor='loop', weights=(1.,)*K):
    "The state after some rounds of fedlit."
    state = start(method, net, CLIENTS)
    for r in range(rounds):
        state = fed_round(Broadcast(method, net, state, LOCAL), who(r), data(r), torch.tensor(weights), executor)
    return state

# ---- the same, written out: short networks that are really built ----

def kl(teacher, pupil):
    "From the definition, a mean over samples; the teacher is not moved."
    p = torch.exp(teacher)/torch.exp(teacher).sum(1, keepdim=True)
    q = torch.exp(pupil)/torch.exp(pupil).sum(1, keepdim=True)
    return (p.detach()*(p.detach().log() - q.log())).sum(1).mean()

def loss_of_exits(logits, y, weight, distill=True, last=False):
    "Every exit learns the labels, and from every other exit; or the `last` one alone learns the labels."
    if last: return F.cross_entropy(logits[-1], y)
    pairs = [(i, j) for i in range(len(logits)) for j in range(len(logits)) if i != j]
    total = sum(F.cross_entropy(z, y) for z in logits)
    return total + sum(weight/(len(logits)-1)*kl(logits[j], logits[i]) for i, j in pairs if distill)

def shortened(net, depth):
    short = copy.deepcopy(net).train()
    short.stages, short.exits = short.stages[:depth], short.exits[:depth]
    return short

def logits_of_exits(net, x):
    found = []
    for stage, exit in zip(net.stages, net.exits):
        x = stage(x)
        found.append(exit(x)[1])
    return found

def local_training(net, batches, loss):
    "SGD with momentum and weight decay; what has no gradient, such as an exit without a loss, stays."
    velocity = {}
    for x, y in batches:
        net.zero_grad()
        loss(net, logits_of_exits(net, x), y).backward()
        with torch.no_grad():
            for n, p in net.named_parameters():
                if p.grad is None: continue
                velocity[n] = MOMENTUM*velocity.get(n, 0.) + p.grad + DECAY*p
                p -= LR*velocity[n]

def bent(net, received, slope, alpha):
    "What FedDyn adds to a client's loss: its own slope, and a spring to what it received."
    return sum(alpha/2*(p - received[n]).square().sum() - (p*slope.get(n, 0.)).sum()
               for n, p in net.named_parameters())

def sent_by(net, depth, last):
    "The whole short network; of its exits only the one that trained, if that is the `last`."
    untrained = tuple(f'exits.{i}.' for i in range(depth-1) if last)
    return {n: v for n, v in net.state_dict().items() if not n.startswith(untrained)}

def written_out(rounds=2, top=2, alpha=None, distill=True, last=False):
    "Server, slopes of the clients and sum of the server (FedDyn, if `alpha`); the ramp ends in round `top`."
    net, slopes, h = three_stages(), {k: {} for k in range(CLIENTS)}, {}
    names = [n for n, _ in net.named_parameters()]
    for r in range(rounds):
        received, returned = {n: v.clone() for n, v in net.state_dict().items()}, []
        weight = math.exp(-5*(1 - min(r, top)/top)**2)
        for k, x, y in zip(who(r), *data(r).values()):
            def loss(short, logits, y):
                plain = loss_of_exits(logits, y, weight, distill, last)
                return plain + bent(short, received, slopes[k], alpha) if alpha else plain
            short = shortened(net, depth_of(k))
            local_training(short, zip(x, y), loss)
            returned.append(sent := sent_by(short, depth_of(k), last))
            if alpha: slopes[k].update({n: slopes[k].get(n, 0.) - alpha*(sent[n] - received[n])
                                        for n in names if n in sent})
        holders = {n: [sent[n] for sent in returned if n in sent] for n in received}
        new = {n: sum(vs)/len(vs) if vs else received[n] for n, vs in holders.items()}
        for n in names:
            if not alpha or not holders[n]: continue
            h[n] = h.get(n, 0.) - alpha*len(holders[n])*(new[n] - received[n])/CLIENTS
            new[n] = new[n] - h[n]/alpha
        net.load_state_dict({n: v if v.is_floating_point() else received[n] for n, v in new.items()})
    return net.state_dict(), slopes, h

def worst(state, theirs):
    ours = {**state.params, **state.buffers}
    return max((ours[k] - v).abs().max().item() for k, v in theirs.items() if v.is_floating_point())

# ---- the loss ----

@pytest.mark.parametrize('depth', [1, 2, 3, 4])
@pytest.mark.parametrize('distill', [True, False])
def test_loss_and_gradient(depth, distill):
    torch.manual_seed(depth)
    o, y = (2*torch.randn(7, 4, 5, dtype=torch.double)).requires_grad_(), torch.randint(0, 5, (7,))
    m = DepthFL(distill=distill, ramp=9)
    z = m.output(o, 4-depth, 4, 4)
    ours = F.cross_entropy(z, y) + m.loss(z)
    plain = loss_of_exits([o[:, i] for i in range(depth)], y, math.exp(-5*(5/9)**2), distill)
    assert abs((ours - plain).item()) < 1e-10
    assert (torch.autograd.grad(ours, o)[0] - torch.autograd.grad(plain, o)[0]).abs().max() < 1e-10
    if distill and depth > 1: assert abs((loss_of_exits([o[:, i] for i in range(depth)], y, 0.) - ours).item()) > 1e-2

def test_mutual_is_zero_for_equal_exits_and_for_one():
    logp = torch.randn(3, 1, 5).log_softmax(-1)
    assert mutual(logp.expand(3, 4, 5), torch.ones(4)).abs().max() < 1e-5
    assert mutual(torch.randn(3, 4, 5).log_softmax(-1), torch.tensor([0., 0., 1., 0.])).abs().max() < 1e-5

def test_ramp():
    assert ([ramp(0, 300), ramp(300, 300), ramp(999, 300)] == [math.exp(-5), 1., 1.]
            and abs(ramp(150, 300) - math.exp(-1.25)) < 1e-12)

# ---- rounds ----

@pytest.mark.parametrize('method, kw', [(DepthFL(LEVELS, ramp=2), {}),
                                        (DepthFL(LEVELS, distill=False, exits='last'), dict(last=True)),
                                        (DepthFL(LEVELS, ramp=2) + FedDyn(.3), dict(alpha=.3))],
                         ids=lambda v: repr(v) if not isinstance(v, dict) else '')
def test_rounds_against_short_networks(method, kw):
    params, slopes, h = written_out(**kw)
    for executor in ('loop', 'vmap'):
        state = trained(method, three_stages(), executor=executor)
        assert worst(state, params) < 1e-9
        if 'alpha' not in kw: continue
        our_slopes, our_h = state.client['FedDyn']['g'], state.server['FedDyn']['h']
        for n in our_slopes:
            for k in range(CLIENTS): assert (our_slopes[n][k] - slopes[k].get(n, 0.)).abs().max() < 1e-9
            assert (our_h[n] - h.get(n, 0.)).abs().max() < 1e-9

def test_rounds_can_disagree():
    params = written_out()[0]
    for m in (DepthFL(LEVELS, distill=False), DepthFL(LEVELS, ramp=3), DepthFL((3, 3, 2, 1), ramp=2),
              DepthFL(LEVELS, ramp=2) + FedDyn(.1)):
        assert worst(trained(m, three_stages(), executor='vmap'), params) > 1e-4, m

def test_what_nobody_had_is_kept():
    net, m = three_stages(), DepthFL((1, 2), distill=False) + FedDyn()
    before = start(m, net, 2)
    batch = {k: v[:2] for k, v in data(0).items()}
    after = fed_round(Broadcast(m, net, before, LOCAL), [0, 1], batch, [1., 3.])
    for k, v in {**before.params, **before.buffers}.items():
        if v.is_floating_point():
            assert torch.equal({**after.params, **after.buffers}[k], v) == (k.split(".")[1] == '2')

def test_weighted_average_over_those_who_have_it():
    net, m = three_stages(), DepthFL((3, 2, 2, 1), distill=False)
    batch, w = data(0), torch.tensor([1., 2., 3., 4.])
    alone = [fed_round(Broadcast(m, net, start(m, net, 4), LOCAL), [k], {n: v[k:k+1] for n, v in batch.items()},
                       [1.]).params
             for k in range(K)]
    both = fed_round(Broadcast(m, net, start(m, net, 4), LOCAL), [0, 1, 2, 3], batch, w).params
    for k, v in both.items():
        have = {'0': [0, 1, 2, 3], '1': [0, 1, 2], '2': [0]}[k.split(".")[1]]
        assert (v - sum(w[i]*alone[i][k] for i in have)/sum(w[i] for i in have)).abs().max() < 1e-6

# ---- networks, sums, errors ----

def test_modes():
    net, x = three_stages(), torch.randn(7, 5, dtype=torch.double)
    assert net.train()(x)[1].shape == (7, 3, 4) and net.eval()(x)[1].shape == (7, 4)
    a, b, c = (logits for _, logits in net.each(x))
    assert (torch.allclose(net(x)[1], (a+b+c)/3) and torch.allclose(net.first(1)(x)[1], a)
            and torch.equal(net(x)[0], net.each(x)[0][0]))
    with pytest.raises(ValueError, match='3 stages and 2 exits'): Exits(net.stages, net.exits[:2])

@pytest.mark.parametrize('fill', ['zero', 'inf'])
def test_masked_logits_stay_finite(fill):
    net, ends = three_stages().eval(), []
    batch = dict(data(0), y=data(0)['y'] % 3) # nobody has class 3
    for m, e in ((MaskedCE(fill) + DepthFL(LEVELS, ramp=1), 'loop'),
                 (MaskedCE(fill) + DepthFL(LEVELS, ramp=1), 'vmap'),
                 (DepthFL(LEVELS, ramp=1), 'loop')):
        ends.append(fed_round(Broadcast(m, net, start(m, net, CLIENTS), LOCAL), who(0), batch, [1.]*K, e).params)
    far = lambda a, b: max((a[k] - b[k]).abs().max().item() for k in a)
    assert far(*ends[:2]) < 1e-9 and far(*ends[1:]) > 1e-4 and all(v.isfinite().all() for v in ends[0].values())

def test_refusals():
    with pytest.raises(ValueError, match='no tensors named'): DepthFL().mask(dict(w=torch.ones(1)), {}, 0, 4)
    with pytest.raises(ValueError, match='depths up to 3'):
        DepthFL().mask(dict(three_stages().named_parameters()), {}, 0, 4)

@pytest.mark.parametrize('shape', [(1, 28, 28), (3, 9, 7), (1, 4, 4)])
def test_convolutions_with_exits(shape):
    net = exits_cnn(shape, 10, channels=(4, 6), hidden=5).double()
    x, y = torch.randn(1, 2, 8, *shape, dtype=torch.double), torch.randint(10, (1, 2, 8))
    shallow, deep = (fed_round(Broadcast(DepthFL(levels=(d,)), net, start(DepthFL(levels=(d,)), net, 1), Local(lr=.1)),
                               [0], dict(x=x, y=y), [1.])
                     for d in (2, 4))
    moved = lambda state: {k.split('.')[1] for k, v in net.named_parameters() if not torch.equal(v, state.params[k])}
    assert moved(shallow) == {'0', '1'} and moved(deep) == {'0', '1', '2', '3'}
    assert net.eval()(x[0, 0])[1].shape == (8, 10)

def test_sizes_of_the_thesis():
    # Table 4.2: 4.48M and 8.54M, the means over four depths at 100 classes, cut off after two digits
    for depths, printed in (((2, 2, 2, 2), 4.48), ((3, 4, 6, 3), 8.54)):
        with torch.device('meta'): net = exits_resnet18((3, 32, 32), 100, depths=depths)
        assert int(sum(count(net.first(d)) for d in (1, 2, 3, 4))/4/1e4)/100 == printed

@pytest.mark.parametrize('kind, side, kw', [
    (exits_cnn4, 8, dict(channels=(4, 4, 8, 8))), (exits_cnn, 8, dict(channels=(3, 4), hidden=5)),
    (exits_resnet18, 7, dict(width=.0625, depths=(1, 1, 1, 1)))], ids=['four', 'two', 'residual'])
def test_convolutions_with_exits_are_one_in_all_executors(kind, side, kw):
    net = kind((1, side, side), 4, **kw).double()
    x, y = torch.randn(4, 2, 6, 1, side, side, dtype=torch.double), torch.randint(4, (4, 2, 6))
    ends = [fed_round(Broadcast(DepthFL(), net, start(DepthFL(), net, 4), Local(lr=.1)), [0, 1, 2, 3], dict(x=x, y=y),
                      [1.]*4, e)
            for e in ('loop', 'vmap')]
    assert difference(*ends) < 1e-9 and net.eval()(x[0, 0])[1].shape == (6, 4)

def test_four_convolutions_are_those_of_the_thesis():
    grey = cnn4((1, 28, 28), 10) # the stages are the thesis' network without its last mean and its head
    whole = sum(count(s) for s in exits_cnn4((1, 28, 28), 10).stages)
    assert whole == count(grey) - count(grey.head)
