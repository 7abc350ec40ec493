"""The same as released code: `released/vectors.json.xz` has what eleven projects made of small federations, and
`released/peers.py` what is compared. Where a project leaves its paper, fedlit with that one change is the project. That
fedlit is the paper there is shown by the vectors of code that was put right (FedDyn, FedNova, pFedMe, FedProto, FedRoD)
and by the loops of `methods`."""
import functools, json
import pytest
from fedlit.ground.tree import tmap
from fedlit.methods import Ditto, FedDyn, FedNova, FedProx, PerFedAvg, SCAFFOLD
from released.peers import CASES, FILE, VALUES, furthest, off, pack, reading, vectors

ROUNDING, MEANT = 1e-12, 1e-3
OPACUS = 2e-6 # its clip factor has a small constant under the fraction
SAME = [n for n, c in CASES.items() if c.reading is None]
OTHER = [n for n, c in CASES.items() if c.reading is not None]

@functools.cache
def apart(name):
    return furthest(vectors()[name], CASES[name].method, CASES[name].local, 'vmap')

def test_all_vectors_are_compared():
    assert {*CASES, *VALUES} == {*vectors()} and not {*CASES} & {*VALUES} and FILE.stat().st_size < 700_000

@pytest.mark.parametrize('name', SAME)
def test_fedlit_is_the_released_code(name):
    limit = OPACUS if name == 'opacus_dpsgd' else ROUNDING
    assert max(apart(name).values()) < limit, apart(name)

@pytest.mark.parametrize('name', OTHER)
def test_fedlit_with_one_change_is_the_released_code(name):
    case = CASES[name]
    assert case.why and max(apart(name).values()) > MEANT
    changed = furthest(vectors()[name], reading(name), case.local, 'vmap')
    assert max(changed.values()) < ROUNDING, changed

@pytest.mark.parametrize('name', VALUES)
def test_a_value_is_that_of_the_released_code(name):
    if 'epsilon' in name: pytest.importorskip('dp_accounting')
    assert off(name) <= VALUES[name].off

def test_epsilon_is_never_too_small():
    pytest.importorskip('dp_accounting')
    exact = vectors()['gaussian_epsilon_full']
    assert all(VALUES['gaussian_epsilon_full'].of(**a) >= w for a, w in zip(exact['args'], exact['want']))

def minus(tree): return tmap(lambda v: -v, tree)

class Away(FedProx):
    def grad(self, grads, params, received): return super().grad(grads, received, params)
class Drift(SCAFFOLD):
    def grad(self, grads, server, client, kept): return super().grad(grads, minus(server), minus(client), kept)
class Pushed(FedDyn):
    def done(self, params, received, client): return super().done(received, params, client)
class Apart(Ditto):
    def loss(self, params, buffers, received, x, y, forward, criterion):
        loss, after = super().loss(params, buffers, received, x, y, forward, criterion)
        plain = criterion(forward({k[4:]: v for k, v in params.items() if k[:4] == 'own.'}, {}, x)[1], y)
        return 2*plain - loss, after
class Ascent(PerFedAvg):
    def __post_init__(self): pass

WRONG = dict(
    pfllib_fedprox=Away(mu=.5), niid_scaffold=Drift(form='paper'), feddyn_released=Pushed(alpha=.3),
    pfllib_ditto=Apart(lam=.7), flbench_perfedavg_fo=Ascent(alpha=-.07), fednova_released=FedProx(mu=0.),
    fednova_released_prox_eq9=FedProx(mu=.5) + FedNova())

@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_sign_or_a_missing_part_is_seen(name):
    assert max(furthest(vectors()[name], WRONG[name], CASES[name].local, 'vmap').values()) > MEANT

def test_the_file_is_packed_without_losing_a_digit(tmp_path):
    "What is taken from a folder of vectors is what is read."
    some = {n: vectors()[n] for n in ('pfllib_fedavg', 'pfllib_fedprox', 'flgo_powerofchoice')}
    for n, v in some.items():
        given = {k: v[k] for k in v if k != 'rounds'} | ({'expect_rounds': v['rounds']} if 'rounds' in v else {})
        (tmp_path/f'{n}.json').write_text(json.dumps(given | dict(why='ours', known=1.)), encoding='utf-8')
    pack(tmp_path, tmp_path/'some.xz')
    assert vectors.__wrapped__(tmp_path/'some.xz') == some
