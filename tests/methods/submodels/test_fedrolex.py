"FedRolex: windows that roll, against index arithmetic and against small networks that plain torch trains."
import pytest, torch
from math import ceil
from types import SimpleNamespace
from fedlit.methods import FedRolex
from oracle import CLIENTS, HIDDEN, differ, trained, written_out

def window(n, r, t, direction):
    return sorted({(i + (t if direction == 'forward' else -t)) % n for i in range(ceil(n*r - 1e-9))})

@pytest.mark.parametrize('direction', ['backward', 'forward'])
def test_windows(direction):
    axes = SimpleNamespace(size={'a': 5, 'b': 4, 'c': 16})
    for t in range(35):
        for c, r in enumerate((1., .5, .25)):
            mask = FedRolex(rates=(1., .5, .25), direction=direction).mask(
                axes=axes, number=torch.tensor(c), clients=3, round=t)
            assert ({a: v.nonzero()[:, 0].tolist() for a, v in mask.items()}
                    == {a: window(n, r, t, direction) for a, n in axes.size.items()})

def test_first_windows_by_eye():
    axes, m = SimpleNamespace(size={'a': 5}), lambda **kw: FedRolex(rates=(.5,), **kw)
    at = lambda t, **kw: (m(**kw).mask(axes=axes, number=torch.tensor(0), clients=1, round=t)['a']
                          .nonzero()[:, 0].tolist())
    assert [at(t) for t in range(6)] == [[0, 1, 2], [0, 1, 4], [0, 3, 4], [2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert [at(t, direction='forward') for t in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]

@pytest.mark.parametrize('direction, other', [('backward', 'forward'), ('forward', 'backward')])
@pytest.mark.parametrize('rates', [(1., .5, .25), (.5, .25)])
def test_rounds_are_those_of_the_windows(direction, other, rates):
    keep = lambda r, c: [window(n, rates[c*len(rates)//CLIENTS], r, direction) for n in HIDDEN]
    ours = trained(FedRolex(rates=rates, direction=direction), rounds=3)
    assert differ(ours, written_out(keep, rounds=3)) < 1e-5
    assert differ(ours, trained(FedRolex(rates=rates, direction=other), rounds=3)) > 1e-3
