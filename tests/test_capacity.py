"Capacity: bytes by hand, closing times by order statistics, bias against its absence, populations by their formulas."
import math
from dataclasses import replace
from itertools import combinations
import numpy as np, pandas as pd, pytest, torch
from torch import nn
from fedlit.scale import capacity
from fedlit.scale.capacity import (Population, answers, deadline, draw, everybody, first, invite, part_work, seconds,
                             simulate, traffic, truth)
from fedlit.scale.costs import narrow, read
from fedlit.methods import (SOLO, FedAvg, FedAvgM, FedBN, FedCAC, FedDecomp, FedDSE, FedPer, FedProx, FedRep,
                            HeteroFL, MOON, OwnLabels, SCAFFOLD, pFedPara)
from fedlit.draws import rng
from fedlit.local import Local
from fedlit.method import Method

class Net(nn.Module):
    "Two convolutions with BatchNorm and a head, on images of one channel."
    def __init__(self):
        super().__init__()
        self.c1, self.n1, self.c2, self.n2, self.head = (
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3))
    def forward(self, x):
        z = self.n2(self.c2(self.n1(self.c1(x)).relu())).relu().mean((-1, -2))
        return z, self.head(z)

class Opinions(Method):
    "What travels in DS-FL: networks stay at home, the server queries them, and all clients see the answer."
    def keep(self, name): return True
    def loss(self, server): return 0.
    def merge(self, delta, server, trained, forward, proxy): return delta, dict(said=torch.zeros(len(proxy), 3))

SHAPE, CLASSES = (1, 6, 6), 3
CONVS, NORMS, COUNTERS, STATS, HEAD = 4*(4*9 + 4 + 8*4*9 + 8), 4*2*(4 + 8), 8*2, 4*2*(4 + 8), 4*(8*3 + 3) # bytes
PARAMS, ALL = CONVS + NORMS + HEAD, CONVS + NORMS + COUNTERS + STATS + HEAD
PUBLIC = torch.zeros(7, *SHAPE)

@pytest.mark.parametrize('method, down, up, home, server', [
    (FedAvg(), ALL, ALL, 0, ALL),
    (FedProx(mu=.1), ALL, ALL, 0, ALL),
    (FedAvgM(), ALL, ALL, 0, ALL + PARAMS + STATS), # as released, with momentum for running statistics
    (SCAFFOLD(), ALL + PARAMS, ALL + PARAMS, PARAMS, ALL + PARAMS),
    # and momentum does not travel
    (SCAFFOLD() + FedAvgM(), ALL + PARAMS, ALL + PARAMS, PARAMS, ALL + 2*PARAMS + STATS),
    (MOON(), ALL, ALL, ALL + 4, ALL),
    (FedBN(), CONVS + HEAD, CONVS + HEAD, NORMS + STATS + COUNTERS, ALL),
    (FedPer(), ALL - HEAD, ALL - HEAD, HEAD, ALL),
    (FedBN() + FedPer(), CONVS, CONVS, ALL - CONVS, ALL),
    (FedRep(), ALL - HEAD, ALL - HEAD, HEAD, ALL),  # its mask says when, not what
    (SOLO(), 0, 0, ALL, ALL),
    (FedCAC(), ALL, ALL + PARAMS, PARAMS, ALL),     # everything, and which entries are critical
    (Opinions(), 4*7*3, 4*7*3, ALL, ALL + 4*7*3)])  # on seven public samples
def test_bytes_by_hand(method, down, up, home, server):
    seen = traffic(method, Net(), SHAPE, CLASSES, clients=2, proxy=PUBLIC)
    for k, right in dict(down=down, up=up, home=home, server=server).items():
        assert seen[k].tolist() == [right, right], k

def test_scaffold_is_twice_where_there_are_no_buffers():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU())
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = net, nn.Linear(5, 3)
        def forward(self, x):
            z = self.body(x)
            return z, self.head(z)
    once, twice = (traffic(m, Dense(), SHAPE, CLASSES, 1).loc[0] for m in (FedAvg(), SCAFFOLD()))
    assert once.up == 4*(36*5 + 5 + 5*3 + 3) and twice.up == 2*once.up and twice.down == 2*once.down

def test_a_client_with_half_the_width_sends_the_small_network():
    seen = traffic(HeteroFL(rates=(1., .5, .25)), Net(), SHAPE, CLASSES, clients=3)
    small = [sum(v.nbytes for v in narrow(Net(), r).state_dict().values()) for r in (1, .5, .25)]
    assert seen.up.tolist() == seen.down.tolist() == small and len(set(small)) == 3
    assert small[1] == 4*(2*9 + 2 + 4*2*9 + 4 + 4*6 + 4*3 + 3) + COUNTERS # every axis halved

def test_masks_that_only_the_client_knows_do_not_shorten_the_download():
    seen = traffic(FedDSE(rates=(.5,)), Net(), SHAPE, CLASSES, clients=1).loc[0]
    assert seen.down == ALL and seen.up == sum(v.nbytes for v in narrow(Net(), .5).state_dict().values())
    seen = traffic(HeteroFL(rates=(1.,)) + OwnLabels(), Net(), SHAPE, CLASSES, clients=1).loc[0]
    assert seen.down == ALL and seen.up == ALL - 4*(8 + 1) # two of three classes are in the data

def test_memory_of_a_part_is_cut_too():
    seen = traffic(HeteroFL(rates=(1., .5)) + MOON(), Net(), SHAPE, CLASSES, clients=2)
    assert seen.home.tolist() == [v + 4 for v in seen.up]

def test_added_and_frozen_parameters():
    net = Net()
    whole = traffic(FedDecomp(), net, SHAPE, CLASSES, 1).loc[0]
    assert whole.up == ALL and whole.home > 0                                     # the corrections stay
    net.c1.weight.requires_grad_(False)
    assert traffic(FedAvg(), net, SHAPE, CLASSES, 1).up[0] == ALL - 4*4*9

def test_pfedpara_sends_half_of_its_factors():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(36, 64), nn.Linear(64, 3)
        def forward(self, x):
            z = self.body(x.flatten(1)).relu()
            return z, self.head(z)
    seen = traffic(pFedPara(), Wide(), SHAPE, CLASSES, 1).loc[0]
    rest = 4*(64 + 64*3 + 3) # biases and the small head
    assert seen.up - rest == seen.home > 0 and (seen.home/4) % (36 + 64) == 0

# -- seconds

def test_the_fit_finds_three_numbers_and_drops_a_negative_one():
    a = np.array([[1, 1, 8], [1, 4, 32], [1, 1, 32], [1, 4, 128.]])
    assert np.allclose(capacity._fit(a, a@[.5, .2, .01]), [.5, .2, .01])
    x = capacity._fit(a, a@[-.01, .2, .01])
    assert (x >= 0).all() and x[0] == 0 and abs(a@x/(a@[-.01, .2, .01]) - 1).max() < .1

def test_the_fit_is_the_best_of_all_choices_of_columns():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, t = rng.uniform(.1, 1, (6, 3)), rng.uniform(.5, 2, 6)
        lost = lambda x, a=a, t=t: np.square(a@x/t - 1).sum() if (x >= 0).all() else np.inf
        def only(keep, a=a, t=t):
            x = np.zeros(3)
            x[keep] = np.linalg.lstsq(a[:, keep]/t[:, None], np.ones(6), rcond=None)[0]
            return x
        best = min(lost(only(list(k))) for n in (1, 2, 3) for k in combinations(range(3), n))
        assert abs(lost(capacity._fit(a, t)) - best) < 1e-9

def test_measure_counts_what_sleeps_in_a_phase(monkeypatch):
    "A clock that is the number of forward passes: the phase of T steps takes T."
    ticks = [0]
    class Counting(Net):
        def forward(self, x):
            ticks[0] += 1
            return super().forward(x)
    def turns(jobs, repeats):
        out = {}
        for k, job in jobs.items():
            before = ticks[0]
            job()
            out[k] = np.array([[0, ticks[0] - before or 1e-9]])
        return out
    monkeypatch.setattr(capacity, 'take_turns', turns)
    monkeypatch.setattr(capacity, 'Tapes', lambda: None) # a tape does not call the network again
    row = capacity.measure({'FedAvg': (FedAvg(), Counting())}, SHAPE, CLASSES, (2, 4)).loc['FedAvg']
    assert (abs(row.step - 1) < 1e-6 and row.fixed < 1e-6 and row['sample'] < 1e-6
            and row.up == ALL and row.misfit < 1e-6)
    assert seconds(row, 3, 12) == pytest.approx(3)

# -- populations

COSTS = pd.DataFrame([dict(down=4e6, up=2e6, fixed=.1, step=.2, sample=.03, merge=0.)])
CROWD = Population(clients=20_000, dropout=0.)

def test_a_client_is_the_same_whoever_else_is_asked():
    some, one = draw(CROWD, np.arange(100, 200)), draw(CROWD, np.array([150]))
    for k in vars(some): assert vars(some)[k][50] == vars(one)[k][0], k
    assert not np.allclose(draw(replace(CROWD, seed=1), np.arange(9)).speed, draw(CROWD, np.arange(9)).speed)

def test_medians_spreads_and_correlations_are_those_asked_for():
    p = replace(CROWD, clients=200_000, samples=1000., slow_more=.4, slow_kind=-.7)
    w = draw(p, np.arange(p.clients))
    log_speed, log_data, line = np.log(w.speed), np.log(w.samples), np.log(w.line)
    for v, median, sd in ((log_speed, math.log(p.speed), p.spread),
                          (log_data, math.log(1000), p.tail),
                          (line, 0, p.line)):
        assert abs(np.median(v) - median) < .01*max(1, sd) and abs(v.std() - sd) < .01
    normal = torch.special.ndtri(torch.from_numpy(w.kind)).numpy()
    assert (abs(np.corrcoef(-log_speed, log_data)[0, 1] - .4) < .01
            and abs(np.corrcoef(-log_speed, normal)[0, 1] + .7) < .01)
    assert abs(w.kind.mean() - .5) < .005 and np.allclose(w.quick.argsort(), w.speed.argsort())

def test_truth_does_not_depend_on_the_chunks():
    p = replace(CROWD, clients=5001, slow_more=.5, slow_kind=.5)
    w = draw(p, np.arange(5001))
    assert np.allclose(truth(p, 700), (w.samples.mean(), (w.samples*w.kind).sum()/w.samples.sum()))

def test_who_is_invited():
    p = replace(CROWD, online=.1, swing=.6)
    assert (p.there(2) == pytest.approx(.16) and p.there(14) == pytest.approx(.04)
            and np.mean([p.there(h) for h in range(24)]) == pytest.approx(.1))
    who = invite(p, 500, 14, rng('capacity', 0))
    assert len(who) == len(set(who.tolist())) == 500
    alone = [len(invite(replace(p, clients=1000), 500, 14, rng('capacity', s))) for s in range(50)]
    assert abs(np.mean(alone) - 40) < 4*math.sqrt(1000*.04*.96/50)
    drawn = np.bincount(np.concatenate([invite(replace(p, clients=20), 2, 2, rng('capacity', s)) for s in range(2000)]),
                        minlength=20)
    assert ((drawn - drawn.mean())**2/drawn.mean()).sum() < 50 # chi square with 19 degrees of freedom

def test_an_answer_is_download_work_and_upload():
    numbers, p = np.arange(50), replace(CROWD, speed=.5)
    w, a = draw(p, numbers), answers(p, COSTS, numbers, rng('capacity', 0), Local(epochs=3, batch_size=10))
    for i in range(50):
        n = w.samples[i]
        work = (.1 + .2*3*math.ceil(n/10) + .03*3*n)/w.speed[i]
        assert a.end[i] == pytest.approx(4e6/(2e6*w.line[i]) + work + 2e6/(5e5*w.line[i]))
    thin = answers(p, COSTS, numbers, rng('capacity', 0), server=50*1000.)
    assert (thin.down.min() == pytest.approx(4e6/1000)
            and (answers(p, COSTS, numbers, rng('capacity', 0), steps=7).steps == 7).all())

def test_the_quickest_devices_get_the_largest_networks():
    tiers = pd.concat([COSTS.assign(up=u) for u in (4., 3., 2., 1.)])
    a = answers(replace(CROWD, clients=4000), tiers, np.arange(4000), rng('capacity', 0))
    assert ((a.sort_values('quick').bytes_up.diff().dropna() >= 0).all()
            and abs(a.bytes_up.value_counts()/1000 - 1).max() < .1)

# -- closing

def asked_of(ends, lost=None):
    return pd.DataFrame(dict(end=np.asarray(ends, float), lost=np.zeros(len(ends), bool) if lost is None else lost))

def test_first_k_is_an_order_statistic():
    g = np.random.default_rng(0)
    for _ in range(20):
        ends, lost = g.exponential(size=13), g.random(13) < .2
        there = sorted(e for e, l in zip(ends, lost) if not l)
        for k in (1, 5, len(there)):
            close, share = first(k)(asked_of(ends, lost))
            assert close == there[k-1] and share.sum() == k and not share[lost].any()
        # too few are left: until the last is in, or known to be lost
        assert first(13)(asked_of(ends, lost))[0] == max(ends) or not lost.any()
    times = [first(7)(asked_of(g.random(10)))[0] for _ in range(500)]
    assert abs(np.mean(times) - 7/11) < 4*np.std(times)/500**.5 # of uniform variables
    with pytest.raises(ValueError, match='k=0'): first(0)

def test_the_other_policies():
    asked = pd.DataFrame(dict(down=[1., 1, 1, 8],
                              compute=[2., 10, 4, 5],
                              up=[1., 1, 1, 8],
                              steps=[4., 4, 4, 4],
                              lost=[False, False, True, False]))
    asked['end'] = asked[['down', 'compute', 'up']].sum(axis=1)
    assert everybody(asked)[0] == 21 and everybody(asked)[1].tolist() == [1, 1, 0, 1]
    assert (deadline(5)(asked)[0] == 5 and deadline(5)(asked)[1].tolist() == [1, 0, 0, 0]
            and deadline(99)(asked)[0] == 21)
    close, share = part_work(8)(asked)
    assert close == 8 and share.tolist() == [1, .5, 0, 0] # six of ten seconds are two of four steps

def test_nothing_is_biased_where_speed_and_data_are_unrelated():
    for policy in (first(100), deadline(60.), part_work(60.)):
        runs = simulate(CROWD, COSTS, 150, policy, rounds=60, seed=3, steps=10)
        for k in ('data', 'kind'): assert abs(runs[k].mean()) < 4*runs[k].std()/60**.5, (policy, k)
    assert runs.wasted.mean() > .01 or runs.work.mean() < .99

def test_bias_has_the_sign_of_the_correlation():
    def z(p, column, policy=None):
        r = simulate(p, COSTS, 150, policy or first(100), rounds=25, steps=10)[column]
        return r.mean()/r.std()*25**.5
    assert (z(replace(CROWD, slow_kind=.6), 'kind') < -5 and z(replace(CROWD, slow_kind=-.6), 'kind') > 5
            and z(replace(CROWD, slow_more=.6), 'data') < -5)
    assert abs(z(replace(CROWD, slow_kind=.6), 'kind', everybody)) < 4

def test_simulate_adds_up():
    p = replace(CROWD, dropout=.1)
    runs = simulate(p, COSTS.assign(merge=.01), 50, first(30), rounds=5)
    numbers = invite(p, 50, 24*2/5, g := rng('capacity', 0, 2))
    asked = answers(p, COSTS, numbers, g)
    close, share = first(30)(asked)
    row = runs.loc[2]
    assert (row.seconds == pytest.approx(close + 30*.01)
            and row.down == 50*4e6 and row.up == 30*2e6 and row.wasted == pytest.approx(.4))
    assert row['data'] == pytest.approx(asked.samples[share > 0].mean()/truth(p)[0] - 1)
    assert row['kind'] == pytest.approx(np.average(asked.kind, weights=share*asked.samples) - truth(p)[1])
    pd.testing.assert_frame_equal(runs, simulate(p, COSTS.assign(merge=.01), 50, first(30), rounds=5))
    nobody = simulate(Population(clients=3, online=1e-6), COSTS, rounds=2)
    assert nobody.asked.tolist() == [0, 0]
    late = simulate(p, COSTS.loc[0], 50, part_work(.01), rounds=1).loc[0] # a row does as well as a table of one
    assert late.heard == 0 and late.wasted == 1 and late.work == 0 and math.isnan(late['kind'])
    with pytest.raises(ValueError, match='ask=0'): simulate(p, COSTS, 0)

def test_bad_populations():
    for field, value, right in (('online', 1.5, 'a share'),
                                ('tail', -1, 'at least 0'),
                                ('speed', 0, 'positive'),
                                ('slow_kind', 2, 'a correlation'),
                                ('dropout', 1, r'in \[0, 1\)')):
        with pytest.raises(ValueError, match=f'{field}={value}, but it must be {right}'): Population(**{field: value})

# -- the command

def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, 'contenders', lambda model: {'FedAvg': (FedAvg(), model)})
    monkeypatch.setattr(capacity, 'federations', lambda: [])
    for _ in range(2): capacity.main(['--out', str(tmp_path), '--networks', 'mlp', '--repeats', '1'])
    assert capsys.readouterr().out.split() == [str(tmp_path/'mlp.json'), 'written',
                                               str(tmp_path/'mlp.json'), 'was', 'there']
    rows, content = read(tmp_path/'mlp.json')
    assert (rows.up['FedAvg'] == content['rows'][0]['up'] and content['machine']['torch'] == torch.__version__
            and (rows[['step', 'merge']] > 0).any(axis=None))
    with pytest.raises(ValueError, match="no network 'vgg'"): capacity.network('vgg')
