"What stays at home: exactly which tensors, phases, circles, and what the server averages."
import pytest, torch
from torch import nn
from fedlit.method import FedAvg
from fedlit.methods import FedBN, FedCAC, FedDecomp, FedPer, FedRep, LGFedAvg, FedPara, MOON, SCAFFOLD
from fedlit.methods.fedcac import circles, critical
from fedlit.models import alexnet_bn
from fedlit.round import Local, fed_round, start
from federation import CLIENTS, SIZES, batches, model, train, who

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

def test_fedper_and_lgfedavg_split_the_network():
    net = model()
    head, rest = set(start(FedPer(), net, 2).personal), set(start(LGFedAvg(), net, 2).personal)
    assert head == {'head.weight', 'head.bias'} and head | rest == set(net.state_dict()) and not head & rest
    for m in (FedPer(head='nose'), LGFedAvg(head='nose'), FedRep(head='nose')):
        with pytest.raises(ValueError, match="head='nose' must name a part of the network"): start(m, net, 2)

def test_fedper_averages_bodies_by_data_and_no_head():
    net, m = model(), FedPer()
    data, p = dict(batches(0), x=batches(0)['x'].double()), SIZES/SIZES.sum()
    one = fed_round(m, net, start(m, net, CLIENTS), who(0), data, SIZES, Local(lr=.1))
    alone = [fed_round(FedAvg(), net, start(FedAvg(), net, CLIENTS), [who(0)[i]],
                       {k: v[i:i+1] for k, v in data.items()}, [1.], Local(lr=.1))
             for i in range(4)]
    assert torch.allclose(one.params['c1.weight'],
                          sum(pk.double()*s.params['c1.weight'] for pk, s in zip(p, alone)), atol=1e-5)
    assert torch.equal(one.params['head.weight'], net.head.weight)
    for i, k in enumerate(who(0)):
        assert torch.allclose(one.personal['head.weight'][k], alone[i].params['head.weight'], atol=1e-5)

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
    s = fed_round(FedRep(), net, start(FedRep(), net, 1), [0], dict(x=x, y=y), [1.],
                  Local(epochs=3, lr=lr, momentum=rho), criterion=square)
    assert (torch.allclose(s.personal['head.weight'][0, 0], h, atol=1e-5)
            and torch.allclose(s.params['body.weight'], b, atol=1e-5))

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

def test_fedcac_gives_critical_entries_the_circle_and_others_the_mean():
    net, m = model(norm=False), FedCAC(beta=5.)
    data = dict(batches(0), x=batches(0)['x'].double())
    local = Local(lr=.1)
    s = fed_round(m, net, start(m, net, 4), range(4), data, SIZES, local)
    ends = [fed_round(FedAvg(), net, start(FedAvg(), net, 1), [0], {k: v[i:i+1] for k, v in data.items()},
                      [1.], local).params
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

@pytest.mark.parametrize('make,word', [(lambda: FedCAC() + FedPer(), 'decide `keep` alone'),
                                       (lambda: FedBN() + FedCAC(), 'decide `keep` alone'),
                                       (lambda: FedDecomp() + FedRep(), 'decide `mask` alone'),
                                       (lambda: FedRep() + FedPara(), 'decide `mask` alone')])
def test_impossible_sums_are_refused(make, word):
    with pytest.raises(ValueError, match=word): make()

def test_kept_tensors_are_exempt_from_scaffold():
    a, b = train(FedPer() + SCAFFOLD(), rounds=1), train(FedPer(), rounds=1)
    assert torch.allclose(a.personal['head.weight'], b.personal['head.weight'], atol=1e-12)
    later, plain = train(FedPer() + SCAFFOLD(), rounds=3), train(FedPer(), rounds=3)
    assert not torch.allclose(later.params['c1.weight'], plain.params['c1.weight'], atol=1e-6)

def test_fedper_with_moon_uses_its_own_head():
    state = train(FedPer() + MOON())
    assert ({k.split('.')[0] for k in state.personal} == {'head'}
            and len({tuple(v.flatten().tolist()) for v in state.personal['head.weight']}) == CLIENTS)
