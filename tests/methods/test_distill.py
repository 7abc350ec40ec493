"Servers that learn from what clients say: teachers and students against plain torch."
import copy
import pytest, torch, torch.nn.functional as F
from fedlit.method import FedAvg
from fedlit.methods import DSFL, FedDBE, FedDF, FedET, SOLO
from fedlit.methods.dsfl import sharpen
from fedlit.methods.feddf import distill
from fedlit.methods.fedet import consensus, diversity
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.state import pure, start
from by_hand import descend
from federation import CLIENTS, PROXY, SIZES, batches, model, train, draw_cohort

def test_teachers_by_loops():
    l = torch.randn(3, 4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    for m in range(4):
        p = [torch.exp(l[k, m])/torch.exp(l[k, m]).sum() for k in range(3)]
        assert torch.allclose(sharpen(l, .1)[m], sum(p)/3/.1, atol=1e-9)
        v = [((l[k, m] - l[k, m].mean())**2).sum()/4 for k in range(3)]
        all_ = sum(a*l[k, m] for k, a in enumerate(v))/sum(v)
        assert torch.allclose(consensus(l)[m], all_, atol=1e-9)
        rest = [k for k in range(3) if l[k, m].argmax() != all_.argmax()]
        want = sum(v[k]*l[k, m] for k in rest)/sum(v[k] for k in rest) if rest else all_
        assert torch.allclose(diversity(l)[m], want, atol=1e-9)
    assert torch.allclose(FedDF().teach(l), l.mean(0))

def test_distill_is_plain_torch():
    "The same ten steps with a deep copy, Adam and a cosine."
    net, teacher = model(norm=False), torch.randn(12, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    params, _ = distill(pure(net), (dict(net.named_parameters()), {}), PROXY, teacher,
                        steps=10, lr=.01, batch_size=5, seed=3)
    plain, g = copy.deepcopy(net), torch.Generator().manual_seed(3)
    opt = torch.optim.Adam(plain.parameters(), .01)
    for t in range(10):
        i = torch.randperm(12, generator=g)[:5]
        for group in opt.param_groups:
            group['lr'] = .01*(1 + torch.cos(torch.tensor(torch.pi*t/10, dtype=torch.double))).item()/2
        p, q = teacher[i].softmax(-1), plain(PROXY[i])[1].softmax(-1)
        descend(opt, (p*(p.log() - q.log())).sum()/5)
    assert max((params[k] - v).abs().max().item() for k, v in plain.named_parameters()) < 1e-5

def test_feddf_starts_at_the_average_and_learns_the_ensemble():
    net, data = model(), dict(batches(0), x=batches(0)['x'].double())
    rounds = {n: fed_round(Broadcast(FedDF(steps=n), net, start(FedDF(steps=n), net, CLIENTS), Local(lr=.1),
                                     proxy=PROXY), draw_cohort(0), data, SIZES)
              for n in (0, 200)}
    fed = fed_round(Broadcast(FedAvg(), net, start(FedAvg(), net, CLIENTS), Local(lr=.1)), draw_cohort(0), data, SIZES)
    assert max((rounds[0].params[k] - v).abs().max().item() for k, v in fed.params.items()) < 1e-12
    alone = [fed_round(Broadcast(FedAvg(), net, start(FedAvg(), net, 1), Local(lr=.1)), [0],
                       {k: v[i:i+1] for k, v in data.items()}, [1.])
             for i in range(4)]
    say = lambda s: pure(net)(s.params, s.buffers, PROXY, train=False)[1].detach()
    teacher = sum(say(s) for s in alone)/4
    kl = lambda s: F.kl_div(say(s).log_softmax(-1), teacher.softmax(-1), reduction='batchmean').item()
    assert kl(rounds[200]) < .5*kl(rounds[0])

@pytest.mark.parametrize('m', [FedDF(), FedET(), DSFL()], ids=repr)
def test_a_server_without_inputs_says_so(m):
    with pytest.raises(ValueError, match='proxy=None, but it must be unlabelled inputs'): train(m, proxy=None)

def test_dsfl_sends_no_weights_and_uses_the_opinions():
    one, two = train(DSFL(steps=3), rounds=1), train(DSFL(steps=3), rounds=2)
    alone = train(SOLO(), rounds=1) # as the first round is
    assert max((one.personal[k] - v).abs().max().item()
               for k, v in alone.personal.items() if v.is_floating_point()) == 0
    weightless = train(DSFL(steps=3, weight=0.), rounds=2)
    assert max((two.personal[k] - weightless.personal[k]).abs().max().item() for k in two.params) > 1e-6
    assert two.server['DSFL']['said'].shape == (12, 3)

@pytest.mark.parametrize('steps,rounds', [(2, 3), (5, 1)])
def test_clients_of_dsfl_see_all_shared_samples_however_short_their_rounds(steps, rounds):
    seen, m = set(), DSFL(batch_size=4)
    def forward(params, buffers, x):
        seen.update(x[:, 0].tolist())
        return x, x, buffers
    x = torch.arange(20.)[:, None].expand(20, 3)
    for r in range(7, 7 + rounds):
        for t in range(steps): m.loss({}, {}, forward, x, dict(said=x), t, torch.tensor(steps), r)
    assert len(seen) == 20

@pytest.mark.parametrize('m', [FedDBE() + FedDF(steps=2), FedDBE() + FedET(steps=2)], ids=repr)
def test_a_student_leaves_other_methods_tensors_alone(m):
    assert train(m, norm=False).server['FedDBE']['mean'].abs().max() > 0
