"FIARSE: thresholds, a gradient for the choice, and rounds against plain torch with a backward pass of their own."
import copy
import pytest, torch
from math import ceil, floor
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from fedlit.batches import Batches
from fedlit.cohort import Broadcast
from fedlit.data import load
from fedlit.local import Local
from fedlit.methods import FIARSE, FedAvg, FedProx
from fedlit.methods.fiarse import of_layers, submodel, threshold
from fedlit.models import build
from fedlit.partition import iid
from fedlit.round import fed_round, local_phase
from fedlit.run import federate
from fedlit.server import network_for
from fedlit.state import start
from by_hand import SIZES, batches, classifier, gap

RATES = 1., .5, .2

class Step(torch.autograd.Function):
    "Is s at least t? Backwards, 2t/(s + t)^2 where it is."
    @staticmethod
    def forward(ctx, s, t):
        ctx.save_for_backward(s, t)
        return (s >= t).to(s)
    @staticmethod
    def backward(ctx, g):
        s, t = ctx.saved_tensors
        return g*torch.nan_to_num(2*t/(s + t).square())*(s >= t), None

CUT = 'body.weight', 'body.bias', 'head.weight', 'head.bias' # the norm is everybody's

def bound(params, rate):
    sizes = sorted((abs(v) for n in CUT for v in params[n].flatten().tolist()), reverse=True)
    return (1 - 1e-6)*torch.tensor(sizes[ceil(rate*len(sizes) - 1e-9) - 1] if rate < 1 else 0., dtype=torch.double)

def written_out(rounds, norm, mu=0., lr=.1, momentum=.9, decay=.01, soft=True):
    "The server's network by deep copies; entries that a client does not hold are put back after every step."
    server, data = classifier(norm), batches()
    for who in rounds:
        ends, had = [], []
        for k in who:
            net = copy.deepcopy(server).train()
            first = {n: v.detach().clone() for n, v in net.named_parameters()}
            t, speed = bound(first, RATES[k]), {n: torch.zeros_like(v) for n, v in first.items()}
            held = {n: (v.abs() >= t if n in CUT else torch.ones_like(v, dtype=torch.bool)) for n, v in first.items()}
            for i in range(int(data['counts'][k].sum())):
                own = dict(net.named_parameters())
                step = lambda v: Step.apply(v.abs(), t) if soft else (v.abs() >= t).to(v)
                seen = {n: v*step(v) if n in CUT else v for n, v in own.items()}
                loss = F.cross_entropy(functional_call(net, seen, (data['x'][k, i],))[1], data['y'][k, i])
                loss = loss + mu/2*sum((v - first[n]).square().sum() for n, v in own.items())
                for (n, v), g in zip(own.items(), torch.autograd.grad(loss, own.values())):
                    with torch.no_grad():
                        speed[n] = torch.where(held[n], momentum*speed[n] + g + decay*v, 0.)
                        v.sub_(lr*speed[n])
            ends.append(net.state_dict())
            had.append(held)
        p = SIZES[who].double()/SIZES[who].double().sum()
        new = server.state_dict()
        for n, v in new.items():
            if not v.is_floating_point(): continue
            share = sum(q*h[n].double() for q, h in zip(p, had)) if n in had[0] else torch.ones_like(v)
            step = sum(q*(h[n].double() if n in h else 1.)*(e[n] - v) for q, h, e in zip(p, had, ends))
            new[n] = v + torch.where(share > 0, step/share.clamp(min=1e-300), 0.)
        server.load_state_dict(new)
    return server

def federation(m, rounds, norm, executor):
    net, data = classifier(norm), batches()
    state = start(m, net, 3)
    for who in rounds:
        sent = Broadcast(m, net, state, Local(lr=.1, momentum=.9, weight_decay=.01))
        state = fed_round(sent, who, {k: v[who] for k, v in data.items()}, SIZES[who], executor)
    return state

@pytest.mark.parametrize('executor', ['loop', 'vmap'])
@pytest.mark.parametrize('norm', [True, False])
@pytest.mark.parametrize('mu', [0., .5])
def test_fiarse_is_the_plain_loop(mu, norm, executor):
    rounds, m = ([0, 1, 2], [2, 1], [0, 2], [2]), FIARSE(rates=RATES) + (FedProx(mu=mu) if mu else FedAvg())
    state, server = federation(m, rounds, norm, executor), written_out(rounds, norm, mu)
    own = {n: v for n, v in server.state_dict().items() if v.is_floating_point()}
    assert gap({**state.params, **state.buffers}, own) < 1e-9
    params = {n: v.detach() for n, v in server.named_parameters()}
    for k, rate in enumerate(RATES):
        mine = {n: v*(v.abs() >= bound(params, rate)) if n in CUT else v for n, v in params.items()}
        assert gap(network_for(m, state, k)[0], mine) < 1e-9
    assert gap(network_for(m, state)[0], params) < 1e-9 # the server's network is whole
    other = written_out(rounds, norm, mu, soft=False).state_dict()
    assert gap(own, {n: v for n, v in other.items() if v.is_floating_point()}) > 1e-3 # the gradient of the choice

@pytest.mark.parametrize('rounding,to', [('up', ceil), ('down', floor)])
def test_thresholds_keep_as_many_as_they_should(rounding, to):
    params, g = {'a.weight': None, 'a.bias': None, 'norm.weight': None}, torch.Generator().manual_seed(0)
    for n, shape in zip(params, ((7, 9), (7,), (7,))): params[n] = torch.randn(shape, generator=g)
    for rate in (1., .9, .5, .3, .1, .01):
        t = threshold(params, rate, rounding)
        assert sum((params[n].abs() >= t).sum() for n in ('a.weight', 'a.bias')) == max(1, to(round(70*rate, 9)))
        assert threshold(params, torch.tensor(rate, dtype=torch.double), rounding) == t
    assert of_layers(params) == ['a.weight', 'a.bias']
    assert of_layers({'weight': torch.ones(2, 2), 'bias': torch.ones(2)}) == ['weight', 'bias']

def test_the_last_weight_that_is_kept_does_not_leave_by_rounding():
    w = torch.tensor([[3., 2., 1., .5]])
    t, least = threshold({'a.weight': w}, .5), torch.nextafter(torch.tensor(2.), torch.tensor(0.))
    assert submodel(least, t) == least and submodel(torch.tensor(1.99), t) == 0

def test_norms_and_what_has_no_layer_are_everybodys():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.Embedding(4, 3))
    assert of_layers({n: v.detach() for n, v in net.named_parameters()}) == ['0.weight', '0.bias', '3.weight']

@pytest.mark.parametrize('t', [0., .3, 2.])
def test_the_gradient_is_that_of_the_step(t):
    t, w = torch.tensor(t, dtype=torch.double), torch.randn(40, generator=torch.Generator().manual_seed(1)).double()
    w[0], w[1], w[2] = 0., t, -t
    slopes = []
    for cut in (lambda v: submodel(v, t), lambda v: v*Step.apply(v.abs(), t)):
        v = w.clone().requires_grad_()
        assert torch.equal(cut(v).detach(), w*(w.abs() >= t))
        slopes.append(torch.autograd.grad((cut(v) - 1).pow(3).sum(), v)[0])
    assert torch.allclose(*slopes, atol=1e-12) and slopes[0].isfinite().all()

def test_what_a_client_does_not_hold_stays():
    m, net = FIARSE(rates=RATES), classifier()
    state = start(m, net, 3)
    out = local_phase(Broadcast(m, net, state, Local(lr=.1, weight_decay=.1)), [0, 1, 2], Batches(**batches()))
    held = [sum(int(out['mask'][n][k].sum()) for n in CUT) for k in range(3)]
    assert held == [32, 16, 7] and set(out['mask']) == set(CUT)
    for n in CUT:
        for k in range(3): assert torch.equal(out['params'][n][k][~out['mask'][n][k].bool()],
                                              state.params[n][~out['mask'][n][k].bool()])

def test_a_client_is_tested_with_the_rate_of_its_number_whoever_else_takes_part():
    task = load('digits').subset(120, seed=0, test=60)
    net, clients, share = build('mlp', task, seed=0), iid(task.y_train, 6), .1
    run = federate(net, task, clients, FIARSE(rates=(1., share)), 1, Local(epochs=3), tests=[torch.arange(60)]*6,
                   without=(0, 1, 2), keep_locals=True, progress=False, device='cpu') # those that have the whole
    right = []
    for i in range(3): # all tensors are weights and biases of layers
        own = {k: v[i] for k, v in run.locals['params'].items()}
        least = torch.cat([v.abs().flatten() for v in own.values()]).topk(
            ceil(share*sum(v.numel() for v in own.values()))).values[-1]
        few = {k: v*(v.abs() >= least) for k, v in own.items()}
        logits = functional_call(net, few, task.normalise(task.x_test))[1]
        right.append((logits.argmax(1) == task.y_test).double().mean().item())
    assert run.last['personal_after'] == pytest.approx(sum(right)/3)
