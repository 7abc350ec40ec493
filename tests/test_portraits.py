"The small pictures of methods: made from the methods, one for each, and different where methods differ in kind."
import re
from dataclasses import replace
from pathlib import Path
import pytest
from fedlit.method import Method
from fedlit.methods import DP, DepthFL, Ditto, FedAvg, FedDF, FedPer, HeteroFL, Quantize, SCAFFOLD, TopK
from fedlit.parse import methods_by_name
from fedlit.portrait import MARKS, portrait

NBS = Path(__file__).resolve().parent.parent/'nbs'
FILES = {f.stem: f.read_text(encoding='utf-8').strip() for f in sorted((NBS/'images'/'methods').glob('*.svg'))}

def drawn(name): return re.sub('<title>.*</desc>', '', FILES[name])
def looks(method): return replace(portrait(method), name='')

@pytest.mark.parametrize('name', sorted(methods_by_name()))
def test_the_file_is_what_the_method_shows(name):
    assert FILES.get(name) == portrait(methods_by_name()[name]()).svg(), 'python docs/portraits.py'

def test_no_file_is_left_over(): assert FILES.keys() == methods_by_name().keys()

KINDS = ('FedAvg SOLO FedProx FedDecorr MOON SCAFFOLD FedDyn FedAvgM FedNova FedBN FedPer LGFedAvg FedCAC FedDecomp '
         'FedPara pFedPara HeteroFL FedRolex FederatedDropout FjORD DepthFL FedDSE FedGSE FedDF DSFL Ditto APFL pFedMe '
         'PerFedAvg FedALA FedProto FedRoD DP DPSGD TopK').split()

def test_methods_that_differ_in_kind_look_different():
    assert len({drawn(name) for name in KINDS}) == len(KINDS)

def test_every_picture_names_and_describes_itself():
    for name, svg in FILES.items():
        assert re.search('<title>(.*?)</title>', svg)[1] == f'{name} as a picture'
        assert re.search('<desc>(.*?)</desc>', svg)[1].startswith(f'{name}: ') and 'role="img"' in svg
        assert ' id="' not in svg # drawn twice on a page, it would not be unique

def test_marks_come_from_the_hooks_and_not_from_the_name():
    class Mine(Method):
        def keep(self, name): return name.startswith('head.')
    class Pull(Method):
        def loss(self, features): return features.square().mean()
    class Nothing(Method): pass
    assert looks(Mine()) == looks(FedPer()) and looks(Nothing()) == looks(FedAvg())
    assert looks(Mine() + Pull()) == replace(looks(FedPer()), marks=('own', 'loss', 'weights'))

@pytest.mark.parametrize('method, marks, said', [
    (FedAvg(), {'weights'}, 'the plain average'),
    (HeteroFL(rates=(1.,)), {'weights'}, 'the plain average'),
    (HeteroFL(), {'weights'}, 'some neurons only'),
    (DepthFL(), {'loss', 'weights'}, 'some layers only'),
    (Ditto(), {'own', 'loss', 'weights'}, 'a second network'),
    (SCAFFOLD(), {'grad', 'client', 'weights', 'more_up', 'more_down', 'server'}, 'something else travels down'),
    (FedDF(), {'weights', 'step', 'public'}, 'public samples'),
    (DP(), {'weights', 'noise', 'step'}, 'noise is added'),
    (DP(noise=0.), {'weights', 'step'}, 'not the mean'),   # clients count alike
    (TopK(share=1.), {'client', 'weights'}, 'remembers'),  # everything is sent
    (Quantize(), {'client', 'weights', 'fewer'}, 'fewer bits')], ids=lambda v: repr(v) if isinstance(v, Method) else '')
def test_what_a_round_shows(method, marks, said):
    seen = portrait(method)
    assert {*seen.marks} == marks <= {*MARKS} and said in seen.words()

def test_a_method_that_refuses_every_network_says_why():
    class Picky(Method):
        def init(self, params): raise ValueError('no network is good enough')
    with pytest.raises(ValueError, match='no network is good enough'): portrait(Picky())

@pytest.mark.parametrize('wrong', [TopK, 'TopK()', None], ids=str)
def test_what_is_no_method_is_named(wrong):
    with pytest.raises(TypeError, match=re.escape(f'{wrong!r} is not a method')): portrait(wrong)
