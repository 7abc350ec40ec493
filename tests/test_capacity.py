"Capacity: bytes by hand, and seconds by a clock of forward passes."
from itertools import combinations
import numpy as np, pytest, torch
from torch import nn
from bench import capacity
from fedlit.scale.capacity import traffic
from fedlit.scale.costs import narrow, read
from fedlit.methods import (SOLO, DSFL, FedAMP, FedAvg, FedAvgM, FedBN, FedCAC, FedDecomp, FedDSE, FedMD, FedPer,
                            FedProx, FedRep, HeteroFL, MOON, OwnLabels, SCAFFOLD, pFedPara, IFCA)
from fedlit import models
from fedlit.method import Method
from fedlit.data import load
from federation import Patches

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
    # and nothing about tensors that never travel
    (SCAFFOLD() + SOLO(), 0, 0, ALL, ALL),
    (SCAFFOLD() + FedPer(), ALL + PARAMS - 2*HEAD, ALL + PARAMS - 2*HEAD, PARAMS, ALL + PARAMS - HEAD),
    # everything, and which entries are critical; both averages, and a byte for each entry that is critical or not
    (FedCAC(), ALL + PARAMS, ALL + PARAMS, PARAMS + PARAMS//4, ALL + PARAMS),
    (FedAMP(), PARAMS, PARAMS, ALL + PARAMS, ALL + PARAMS), # down the mixture, up its own parameters, and both are kept
    (Opinions(), 4*7*3, 4*7*3, ALL, ALL + 4*7*3)])  # on seven public samples
def test_bytes_by_hand(method, down, up, home, server):
    seen = traffic(method, Net(), SHAPE, CLASSES, clients=2, proxy=PUBLIC)
    for k, right in dict(down=down, up=up, home=home, server=server).items():
        assert seen[k].tolist() == [right, right], k

def test_scaffold_is_twice_where_there_are_no_buffers():
    dense = models.Net(nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU()), nn.Linear(5, 3))
    once, twice = (traffic(m, dense, SHAPE, CLASSES, 1).loc[0] for m in (FedAvg(), SCAFFOLD()))
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
    plain, still = traffic(FedAvg(), Net(), SHAPE, CLASSES, 1).loc[0], traffic(FedAvg(), net, SHAPE, CLASSES, 1).loc[0]
    assert still.up == still.down == ALL - 4*4*9
    assert (plain.home, still.home) == (0, 4*4*9) and still.server == plain.server # all have it

def test_pfedpara_sends_half_of_its_factors():
    wide = models.Net(nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU()), nn.Linear(64, 3))
    seen = traffic(pFedPara(), wide, SHAPE, CLASSES, 1).loc[0]
    rest = 4*(64 + 64*3 + 3) # biases and the small head
    assert seen.up - rest == seen.home > 0 and (seen.home/4) % (36 + 64) == 0

class Words(nn.Module):
    "A class for each token, from an embedding."
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 5)
    def forward(self, x): return self.words(x).mean(1), self.head(self.words(x)).mT

@pytest.mark.parametrize('net, shape, classes', [(Words(), (7,), 5), (Patches(3), SHAPE, 3)])
def test_networks_of_tokens_of_places_and_with_an_answer_for_each_token(net, shape, classes):
    once = sum(v.nbytes for v in net.parameters())
    assert traffic(SCAFFOLD(), net, shape, classes, 1).loc[0].to_dict() == dict(down=2*once, up=2*once, home=once,
                                                                                 server=2*once)

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

@pytest.mark.parametrize('method, samples', [(DSFL(steps=2), 7), (FedMD(samples=5), 5), (FedMD(), 7)], ids=repr)
def test_of_public_samples_those_travel_on_which_networks_are_asked(method, samples):
    assert traffic(method, Net(), SHAPE, CLASSES, clients=2, proxy=PUBLIC).up.tolist() == [4*samples*CLASSES]*2

def test_the_server_of_fedamp_reads_networks_and_not_the_mixtures_that_it_made_itself():
    seen = traffic(FedAMP(), Net(), SHAPE, CLASSES, clients=2)
    assert seen.up.tolist() == seen.down.tolist() == [PARAMS]*2

def test_who_chooses_at_home_is_sent_everything():
    "IFCA's clients try all networks and send one back."
    task = load('digits')
    net = models.build('mlp', task, seed=0)
    one, all_ = (traffic(m, net, (1, 8, 8), 10, 3) for m in (FedAvg(), IFCA(clusters=4)))
    assert (all_.down >= 4*one.down).all() and (all_.up < 1.1*one.up).all()
