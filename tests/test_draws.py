"One seed decides every draw: the same dropout and noise in all executors, whatever was drawn before, after a resume."
import hashlib, json, lzma
from pathlib import Path
import pytest, torch, torch.nn.functional as F
from torch import nn
from torch.func import vmap
from fedlit.batches import plan, batches_of
from fedlit import laws
from fedlit.data import load, Crop, Flip
from fedlit.ground.draws import Seeded, rng, seed_of, _words
from fedlit.method import Method
from fedlit.methods import FedAvg, FedDecomp, FedPara, HeteroFL
from fedlit.models import Net, build, wrap
from fedlit.participation import draw_clients
from fedlit.partition import dirichlet, iid
from fedlit.local import Local
from fedlit.state import start
from fedlit.result import Run
from fedlit.run import federate
from dataclasses import replace
from fedlit.ground.tape import record
from test_distributed import launch

ROOT = Path(__file__).parents[1]

TASK = load('digits').subset(200, seed=0)
CLIENTS = dirichlet(TASK.y_train, 4, .5, seed=0)

def net(seed=0):
    "A perceptron with dropout."
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(.5)), nn.Linear(16, 10))

def go(executor="loop", method=None, model=None, **kw):
    kw = {'rounds': 3, 'local': Local(epochs=1, batch_size=16), 'progress': False, **kw}
    return federate(model or net(), TASK, CLIENTS, method or FedAvg(), executor=executor, **kw)

def twice(*args, **kw):
    "A run, which is the same whatever was drawn before it."
    torch.manual_seed(1)
    run = go(*args, **kw)
    torch.manual_seed(2)
    assert same(run, go(*args, **kw))
    return run

def far(a, b): return max((a.state.params[k] - v).abs().max().item() for k, v in b.state.params.items())
def same(a, b): return all(torch.equal(a.state.params[k], v) for k, v in b.state.params.items())

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads', 'extract'])
def test_dropout_depends_on_the_seed_only(executor):
    a = twice(executor)
    assert not same(a, go(executor, seed=1)) and far(a, go()) < 1e-5

class NowAndThen(nn.Module):
    "Dropout, but not in the first step."
    def __init__(self, when):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.when, self.calls = when, 0
    def forward(self, x):
        z = self.a(x.flatten(1)).relu()
        self.calls += self.when == 'calls'
        here = dict(calls=self.calls > 3, size=len(x) < 16, value=self.when == 'value' and z.mean() > .24)
        return (z := F.dropout(z, .5, self.training and bool(here[self.when]))), self.head(z)

@pytest.mark.filterwarnings('ignore:NowAndThen.s forward changes')
@pytest.mark.parametrize('when, record', [('calls', True), ('size', True), ('size', False), ('value', True),
                                          ('value', False)])
def test_draws_that_begin_after_the_first_step_depend_on_the_seed_only(when, record):
    assert not same(twice(model=NowAndThen(when), record=record), go(model=NowAndThen(when), record=record, seed=1))

def test_networks_without_draws_are_recorded_and_those_with_are_not():
    assert record(lambda x: x*2, torch.ones(3))[1] is not None
    assert record(lambda x: F.dropout(x), torch.ones(3))[1] is None

class Noisy(Method):
    "Noise in every hook that may draw, with and without the generator."
    def loss(self, features, generator): return .01*(features*torch.randn(features.shape, generator=generator)).mean()
    def grad(self, grads): return {k: g + .01*torch.randn_like(g) for k, g in grads.items()}
    def done(self, client, delta, generator):
        return client, dict(rough={k: v + .01*torch.randn(v.shape, generator=generator) for k, v in delta.items()})
    def merge(self, delta, server, uploads, generator):
        return {k: (v + .01*torch.randn(v.shape, generator=generator) + 0*uploads['rough'][k].sum(0)
                    if k in uploads['rough'] else v)
                for k, v in delta.items()}, server

@pytest.mark.parametrize('executor', ['vmap', 'threads'])
def test_noise_in_hooks_is_the_same_everywhere(executor):
    m, plain = Noisy(), build('mlp', TASK, seed=0)
    a = twice(executor, m, plain)
    assert far(a, go('loop', m, plain)) < 1e-5 and far(a, go('loop', FedAvg(), plain)) > 1e-3

@pytest.mark.parametrize('draw', [
    lambda g: torch.randint(9, (3,), generator=g), lambda g: torch.randint(2, 9, (), generator=g).expand(3),
    lambda g: torch.normal(0., 1., (3,), generator=g), lambda g: torch.rand(3, generator=g)])
def test_a_shape_to_draw_may_stand_behind_other_arguments(draw):
    who, x, gen = [('step', 0, 7, k, 0) for k in range(3)], torch.zeros(3, 3), torch.Generator()
    def alone(k):
        with Seeded(who[k]): return x[k] + draw(gen)
    with Seeded(*who, stacked=True): together = vmap(lambda x: x + draw(gen), randomness='different')(x)
    assert torch.equal(together, torch.stack([alone(k) for k in range(3)]))
    assert not torch.equal(together[0], together[1])

@pytest.mark.parametrize('method, model', [(FedAvg(), net()), (Noisy(), build('mlp', TASK, seed=0))],
                         ids=['dropout', 'noise'])
def test_dropout_after_a_resume(method, model, tmp_path):
    "And noise in hooks."
    ask = lambda rounds, **kw: go('vmap', method, model, rounds=rounds, **kw)
    whole = ask(4)
    ask(2, checkpoint=tmp_path/'run')
    torch.manual_seed(7)
    assert same(ask(4, checkpoint=tmp_path/'run'), whole)

def test_clients_do_not_share_their_draws():
    "Two clients with the same data drop other units."
    twins = [CLIENTS[0], CLIENTS[0]]
    run = federate(net(), TASK, twins, FedAvg(), rounds=1, local=Local(epochs=1), progress=False, keep_locals=True,
                   executor='vmap')
    assert not torch.equal(*run.locals['params']['head.weight'])

def tiny(name):
    "Networks of torchvision that drop out, as small as they come."
    import torchvision.models as tv
    from torchvision.models.vision_transformer import VisionTransformer
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == 'vit':
            return wrap(VisionTransformer(image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=16,
                                          mlp_dim=16, dropout=.2, attention_dropout=.2, num_classes=10),
                        'heads.head', x=torch.randn(2, 3, 8, 8))
        if name == 'mobilenet':
            return wrap(tv.mobilenet_v3_small(num_classes=10, dropout=.5, width_mult=.25), 'classifier.3',
                        x=torch.randn(2, 3, 32, 32))
        net = tv.VGG(tv.vgg.make_layers([4, 'M', 8, 'M']), num_classes=10, dropout=.5)
        net.classifier[0], net.classifier[3], net.classifier[6] = (
            nn.Linear(8*49, 32), nn.Linear(32, 32), nn.Linear(32, 10))
        return wrap(net, 'classifier.6', x=torch.randn(2, 3, 8, 8))

@pytest.mark.slow
@pytest.mark.parametrize('name', ['vit', 'mobilenet', 'vgg'])
def test_torchvision_networks_with_dropout(name, tmp_path):
    model = tiny(name)
    class Wide(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
        def forward(self, x):
            return self.inner(F.interpolate(x.expand(-1, 3, -1, -1), size=32 if name == 'mobilenet' else 8))
    model, kw = Wide(model), dict(rounds=2, local=Local(epochs=1, batch_size=32))
    whole = go('loop', model=model, **kw)
    for executor in ('threads', 'auto'):
        torch.manual_seed(3)
        assert far(go(executor, model=model, **kw), whole) < 1e-4
    go('loop', model=model, **{**kw, 'rounds': 1}, checkpoint=tmp_path/'run')
    assert same(go('loop', model=model, **kw, checkpoint=tmp_path/'run'), whole)

def _on_ranks(rank, path):
    run = go('torchrun:loop', rounds=2)
    if rank == 0: run.save(path/'run')

def test_dropout_on_two_ranks(tmp_path):
    launch(_on_ranks, 2, tmp_path)
    assert far(Run.load(tmp_path/'run'), go(rounds=2)) < 1e-6

def test_augmentation_does_not_depend_on_who_else_takes_part():
    task, local = replace(TASK, augment=(Crop(2), Flip())), Local(epochs=1, batch_size=16)
    both, one = (batches_of(task, CLIENTS, [0, 1], local),
                 batches_of(task, CLIENTS, [min((0, 1), key=lambda k: len(CLIENTS[k]))], local))
    k = min((0, 1), key=lambda k: len(CLIENTS[k]))
    assert len(CLIENTS[0]) // 16 != len(CLIENTS[1]) // 16
    for a, b in zip(both.draws, one.draws):
        assert all(torch.equal(a[n][k, :v.shape[1]], v[0]) for n, v in b.items())

class Fixed(Method):
    "A projection that is meant to be the same in every step: its generator is seeded in the hook."
    def loss(self, features):
        fixed = torch.randn(features.shape[1], 2, generator=torch.Generator().manual_seed(5))
        SEEN.append(fixed)
        return 1e-3*(features@fixed.to(features)).square().mean()

SEEN = []

@pytest.mark.parametrize('executor', ['loop', 'vmap', 'threads'])
def test_a_generator_that_a_hook_seeds_gives_its_own_numbers(executor):
    SEEN.clear()
    run, wanted = go(executor, Fixed(), rounds=2), torch.randn(16, 2, generator=torch.Generator().manual_seed(5))
    assert executor == 'vmap' or all(torch.equal(v, wanted) for v in SEEN) # vmap shows a stack from inside
    assert far(run, go('loop', Fixed(), rounds=2)) < 1e-5

@pytest.mark.parametrize('method', [FedDecomp, FedPara])
def test_the_seed_of_a_method_decides_what_it_begins_with(method):
    model = build('mlp', TASK, seed=0)
    zero, again, one = (start(method(seed=s), model, 4) for s in (0, 0, 1))
    tensors = lambda state: {**state.params, **{k: v[0] for k, v in state.personal.items()}}
    differ = lambda a, b: any(not torch.equal(v, tensors(b)[k]) for k, v in tensors(a).items())
    assert differ(zero, one) and not differ(zero, again)

LARGE = 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**63 - 1, 2**63, 2**64 - 1

def streams():
    "A million tuples (seed, round), (seed, round, client), (seed, round, client, step), small and large."
    seeds = [*range(12), *LARGE]
    yield from ((s, r) for s in seeds for r in range(2500))
    yield from ((s, r, k) for s in seeds for r in range(50) for k in range(250))
    yield from ((s, r, k, t) for s in seeds for r in range(14) for k in range(50) for t in range(50))

def test_a_million_streams_do_not_coincide():
    "By what their generators begin with, and by a first draw of some that a carry or a zero could confuse."
    assert len({tuple(_words('step', n)) for n in streams()}) == 1_000_000
    near = [n for n in streams() if max(n) >= 2**31 and n[1] < 2][:20_000]
    seeds = {seed_of('step', *n) for n in near}
    assert len(seeds) == len(near) > 10_000 and max(seeds) < 2**63

@pytest.mark.slow
def test_a_million_streams_draw_different_numbers():
    assert len({seed_of('step', *n) for n in streams()}) == 1_000_000

def test_words_of_streams_do_not_coincide():
    names = 'init', 'clients', 'batches', 'augmentation', 'step', 'done', 'weigh', 'merge', 'trial'
    numbers = (0,), (0, 0), (0, 0, 0), (1, 0), (0, 1), (0, 3, 2**32)
    assert len({rng(w, *n).integers(2**62) for w in names for n in numbers}) == 54

def conv_with(dropout):
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), dropout, nn.Linear(512, 10)), '4')

class Functional(nn.Module):
    def forward(self, x): return nn.functional.dropout(x, .5, self.training)

@pytest.mark.parametrize('dropout,chosen', [(nn.Dropout(.5), 'threads'), (Functional(), 'threads'),
                                            (nn.Dropout(0.), 'extract'), (nn.Identity(), 'extract')], ids=str)
def test_where_a_cut_out_network_would_draw_other_numbers_it_is_masked(dropout, chosen):
    task = load('digits').subset(60, seed=0)
    def run(executor):
        return federate(conv_with(dropout), task, iid(task.y_train, 3, seed=0), HeteroFL(rates=(1., .5)), 2,
                        Local(epochs=1), executor=executor, device='cpu', progress=False)
    auto = run('auto')
    assert auto.settings['executor'] == chosen
    one = run('loop').model.state_dict()
    assert all((v - one[k]).abs().max() < 1e-5 for k, v in auto.model.state_dict().items())
    if chosen == 'threads':
        with pytest.warns(UserWarning, match='not the same numbers'): run('extract')

# ---- draws and committed results ----

def drawn():
    "A fingerprint of what the streams of a run draw: partition, who takes part, order of the samples, first weights."
    task, text = load('digits'), []
    clients = dirichlet(task.y_train, 5, .1, seed=3)
    text.append([c.tolist() for c in clients])
    text.append([list(map(int, draw_clients(20, .3, 1, r))) for r in range(3)])
    text.append(plan(clients, [0, 2], Local(epochs=2, batch_size=16), 1, 2, 1)[0].tolist())
    weights = build('mlp', task, seed=4).state_dict()
    text.append([[round(v, 5) for v in w.flatten().tolist()] for w in weights.values()])
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]

STREAMS, SINCE = '83e1467a69c2f4a1', '2026-11-22' # what `drawn` is, and from which day on
OLDER = {'FedAvg-52cda42fac54.json', 'FedAvg-8635891d198c.json', 'FedAvg-a67c91819994.json', # still to be made anew
         'FedDecorr-243c74482a2c.json', 'FedDecorr-7039e5bdf61d.json', 'FedDecorr-88c065e30842.json'}

class Noise(Method):
    "Remembers what it draws in each of the hooks that are asked once for all clients."
    def init(self, params): return params, dict(init=torch.randn(3)), {}
    def combine(self, deltas, weights, generator):
        return {k: v + torch.randn(v.shape, generator=generator) for k, v in deltas.items()}, weights
    def merge(self, delta, server): return delta, dict(server, merge=torch.randn(3))

def test_two_parts_draw_different_numbers_and_the_first_those_of_one_alone():
    one, two = (laws.train(m, laws.small_world(), rounds=1) for m in (Noise(), Noise() + Noise()))
    for k, v in one.server['Noise'].items():
        assert torch.equal(two.server['Noise'][k], v) and not torch.equal(two.server['Noise 2'][k], v)
    moved = [s.params['head.bias'] - laws.train(FedAvg(), laws.small_world(), rounds=1).params['head.bias']
             for s in (one, two)]
    assert not torch.allclose(moved[1], 2*moved[0])

def test_committed_runs_have_the_draws_of_today():
    "Where this fails because draws have changed: make the committed runs anew, then write down the new fingerprint."
    assert drawn() == STREAMS
    runs = [line for file in (ROOT/'results').glob('*/*.jsonl.xz') for line in map(json.loads, lzma.open(file, 'rt'))]
    trained = [r for r in runs if r['setting']['rounds']]
    assert len(trained) > 1000
    assert {r['file'] for r in trained if r['date'] < SINCE} == OLDER

@pytest.mark.parametrize('seed', [-1, .5, 1.5, float('nan'), float('inf'), 2**64, 'a', '1', None])
def test_a_seed_that_cannot_be_is_named(seed):
    for stream in (seed,), (0, seed):
        with pytest.raises(ValueError, match=f'{seed}: it must be a whole number'): rng('batches', *stream)
