"FjORD: widths of a tier, a random one at every step, with and without distillation, against plain torch."
import pytest, torch, torch.nn.functional as F
from math import ceil
from fedlit.methods import FjORD
from oracle import CLIENTS, HIDDEN, differ, logits, nested, trained, written_out

def test_widths_are_those_of_the_tier():
    m = FjORD()
    for c, tier in enumerate((1., .8, .6, .4, .2)):
        drawn = [m.width(torch.tensor(c), 5, t//20, t%20).item() for t in range(200)]
        fit = [p for p in (.2, .4, .6, .8, 1.) if p <= tier]
        assert set(drawn) == set(fit)
        assert max(abs(drawn.count(p)/200 - 1/len(fit)) for p in fit) < .13
    # every round draws anew
    assert len({tuple(m.width(torch.tensor(0), 5, r, t).item() for t in range(30)) for r in range(10)}) == 10

@pytest.mark.parametrize('distill', [True, False])
def test_rounds_are_those_of_the_widths(distill):
    m, used = FjORD(rates=(1., .6, .2), widths=(.2, .6, 1.), distill=distill), set()
    def loss(round, client, step, params, x, y):
        width = m.width(torch.tensor(client), CLIENTS, round, step).item()
        used.add((client, width))
        narrow, wide = logits(params, x, [ceil(n*width - 1e-9) for n in HIDDEN]), logits(params, x)
        if not distill: return F.cross_entropy(narrow, y)
        return F.cross_entropy(wide, y) - (wide.detach().softmax(1)*narrow.log_softmax(1)).sum(1).mean()
    theirs = written_out(nested(m.rates), rounds=3, loss=loss)
    assert len(used) == 6 # three widths, two, and one were drawn
    for executor in ('loop', 'extract'): assert differ(trained(m, rounds=3, executor=executor), theirs) < 1e-5
    assert differ(written_out(nested(m.rates), rounds=3), theirs) > 1e-3 # HeteroFL would be seen
