"A run in words: the way to JSON and back, and the federation that the words make."
import json
from dataclasses import fields, replace
import pytest, torch
from fedlit import partition
from fedlit.data import load
from fedlit.local import Between, Cosine, Local
from fedlit.models import build
from fedlit.papers import settings
from fedlit.participation import BySize
from fedlit.run import Federation, federate
from fedlit.result import Run
from fedlit.setting import PARTITIONS, Setting, call, parts_of, plain, public_set, read_setting, write_call

VARIED = [Setting(), Setting('MOON() + FedDecorr()', options=(), without=(3, 1), participation=BySize(.5)),
          Setting(local=Local(epochs=Between(1, 3), lr=Cosine(.1, 5)), partition='dirichlet(alpha=inf)'),
          Setting(local=Local(steps=(1, 2)), public='held(samples=20)', task='digits(train=200)', rounds=2)]

@pytest.mark.parametrize('s', VARIED, ids=lambda s: s.method)
def test_a_setting_comes_back_from_json(s):
    assert read_setting(json.loads(json.dumps(plain(s)))) == s

def test_every_field_is_in_the_form_of_json_but_the_later_one_at_its_default():
    names = {f.name for f in fields(Setting)}
    assert plain(Setting()).keys() == names - {'without'} and plain(Setting(without=(1,))).keys() == names
    assert plain(settings.Setting(measure=())) == plain(Setting())

def test_a_call_is_written_as_it_is_read():
    for text in ('iid()', 'dirichlet(alpha=inf)', "x(a='b', c=(1, 2), d=None)"): assert write_call(*call(text)) == text

def test_the_words_make_what_python_makes():
    s = Setting('FedProx()', rounds=1, local=Local(epochs=.2), seed=3, clients=4, options=(('hidden', (8,)),))
    one = Federation.of(s, device='cpu', progress=False).run()
    task = load('digits')
    two = federate(build('mlp', task, seed=3, hidden=(8,)), task, partition.dirichlet(task.y_train, 4, .5, seed=3),
                   one.method, 1, Local(epochs=.2), seed=3, device='cpu', progress=False)
    assert all(torch.equal(v, two.state.params[k]) for k, v in one.state.params.items())
    assert read_setting(one.settings['setting']) == s and 'setting' not in two.settings

@pytest.mark.parametrize('name', PARTITIONS)
def test_every_partition_may_have_images_withheld_from_it(name):
    data = 'digits_domains' if name in ('by_domain', 'by_owner') else 'digits'
    own = 'train=50, test=10' if name == 'dirichlet_mixture' else ''
    s = Setting(task=data, partition=f'{name}({own})', clients=4, public='withheld(samples=30)', options=())
    made = parts_of(s)
    order = torch.randperm(len(made['task'].y_train), generator=torch.Generator().manual_seed(0))
    assert not {*order[:30].tolist()} & {int(i) for c in made['clients'] for i in c} and len(made['proxy']) == 30
    if name not in ('dirichlet_mixture', 'classes_per_client'): assert sum(map(len, made['clients'])) == len(order) - 30

def test_no_client_trains_on_what_the_server_holds():
    "Even where clients share samples."
    task, clients = load('digits'), [torch.arange(0, 60), torch.arange(30, 90), torch.arange(0, 90)]
    x, _, left = public_set(task, clients, 'held', 30)
    rows = lambda x: {*map(bytes, x.numpy())}
    assert len(x) == len(rows(x)) == 30
    of = lambda c: rows(task.normalise(task.x_train[c]))
    for c, now in zip(clients, left): assert of(now) == of(c) - rows(x)

@pytest.mark.parametrize('n', [5, 23])
@pytest.mark.parametrize('how', ['held', 'uploaded'])
def test_the_server_has_as_many_samples_as_asked(how, n):
    assert len(parts_of(Setting(public=f'{how}(samples={n})'))['proxy'][1]) == n

def test_a_run_from_a_file_knows_its_federation(tmp_path):
    s = Setting('SCAFFOLD()', rounds=2, local=Local(epochs=.2), clients=4, without=(1,), participation=.5, seed=2)
    first = Federation.of(s, device='cpu', progress=False, evaluate_every=2, bad_clients='skip').run()
    back = Run.load(first.save(tmp_path/'run.safetensors'))
    again = back.federation()
    assert back.origin is None and again.setting == s and again.bad_clients == first.origin.bad_clients
    assert [getattr(again, k) for k in ('rounds', 'local', 'without', 'evaluate_every')] == [2, s.local, (1,), 2]
    one, two = again.run(), back.without(3)
    assert all(torch.equal(v, one.state.params[k]) for k, v in first.state.params.items())
    assert two.difference == first.without(3).difference
    assert back.federation(rounds=1).rounds == first.federation(rounds=1).rounds == 1

def test_what_is_given_goes_before_the_words():
    asked = Federation.of(Setting(rounds=3), rounds=1, clients=[torch.arange(5)])
    assert asked.rounds == 1 and len(asked.clients) == 1 and asked.seed == 0

def test_a_partition_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"partition='dirichlt\(\)', but it must be one of dirichlet, iid"):
        parts_of(replace(Setting(), partition='dirichlt()'))

@pytest.mark.parametrize('said, right', [
    ('shards(per_client=2)', "shards has no option 'per_client'.*It has: shards_per_client, pure"),
    ('iid(clients=5)', "iid has no option 'clients'.*It has: none"),
    ('by_owner(most=3)', "by_owner has no option 'most'.*It has: every, least")])
def test_an_option_that_a_partition_does_not_have_is_named(said, right):
    with pytest.raises(TypeError, match=right): parts_of(Setting(partition=said))
