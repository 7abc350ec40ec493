"Federated Dropout: draws of the right size, all alike, all different, and rounds against plain torch."
import torch
from math import ceil
from types import SimpleNamespace
from fedlit.methods import FederatedDropout
from oracle import differ, trained, written_out

def kept(m, round, client, sizes, clients=3):
    return m.mask(axes=SimpleNamespace(size=sizes), number=torch.tensor(client), clients=clients, round=round)

def test_draws_have_the_size_they_should():
    sizes = {'a': 5, 'b': 4, 'c': 17, 'd': 1}
    for rate in (1., .9, .5, .3, .25, .01):
        for t in range(6):
            for c in range(3):
                mask = kept(FederatedDropout(rates=(rate,)), t, c, sizes)
                assert {a: int(v.sum()) for a, v in mask.items()} == {a: ceil(n*rate - 1e-9) for a, n in sizes.items()}

def test_draws_differ_and_repeat():
    m, sizes = FederatedDropout(rates=(.5,)), {'a': 64, 'b': 64}
    draws = {(t, c, a, s): tuple(v.tolist())
             for t in range(4) for c in range(4) for s in (0, 1)
             for a, v in kept(FederatedDropout(rates=(.5,), seed=s), t, c, sizes, 4).items()}
    assert len(set(draws.values())) == len(draws) == 64
    assert tuple(kept(m, 2, 3, sizes, 4)['b'].tolist()) == draws[2, 3, 'b', 0]

def test_every_channel_is_as_likely():
    counts = sum(kept(FederatedDropout(rates=(.25,)), t, c, {'a': 20})['a'].double()
                 for t in range(200) for c in range(3))
    assert (counts/600 - .25).abs().max() < .07 # four standard deviations of 600 draws

def test_rounds_are_those_of_the_draws():
    m = FederatedDropout(rates=(1., .5, .25))
    keep = lambda r, c: [v.nonzero()[:, 0].tolist() for v in kept(m, r, c, dict(a=8, b=5)).values()]
    ours = trained(m, rounds=3)
    assert differ(ours, written_out(keep, rounds=3)) < 1e-5
    assert differ(ours, written_out(lambda r, c: keep(0, c), rounds=3)) > 1e-3 # the same draw in every round
