"Real federation on Flower: the same numbers as `federate`, nothing personal in a message, and no harm from any answer."
import io, json, logging, os, pickle, re, shutil, subprocess, sys, threading, time, warnings
from pathlib import Path
from types import SimpleNamespace
import numpy as np, pytest, torch

pytest.importorskip('flwr', reason="Flower is not installed: pip install '.[flower]', on Python 3.11 or newer")
APP = Path(__file__).parents[1]/'examples'/'flower'
sys.path.insert(0, str(APP))
import deploy, prepare, tomllib
from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict
from safetensors.torch import load_file, save_file
import fedlit.flower as ff
from fedlit.data import Task, load
from fedlit.models import build, freeze
from fedlit.parse import local as local_of, value
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.round import fed_round
from fedlit.batches import batches_of
from fedlit.result import Run
from fedlit.run import federate
from federation import Bag, sites

SITES, LOCAL = [{'partition-id': k} for k in range(4)], Local(epochs=2, batch_size=32)

@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "Four sites with folders of digits: the task, the parts and the run config."
    task = load('digits').subset(300, seed=0)
    parts = dirichlet(task.y_train, clients=4, alpha=.5, seed=0)
    return task, parts, sites(tmp_path_factory.mktemp('sites'), task, parts, **{
        'rounds': 3, 'task.mean': str(task.mean), 'task.std': str(task.std), 'model.hidden': '(32,)',
        'model.features': 16, 'model.norm': 'batch', 'local.batch-size': 32})

@pytest.fixture(autouse=True)
def _what_flower_says(caplog): caplog.set_level(logging.INFO, 'flwr')

def rehearse(config, grid=ff.Rehearsal, nodes=SITES, **kw):
    grid = grid(ff.client_app(), config, nodes, **kw)
    return ff.serve(grid, ff.read_plan(config)), grid

METHODS = ('FedAvg()', 'FedProx(mu=0.1)', 'FedAvgM()', 'MOON()', 'FedDecorr()', 'SCAFFOLD()', 'FedBN()',
           'MOON() + FedDecorr()', 'SCAFFOLD() + FedProx(mu=0.1)', 'SCAFFOLD() + FedBN()', 'FedRep()', 'HeteroFL()',
           'FedBN() + TopK(share=0.2) + DP(clip=0.5, noise=0.0)', 'Quantize()', 'Ditto() + FedProto()', 'FedALA()')

@pytest.mark.parametrize('text', METHODS)
def test_the_same_model_as_the_simulation(home, text):
    task, parts, config = home
    config = {**config, 'method': text, 'participation': .5}
    run, grid = rehearse(config)
    plan = ff.read_plan(config)
    other = federate(plan.model, task, parts, plan.method, 3, LOCAL, .5, seed=0, executor='loop', progress=False)
    assert (torch.isfinite(run.state.params['head.weight']).all()
            and run.history['accuracy'].tolist()
                == pytest.approx(other.history['accuracy'].tolist(), abs=1.5/len(task.y_test))) # one image
    for part in ('params', 'buffers'):
        for k, v in getattr(other.state, part).items():
            if k not in other.state.personal:
                assert torch.allclose(getattr(run.state, part)[k], v, atol=1e-6, rtol=0), k
    # what a site remembers is what the simulation holds for it, and the server has none of it
    for k, context in enumerate(grid.contexts.values()):
        for leaf, v in ff.flatten(ff.memory(other.state, k)).items():
            # SCAFFOLD's variate of a tensor that is kept is never read
            used = not (leaf.startswith('client') and leaf.split('/')[-1] in other.state.personal)
            if used and not leaf.endswith('/') and context.state:
                last = max(r for r in context.state if r.startswith('after'))
                assert np.allclose(context.state[last][leaf].numpy(), v.numpy(), atol=1e-6), leaf
    assert all(not v.written() for v in ff.flatten(dict(a=run.state.client, b=run.state.personal)).values()
               if hasattr(v, 'written'))

def bag(name, task, seed=0, **options):
    torch.manual_seed(seed)
    return Bag()

@pytest.mark.parametrize('method', ['FedAvg()', 'FedLC()']) # of which one counts labels
def test_tokens_train_as_in_the_simulation(method):
    x, y = torch.randint(0, 20, (40, 5)), torch.arange(40) % 2
    config = {'method': method, 'clients': 2, 'rounds': 1, 'task.shape': '(5,)', 'task.classes': 2,
              'task.dtype': 'int64', 'model.name': 'bag'}
    data = lambda context: tuple(v[context.node_config['partition-id']::2] for v in (x, y))
    run = ff.serve(ff.Rehearsal(ff.client_app(data=data, network=bag), config, SITES[:2]), ff.read_plan(config, bag))
    plan = ff.read_plan(config, bag)
    other = federate(plan.model, Task('t', x, y, x, y, 2), [torch.arange(k, 40, 2) for k in range(2)], plan.method, 1,
                     plan.local, executor='loop', progress=False)
    assert all(torch.allclose(run.state.params[k], v, atol=1e-6) for k, v in other.state.params.items())
    with pytest.raises(ValueError, match="task.dtype='bool', but it must be 'int64' for tokens"):
        ff.read_plan({**config, 'task.dtype': 'bool'}, bag)

def dropping(name, task, seed, **options):
    "A network with dropout."
    net = build(name, task, seed=seed, **options)
    net.body = torch.nn.Sequential(net.body, torch.nn.Dropout(.3))
    return net

@pytest.mark.parametrize('seed', [0, 5])
@pytest.mark.parametrize('text, network', [('Quantize(bits=4)', build), ('FedAvg()', dropping),
                                           ('pFedPara() + Quantize(bits=4)', build)])
def test_what_is_drawn_at_sites_is_drawn_as_in_the_simulation(home, text, network, seed):
    "Also with a seed that is not the default: by the method, and by layers."
    task, parts, config = home
    config = {**config, 'method': text, 'seed': seed}
    run = ff.serve(ff.Rehearsal(ff.client_app(network=network), config, SITES), ff.read_plan(config, network))
    plan = ff.read_plan(config, network)
    other = federate(plan.model, task, parts, plan.method, 3, LOCAL, seed=seed, executor='loop', progress=False)
    for k, v in other.state.params.items():
        if k not in other.state.personal: assert torch.allclose(run.state.params[k], v, atol=1e-6, rtol=0), k

class Overheard(ff.Rehearsal):
    "Keeps the names and the bytes of all arrays that travel."
    def _travel(self, m):
        m = super()._travel(m)
        for r in m.content.array_records.values(): self.heard += [(k, a) for k, a in r.items()]
        return m
    def __init__(self, *args):
        super().__init__(*args)
        self.heard = []

@pytest.mark.parametrize('local,participation', [
    ({'local.lr': 'Decay(.05, .8)', 'local.optimizer': 'Adam(kept=True)'}, .5),
    ({'local.steps': '(3, 9, 1, 4)', 'local.lr': 'Milestones(.05, at=(1, 2))', 'local.momentum': .5}, 'BySize(.5)'),
    ({'local.epochs': 'Between(1, 3)', 'local.optimizer': 'SGD(nesterov=True)'}, 'RoundRobin(.5)'),
    ({'local.epochs': .6}, "Available(1., rows=('1001', '0110'))")])
def test_local_training_and_participation_are_those_of_the_simulation(home, local, participation):
    task, parts, config = home
    config = {k: v for k, v in config.items() if k not in local} | {**local, 'participation': participation}
    run, grid = rehearse(config)
    plan = ff.read_plan(config)
    fields = {k.removeprefix('local.').replace('-', '_'): v for k, v in config.items() if k.startswith('local.')}
    assert plan.local == local_of(**fields)
    other = federate(plan.model, task, parts, plan.method, 3, plan.local, value(participation), seed=0,
                     executor='loop', progress=False)
    assert [*run.history['participants']] == [*other.history['participants']]
    for k, v in other.state.params.items(): assert torch.allclose(run.state.params[k], v, atol=1e-6, rtol=0), k
    for k, context in enumerate(grid.contexts.values()): # what a site keeps of its optimiser is there and nowhere else
        for leaf, v in ff.flatten(ff.memory(other.state, k)).items():
            seen = [r[leaf].numpy() for r in context.state.values() if leaf in r]
            assert not seen or torch.allclose(torch.from_numpy(seen[-1]), v, atol=1e-6, rtol=0), leaf

def test_a_site_without_class_0_is_not_told_to_count_from_0(home):
    task, parts, config = home
    assert any(0 not in task.y_train[i] for i in parts)
    with warnings.catch_warnings():
        warnings.simplefilter('error') # a site where it is raised has no answer
        assert rehearse({**config, 'rounds': 1})[0].history.participants.tolist() == [4]

def test_what_is_personal_is_in_no_message(home):
    _, _, config = home
    run, grid = rehearse({**config, 'method': 'SCAFFOLD() + FedBN()'}, Overheard)
    kept = set(run.state.personal)
    assert len(kept) == 10 and len(grid.heard) > 100
    assert not [k for k, _ in grid.heard if k.split('/')[-1] in kept]
    for context in grid.contexts.values():
        remembered = {a.data for k, a in context.state['after round 3'].items() if a.numpy().any()}
        assert len(remembered) > 10 and not remembered & {a.data for _, a in grid.heard}

class Evil:
    "Creates a file when it is unpickled."
    def __init__(self, path): self.path = path
    def __reduce__(self): return open, (str(self.path), 'w')

def objects(path):
    f = io.BytesIO()
    np.save(f, np.array([Evil(path)], dtype=object), allow_pickle=True)
    return f.getvalue()

NAME, SENT = 'params/head.weight', 'uploads/SCAFFOLD/change/head.weight'
FORGED = 'params/x\nINFO : all is well\x1b[31m\u202e'
def first(change): return lambda c, tmp: c['arrays'].__setitem__(NAME, change(c['arrays'][NAME].numpy(), tmp))
def said(**v): return lambda c, tmp: c.__setitem__('said', MetricRecord({**c['said'], **v}))
def one(v, x):
    v = v.copy()
    v.flat[3] = x
    return Array(v)
FAULTS = {
    'nan': (first(lambda v, _: one(v, np.nan)), 'params/head.weight holds numbers that are not finite'),
    'inf': (first(lambda v, _: one(v, np.inf)), 'not finite'),
    'shape': (first(lambda v, _: Array(v[:-1])),
              r'params/head.weight is float32 \(9, 16\), but it must be float32 \(10, 16\)'),
    'type': (first(lambda v, _: Array(v.astype('f8'))), 'is float64'),
    'short': (first(lambda v, _: Array('float32', v.shape, 'numpy.ndarray', Array(v).data[:-4])),
              '636 bytes, but it must have 640'),
    'huge': (first(lambda v, _: Array('float32', v.shape, 'numpy.ndarray',
                                      Array(v).data.replace(b'(10, 16)', b'(10**15,'))),
             'not a NumPy array'),
    'pickle': (first(lambda v, tmp: Array('float32', v.shape, 'numpy.ndarray', pickle.dumps(Evil(tmp/'evil')))),
               'not a NumPy array'),
    'objects': (first(lambda v, tmp: Array('float32', v.shape, 'numpy.ndarray', objects(tmp/'evil'))), 'is object'),
    'missing': (lambda c, _: c['arrays'].pop(NAME), 'params/head.weight is missing'),
    'extra': (lambda c, _: c['arrays'].__setitem__('params/tail', Array(np.zeros(1))), 'params/tail is not expected'),
    'absurd': (first(lambda v, _: Array(v*np.float32(1e9))),
               r'an update of length \S+e\+\d+ in round 2, most of it in head.weight, to a network of length'),
    'steps': (said(steps=10**6), 'steps is 1000000'),
    'fraction': (said(steps=1.5), 'steps is 1.5'),
    'loss': (said(loss=float('nan')), 'loss is nan'),
    'losses': (said(loss=[1.]), r'loss is \[1.0\]'),
    'lost': (said(loss=1e6), 'had a mean loss of 1e\\+06 in round 2, more than 100 times'),
    'upload': (lambda c, _: c['arrays'].__setitem__(SENT, Array(c['arrays'][SENT].numpy()*0 + np.float32(1e10))),
               r'it returned 1e\+10 in uploads/SCAFFOLD/change/head.weight in round 2, the middle client has'),
    'thousands': (lambda c, _: c['arrays'].__setitem__(SENT, Array(c['arrays'][SENT].numpy()*0 + np.float32(9e3))),
                  r'it returned 9e\+03 in'),
    'forged': (lambda c, _: c['arrays'].__setitem__(FORGED, Array(np.zeros(1))), r'params/x\\nINFO : all is well\\x1b'),
    'long': (lambda c, _: c['arrays'].__setitem__('a'*10**6, Array(np.zeros(1))), 'a{150,200} ...'),
    'nothing': (lambda c, _: c.pop('arrays'), 'arrays'),
    'other': (lambda c, _: c.__setitem__('arrays', ConfigRecord({NAME: 'x'})), 'refused'),
    'raises': (lambda c, _: 1/0, 'ZeroDivisionError')}

class Spoilt(ff.Rehearsal):
    "In round 2, `spoil` has client 1's answer in its hands."
    def __init__(self, *args, spoil):
        super().__init__(*args)
        self.spoil = spoil
    def _answer(self, m):
        answer = super()._answer(m)
        if (m.metadata.group_id, m.metadata.dst_node_id) != ('2', 3): return answer
        try:
            self.spoil(answer.content)
            return answer
        except ZeroDivisionError as e: return Message(ff.Error(code=0, reason=repr(e)), reply_to=m)

def rounds_of(plan, task, parts, rounds, local=LOCAL, least=1):
    "The state of the simulation after rounds in which these clients take part."
    state, sizes = ff.begin(plan), torch.tensor([float(len(p)) for p in parts])
    for r, who in enumerate(rounds):
        state = fed_round(Broadcast(plan.method, plan.model, state, local), who,
                          batches_of(task, parts, who, local, 0, r, least), sizes[who])
    return state

WITHOUT = [0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3] # client 1 takes no part in round 2

@pytest.fixture(scope='module')
def sat_out(home):
    task, parts, config = home
    return rounds_of(ff.read_plan({**config, 'method': 'SCAFFOLD() + FedBN()'}), task, parts, WITHOUT, least=2)

def same(run, state):
    assert all(torch.isfinite(v).all() for v in run.state.params.values())
    gaps = [(run.state.params[k] - v).abs().max().item() for k, v in state.params.items() if k not in state.personal]
    return len(gaps) > 2 and max(gaps) < 1e-5

@pytest.mark.parametrize('fault', FAULTS)
def test_a_bad_answer_is_refused_and_does_no_harm(home, sat_out, fault, caplog, tmp_path):
    spoil, line = FAULTS[fault]
    config = {**home[2], 'method': 'SCAFFOLD() + FedBN()'}
    run, _ = rehearse(config, Spoilt, spoil=lambda c: spoil(c, tmp_path))
    assert run.history['left_out'].tolist() == ['', '1', ''] and same(run, sat_out) and not (tmp_path/'evil').exists()
    lines = [r.getMessage() for r in caplog.records]
    assert (any(re.search(line, l) and 'round 2' in l and 'node 3' in l for l in lines)
            and 'round 2 goes on without client 1 (node 3)' in lines), lines
    assert all(l.isprintable() and len(l) < 400 for l in lines) and sum('is refused' in l for l in lines) <= 1

class Silent(ff.Rehearsal):
    "In round 2 client 1's answer does not come (`how` is None), cannot be read, or comes in another's name."
    def __init__(self, *args, how=None):
        super().__init__(*args)
        self.how = how
    def pull_messages(self, ids):
        m = self.waiting.get(ids[0])
        if m is None or (m.metadata.group_id, m.metadata.dst_node_id) != ('2', 3): return super().pull_messages(ids)
        if self.how is None: return []
        if self.how == 'unreadable': raise ValueError('bytes of no message')
        answer, = super().pull_messages(ids)
        if self.how == 'empty': answer.__dict__['_content'] = None
        else: answer.metadata.__dict__['_src_node_id'] = 2
        return [answer]

@pytest.mark.parametrize('how, line', [(None, 'goes on without client 1'),
                                       ('unreadable', 'the answer of node 3 cannot be read'),
                                       ('forged', 'node 3 was answered for by node 2'),
                                       ('empty', 'node 3 sent a message without content')])
def test_a_lost_or_forged_answer_does_no_harm(home, sat_out, how, line, caplog):
    run, _ = rehearse({**home[2], 'method': 'SCAFFOLD() + FedBN()', 'timeout': 2.}, Silent, how=how)
    assert same(run, sat_out) and run.history['left_out'].tolist() == ['', '1', ''] and line in caplog.text

def test_too_few_good_answers_stop_the_run_and_keep_the_model(home, tmp_path):
    file = tmp_path/'global.safetensors'
    config = {**home[2], 'least': 4, 'checkpoint': str(file)}
    with pytest.raises(RuntimeError, match='round 2 has 3 good answers, but least=4; '
                                           'the run stops with the model of round 1'):
        rehearse(config, Silent)
    assert Run.load(file).state.round == 1
    run, _ = rehearse(config) # the same command goes on
    assert run.history['round'].tolist() == [1, 2, 3] and same(run, rehearse(home[2])[0].state)

class Absent(ff.Rehearsal):
    "The last site never connects."
    def get_node_ids(self): return super().get_node_ids()[:-1]

@pytest.mark.parametrize('grid, line', [
    (Silent, 'no answer of client 1 within timeout=1.5 s; where sites need longer, raise timeout in the run config'),
    (Absent, 'no word of client 3 within wait=0.1 s; where sites need longer, raise wait in the run config')])
def test_who_does_not_come_in_time_is_named_with_the_number_to_raise(home, grid, line, caplog):
    "In the log where the round goes on, and in the error where it does not."
    config = {**home[2], 'timeout': 1.5}
    rehearse(config, grid)
    assert line in caplog.text
    with pytest.raises(RuntimeError, match=re.escape(line)): rehearse({**config, 'least': 4}, grid)

@pytest.mark.parametrize('participation', [.5, 'BySize(.5)'])
def test_where_no_site_connects_the_number_to_raise_is_named(home, participation):
    class Empty(ff.Rehearsal):
        def get_node_ids(self): return []
    with pytest.raises(RuntimeError, match=r'round 1 has 0 good answers, .* raise wait in the run config'):
        rehearse({**home[2], 'participation': participation}, Empty)

def test_no_number_is_named_where_more_time_would_not_help(home, caplog):
    rehearse(home[2], Spoilt, spoil=lambda c: 1/0)
    assert 'round 2 goes on without client 1' in caplog.text and 'need longer' not in caplog.text

def test_the_example_allows_a_slow_laptop_time():
    "A round of three sites took up to two minutes on a busy one."
    assert agreed()['timeout'] >= 600 and agreed()['wait'] >= 300

@pytest.mark.parametrize('node, line', [({'partition-id': 7}, 'it is client 7 with'),
                                        ({'partition-id': -1}, 'it is client -1'),
                                        ({'partition-id': 3, 'folder': 'nowhere'}, 'No such file'),
                                        ({}, 'KeyError')])
def test_a_node_that_is_nobody_is_refused(home, node, line, caplog):
    run, _ = rehearse({**home[2], 'rounds': 1},
                          nodes=[*SITES[:3], {'folder': str(Path(home[2]['sites'])/'0'), **node}])
    assert (run.history['left_out'].tolist() == ['3'] and line in caplog.text
            and 'round 1 goes on without client 3 (not connected)' in caplog.text)

def test_no_node_takes_the_number_of_another(home, caplog):
    "The first that says it counts while it is here; with the list of nodes, none but the one of the key ever does."
    config = home[2]
    thief = {'partition-id': 3, 'folder': str(Path(config['sites'])/'1')}
    run, _ = rehearse(config, nodes=[*SITES, thief])
    assert same(run, rehearse(config)[0].state) and 'node 6 says that it is client 3, which is node 5;' in caplog.text
    class Gone(ff.Rehearsal):
        def get_node_ids(self): return [n for n in super().get_node_ids() if n != 5]
    for nodes, left_out in (('', ''), ('2 3 4 5', '3')):
        caplog.clear()
        run, _ = rehearse({**config, 'rounds': 1, 'nodes': nodes}, Gone, [*SITES, thief])
        assert run.history['left_out'].tolist() == [left_out]
        assert ('node 6 is refused: it says that it is client 3, which is node 5' in caplog.text) == bool(nodes)
    for wrong in ('2 3 4', '2 3 4 x', '2 3 4 4'):
        with pytest.raises(ValueError, match='nodes=.*the numbers of 4 nodes'): ff.read_plan({**config, 'nodes': wrong})

def test_a_restarted_site_is_met_again_and_says_that_it_forgot(home, caplog):
    class Restarted(ff.Rehearsal):
        "After round 1 client 1 comes back as another node."
        def get_node_ids(self):
            if self.rounds == 2:
                self.contexts[9] = type(old := self.contexts.pop(3))(
                    1, 9, old.node_config, RecordDict(), old.run_config)
            return super().get_node_ids()
        def push_messages(self, messages):
            self.rounds = max([self.rounds, *(1+int(m.metadata.group_id)
                                              for m in messages if m.metadata.message_type == 'train')])
            super().push_messages(messages)
        rounds = 0
    run, _ = rehearse({**home[2], 'method': 'MOON()', 'wait': 2.}, Restarted)
    assert run.history['participants'].tolist() == [4, 4, 4]
    assert 'node 9 is client 1' in caplog.text and 'client 1 does not remember round 1 and begins anew' in caplog.text

def test_noise_between_sites_comes_from_the_system(home):
    m = "FedBN() + DP(clip=1e-06, at='client', source='system')"
    a, b = (rehearse({**home[2], 'method': m, 'rounds': 1})[0].state.params['head.weight'] for _ in range(2))
    assert a.isfinite().all() and not torch.equal(a, b) and torch.allclose(a, b, atol=1e-4)

def test_an_optimiser_kept_at_sites_has_no_amplification(home):
    pytest.importorskip('dp_accounting')
    config = {**home[2], 'method': "DP(source='system')", 'model.norm': 'none', 'participation': .5}
    plans = [ff.read_plan({**config, 'local.optimizer': f'SGD(kept={k})'}) for k in (True, False)]
    kept, anew = (ff._row(plan, ff.replace(ff.begin(plan), round=1), None, {}, [])['epsilon'] for plan in plans)
    assert kept > anew

class Told(ff.Rehearsal):
    "Keeps all that the first site says, as numbers: name -> list."
    def __init__(self, *args):
        super().__init__(*args)
        self.told = {}
    def _answer(self, m):
        answer = super()._answer(m)
        if answer.has_error(): pytest.fail(answer.error.reason)
        for kind, record in answer.content.items() if m.metadata.dst_node_id == 2 else ():
            for k, v in record.items():
                v = v.numpy() if isinstance(v, Array) else np.array(v)
                self.told.setdefault(f'{kind}/{k}', []).append(v.astype(float))
        return answer

@pytest.mark.parametrize('method, open_, hidden', [
    ("FedBN() + DP(clip=1e-13, noise=0.0, at='client')", [], 'samples steps loss'),
    ("FedBN() + DP(clip=1e-13, noise=0.0)", [], 'samples steps loss'),
    ("DPSGD(clip=1e-13, noise=0.0)", ['samples', 'steps'], 'loss'), ('FedBN()', ['samples', 'steps', 'loss'], '')])
def test_a_site_says_nothing_that_is_not_protected(home, tmp_path, method, open_, hidden):
    "Another site with other images, labels and, but for samples' sake, another number of them says the same."
    had, said = load_file(Path(home[2]['sites'])/'0'/'train.safetensors'), []
    x, y = had['x'], had['y']
    many = len(x) if 'DPSGD' in method else 10
    (tmp_path/'0').mkdir()
    save_file(dict(x=1 - x[:many], y=9 - y[:many]), tmp_path/'0'/'train.safetensors')
    for root in (home[2]['sites'], tmp_path):
        config = {**home[2], 'method': method, 'rounds': 2, 'least': 4}
        if 'DPSGD' in method: config['model.norm'] = 'none'
        run, grid = rehearse(config, Told, [{**SITES[0], 'folder': f'{root}/0'}, *SITES[1:]])
        said.append(grid.told | {f'row/{k}': run.history[k].to_numpy() for k in ('accuracy', 'loss', 'participants')})
    here, there = said
    assert here.keys() == there.keys() and len(here) > 8
    moved = [k for k, v in here.items() if not all(np.allclose(a, b, atol=1e-6) for a, b in zip(v, there[k]))]
    names = {k.split('/')[-1] for k in here}
    assert bool(moved) == (method == 'FedBN()'), moved
    assert names >= {*open_, 'number', 'head.weight'} and ('train_loss' in run.history) == ('loss' in open_)
    assert not ({'said/loss', 'said/steps'} - {f'said/{k}' for k in open_}) & {*here}
    if 'samples' in hidden.split(): assert {float(v) for v in here['site/samples']} == {1.}

LYING = '''
"A server that asks its sites for more than the rounds of the plan, and keeps what they say."
import hashlib, json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from fedlit.flower import begin, client_app, read_plan, to_record, to_sites

def ask(grid, node, round, arrays):
    "The digest of an answer, or the reason why there is none."
    m = Message(RecordDict({'arrays': arrays, 'round': ConfigRecord(dict(round=round, accepted=0))}), node, 'train',
                ttl=900.)
    grid.push_messages([m])
    while not (got := list(grid.pull_messages([m.metadata.message_id]))): time.sleep(.2)
    if got[0].has_error(): return 'refused: ' + got[0].error.reason
    return hashlib.sha256(b''.join(a.data for _, a in sorted(got[0].content['arrays'].items()))).hexdigest()

def lie(grid, plan, questions):
    "What one site answers to pairs (round, what is added to the parameters)."
    while not (nodes := sorted(grid.get_node_ids())): time.sleep(.2)
    sent = to_record(to_sites(plan, begin(plan)))
    moved = lambda by: ArrayRecord({k: Array((a.numpy() + by).astype(a.numpy().dtype)) for k, a in sent.items()})
    return [ask(grid, nodes[0], r, moved(by)) for r, by in questions]

client = client_app()
server = ServerApp()

@server.main()
def main(grid, context):
    plan = read_plan(context.run_config)
    Path(plan.checkpoint).write_text(json.dumps(lie(grid, plan, json.loads(plan.test))))
'''
NOISY = "FedBN() + DP(clip=0.5, at='client', source='system')"

def test_a_lying_server_gets_one_noise_a_round(home):
    "It never says that an answer was used, so that all that a method counts is rolled back."
    app = {}
    exec(LYING, app)
    config = {**home[2], 'method': NOISY, 'rounds': 3}
    grid, plan = ff.Rehearsal(ff.client_app(), config, SITES[:1]), ff.read_plan(config)
    said = app['lie'](grid, plan, [(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (0, 0), (1, 0), (2, 1), (1, 0), (2, 0),
                                   (2, 1), (3, 0), (-1, 0), (10**9, 0)])
    assert [i for i, a in enumerate(said) if a.startswith('refused')] == [3, 5, 8, 9, 11, 12, 13], said
    assert said[0] == said[1] == said[2] != said[4] == said[6] != said[7] == said[10]
    assert len({a for a in said if not a.startswith('refused')}) == plan.rounds
    assert grid.contexts[2].state['answers']['count'] == plan.rounds
    for i, line in ((3, 'round 1 is asked for, but this site has answered round 1 (answers so far: 1'),
                    (5, 'round 1 is asked for, but this site has answered round 2'),
                    (11, 'round 4 is asked for, but the plan has 3')): assert line in said[i], said[i]

class Heard(ff.Rehearsal):
    "Keeps the answers of every round; in round 2 client 1's is lost once."
    def __init__(self, *args):
        super().__init__(*args)
        self.answers, self.lost = {}, False
    def _answer(self, m):
        answer, where = super()._answer(m), (m.metadata.group_id, m.metadata.dst_node_id)
        if m.metadata.message_type != 'train': return answer
        self.answers.setdefault(where, []).append(answer.content['arrays'][NAME].data)
        if where != ('2', 3) or self.lost: return answer
        self.lost = True
        return Message(ff.Error(code=0, reason='the line is down'), reply_to=m)

def test_a_round_that_is_asked_for_again_has_the_answers_that_it_had(home, tmp_path):
    "One noise for one update: what left a site before the server stopped is what it gets again."
    config = {**home[2], 'method': NOISY, 'least': 4, 'checkpoint': str(tmp_path/'global.safetensors')}
    grid = Heard(ff.client_app(), config, SITES)
    with pytest.raises(RuntimeError, match='round 2 has 3 good answers'): ff.serve(grid, ff.read_plan(config))
    run = ff.serve(grid, ff.read_plan(config))
    assert run.history['participants'].tolist() == [4, 4, 4]
    assert [len(grid.answers[r, n]) for r in '123' for n in (2, 3, 4, 5)] == [1]*4 + [2]*4 + [1]*4
    assert all(len(set(a)) == 1 for a in grid.answers.values()) and len(set(sum(grid.answers.values(), []))) == 12

# ---- what a registered site can do to the others ----

@pytest.mark.parametrize('name,value', [
    ('body.2.running_mean', 9e3), ('body.2.running_mean', 1e38), ('body.2.running_var', 2e18),
    ('body.2.running_var', -1.), ('body.2.num_batches_tracked', 2**62)])
def test_running_statistics_beyond_belief_are_refused_with_the_whole_answer(home, name, value, caplog):
    task, parts, config = home
    def spoil(c):
        v = c['arrays'][f'buffers/{name}'].numpy()
        c['arrays'][f'buffers/{name}'] = Array(np.full_like(v, value))
    run, _ = rehearse(config, Spoilt, spoil=spoil)
    state = rounds_of(ff.read_plan(config), task, parts, WITHOUT, least=2)
    assert same(run, state) and run.history['left_out'].tolist() == ['', '1', '']
    assert all(torch.allclose(v.double(), state.buffers[k].double(), atol=1e-4) for k, v in run.state.buffers.items())
    assert sum(f'in {name} in round 2' in r.getMessage() for r in caplog.records) == 1

class Clock:
    "Time that passes only while somebody sleeps."
    def __init__(self): self.now = 0.
    def monotonic(self): return self.now
    def sleep(self, seconds): self.now += seconds
    perf_counter = staticmethod(time.perf_counter)

class Mute(ff.Rehearsal):
    "The last node does not say who it is until round `speaks`."
    speaks = 10**9
    def pull_messages(self, ids):
        m, last = self.waiting.get(ids[0]), max(self.contexts)
        quiet = m is not None and m.metadata.dst_node_id == last and m.metadata.message_type == 'query'
        return [] if quiet and self.seen < self.speaks else super().pull_messages(ids)
    def push_messages(self, messages):
        self.seen = max([self.seen, *(int(m.metadata.group_id) for m in messages)])
        super().push_messages(messages)
    seen = 0

@pytest.mark.parametrize('sites,most', [([*SITES, {}], .5), ([*SITES[:3], {}], 7)])
def test_a_node_that_never_says_who_it_is_costs_its_own_wait_and_no_more(home, monkeypatch, sites, most):
    monkeypatch.setattr(ff, 'time', clock := Clock())
    run, _ = rehearse({**home[2], 'rounds': 4, 'wait': 3.}, Mute, sites)
    assert run.history['participants'].tolist() == [len(sites) - 1]*4 and clock.now <= most

def test_a_node_that_speaks_late_is_heard(home, monkeypatch):
    monkeypatch.setattr(ff, 'time', Clock())
    class Late(Mute): speaks = 2
    assert rehearse({**home[2], 'wait': 1.}, Late)[0].history['left_out'].tolist() == ['3', '3', '']

class Deaf(ff.Rehearsal):
    "The first time that the last node is asked who it is, something goes wrong."
    done, how = False, 'push'
    def push_messages(self, messages):
        if self.how == 'push' and self.hit(messages[0]): raise ConnectionError('no way there')
        super().push_messages(messages)
    def hit(self, m):
        now = not self.done and m.metadata.dst_node_id == max(self.contexts) and m.metadata.message_type == 'query'
        self.done |= now
        return now
    def _answer(self, m):
        if self.how == 'push' or not self.hit(m): return super()._answer(m)
        return Message(ff.Error(code=0, reason='not now'), reply_to=m)

@pytest.mark.parametrize('how', ['push', 'error'])
def test_a_node_that_cannot_say_who_it_is_just_now_is_asked_again(home, monkeypatch, how):
    monkeypatch.setattr(ff, 'time', clock := Clock())
    class Once(Deaf): pass
    Once.how = how
    run, _ = rehearse({**home[2], 'wait': 3.}, Once)
    assert run.history['left_out'].tolist() == ['', '', ''] and clock.now <= 3

def masked(name, task, seed, **options):
    "A network with a mask of -inf, as attention has it."
    net = build(name, task, seed=seed, **options)
    net.register_buffer('mask', torch.full((3, 3), -torch.inf).triu(1))
    return net

def test_a_mask_of_infinities_travels(home):
    task, parts, config = home
    grid = ff.Rehearsal(ff.client_app(network=masked), config, SITES)
    run = ff.serve(grid, ff.read_plan(config, masked))
    assert run.history['left_out'].tolist() == ['', '', ''] and run.state.buffers['mask'].isinf().sum() == 3

def frozen(name, task, seed, **options):
    "A network of which the first layer is everybody's, and fixed."
    return freeze(build(name, task, seed=seed, **options), but=('body.2', 'body.4', 'body.5', 'head'))

def another(name, task, seed, **options): return frozen(name, task, seed + 1, **options)

def test_what_is_frozen_is_not_sent_and_must_be_the_same(home, caplog):
    task, parts, config = home
    grid, plan = Overheard(ff.client_app(network=frozen), config, SITES), ff.read_plan(config, frozen)
    run = ff.serve(grid, plan)
    fixed, plan = set(run.state.fixed), ff.read_plan(config, frozen)
    assert fixed and not any(k.split('/')[-1] in fixed for k, _ in grid.heard)
    other = federate(plan.model, task, parts, plan.method, 3, LOCAL, seed=0, executor='loop', progress=False)
    for k, v in other.state.params.items(): assert torch.allclose(run.state.params[k], v, atol=1e-6, rtol=0), k
    with pytest.raises(RuntimeError, match='0 good answers'):
        ff.serve(ff.Rehearsal(ff.client_app(network=another), config, SITES), ff.read_plan(config, frozen))
    assert 'what is frozen in the network is not the same here' in caplog.text

class Shaky(ff.Rehearsal):
    "One call of the grid fails in round 2: `what` it is, for node 3 where it is about one."
    def __init__(self, *args, what):
        super().__init__(*args)
        self.what, self.round, self.done = what, 0, False
    def fail(self, what):
        if self.what != what or self.round < 2 or self.done: return
        self.done = True
        raise ConnectionError('the line is down')
    def get_node_ids(self):
        if self.round == 1: self.round = 2
        self.fail('nodes')
        return super().get_node_ids()
    def push_messages(self, messages):
        for m in messages:
            if m.metadata.message_type == 'train':
                self.round = max(self.round, int(m.metadata.group_id))
                if m.metadata.dst_node_id == 3: self.fail('push')
        super().push_messages(messages)
    def pull_messages(self, ids):
        if ids[0] in self.waiting and self.waiting[ids[0]].metadata.dst_node_id == 3: self.fail('pull')
        return super().pull_messages(ids)

@pytest.mark.parametrize('what,left_out', [('nodes', ['', '', '']), ('push', ['', '1', '']), ('pull', ['', '', ''])])
def test_one_error_of_the_grid_costs_an_answer_at_most(home, what, left_out, caplog):
    run, grid = rehearse(home[2], Shaky, what=what)
    assert grid.done and run.history['left_out'].tolist() == left_out and 'the line is down' in caplog.text

@pytest.mark.parametrize('survives', [True, False])
def test_a_server_that_restarts_tells_the_sites_and_says_what_they_lose(home, tmp_path, survives, caplog):
    "Where the sites still remember, nothing is lost; where they do not, both sides say so."
    config = {**home[2], 'method': 'SCAFFOLD() + FedBN()'}
    whole, _ = rehearse(config)
    config['checkpoint'] = str(tmp_path/'global.safetensors')
    before, grid = rehearse({**config, 'rounds': 2})
    assert Run.load(f"{config['checkpoint']}.last").state.round == 1
    for c in grid.contexts.values():
        c.run_config = config # the new plan has a third round, for the sites too
        if not survives: c.state = RecordDict()
    run = ff.serve(grid, ff.read_plan(config))
    assert same(run, whole.state) == survives
    assert 'goes on after round 2' in caplog.text and '(SCAFFOLD, 10 personal tensors)' in caplog.text
    forgot = [f'client {k} (node {k+2}) does not remember round 2 and began anew' for k in range(4)]
    assert [l in caplog.text for l in forgot] == [not survives]*4

# ---- what a run config can do to a site ----

def at_site(config, node, kind='query', content=None):
    "What a site answers."
    ff.Rehearsal(None, config, []) # tells Flower whose messages these are
    context = Context(1, 2, node, RecordDict(), config)
    return ff.client_app()(Message(content or RecordDict(), 2, kind, ttl=10., group_id='1'), context)

def test_a_run_config_cannot_make_a_site_read_another_folder(home):
    with pytest.raises(ValueError, match='names no folder of its own'): at_site(home[2], {'partition-id': 0})
    own = {'partition-id': 0, 'folder': str(Path(home[2]['sites'])/'1')}
    assert at_site({**home[2], 'sites': '/etc'}, own).content['site']['samples'] == len(home[1][1])

@pytest.mark.parametrize('change,line', [({'model.hidden': '(10000000, 10000000)'}, 'a network of'),
                                         ({'local.epochs': 10**12}, 'the batches of a round of'),
                                         ({'model.features': 10**13}, 'a network of')])
def test_a_run_config_cannot_ask_for_more_memory_than_the_site_allows(home, change, line):
    config, began = {**home[2], **change}, time.process_time()
    with pytest.raises(ValueError, match=f'asks for {line} .* GB, .* but this site allows'):
        ff.read_plan(config, allowed=(50, 10**9))
    own = {'partition-id': 0, 'folder': str(Path(home[2]['sites'])/'0'), 'memory': .5}
    asked = RecordDict({'round': ConfigRecord(dict(round=0, accepted=0))})
    with pytest.raises(ValueError, match='but this site allows 0.5 GB'): at_site(config, own, 'train', asked)
    assert time.process_time() - began < 60

def test_ordinary_networks_are_counted_without_being_made(home):
    for name, shape in (('mlp', (1, 8, 8)), ('moon_cnn', (3, 32, 32)), ('resnet20', (3, 32, 32))):
        task = SimpleNamespace(x_train=torch.empty(0, *shape), classes=10)
        with torch.device('meta'): small = build(name, task, seed=0)
        real = build(name, task, seed=0)
        assert {k: (v.shape, v.dtype) for k, v in small.state_dict().items()} == {
            k: (v.shape, v.dtype) for k, v in real.state_dict().items()}

@pytest.mark.parametrize('change, line', [
    (dict(roundes=3), 'none of'),
    (dict(method='FedCAC()'), 'personal tensors never leave'),
    (dict(method='FedDF()'), 'public samples'),
    (dict(least=5), 'from 1 to the 4 clients'),
    (dict(method='__import__("os").system("x")'), 'method'),
    (dict(statistics='recomputed'), 'at real sites'),
    (dict(timeout=0), 'positive'),
    (dict(weighting='x'), 'samples, uniform'),
    (dict(participation='PowerOfChoice(.5)'), 'PowerOfChoice.*asks for losses.*`federate` runs it'),
    ({'method': 'SCAFFOLD()', 'local.optimizer': 'adam'}, 'SCAFFOLD reckons with'),
    (dict(method="FedBN() + DP(at='client')"), 'all sides know and could take away again'),
    (dict(method="FedBN() + DP(at='client', source='system')", participation='BySize(0.5)'),
     'how much data a site has')])
def test_what_cannot_be_agreed_on_is_an_error(home, change, line):
    with pytest.raises(ValueError, match=line): ff.read_plan({**home[2], **change})

class Odd(torch.nn.Module):
    "A network that returns what `how` makes of maps (N, 4, 6, 6), flat features and logits."
    def __init__(self, how):
        super().__init__()
        self.conv, self.head, self.how = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(144, 10), how
    def forward(self, x):
        maps = self.conv(x).relu()
        return self.how(maps, maps.flatten(1), self.head(maps.flatten(1)))

def asked_first(home, network=build, change=(), metrics=None):
    config = {**home[2], **dict(change)}
    ff.serve(ff.Rehearsal(ff.client_app(network=network), config, SITES), ff.read_plan(config, network), metrics)

@pytest.mark.parametrize('how, method, line', [
    (lambda m, f, l: (m, l), 'MOON()', r'MOON.* wants features \(N, d\)'),
    (lambda m, f, l: (l, f), 'FedAvg()', '144 logits, but the task has 10 classes|the other way round'),
    (lambda m, f, l: (f, l), 'FedBN()', r'FedBN\(\) finds nothing in Odd to keep at home')])
def test_a_network_that_federate_refuses_is_refused_before_a_site_is_asked(home, how, method, line, monkeypatch):
    monkeypatch.setattr(ff.Book, 'call', None) # through which sites are reached
    with pytest.raises(ValueError, match=line): asked_first(home, lambda *a, **k: Odd(how), dict(method=method))

@pytest.mark.parametrize('how, line', [
    (lambda m, f, l: (f.detach(), l), 'carry no gradient'), (lambda m, f, l: (l, l), 'its logits as features too'),
    (lambda m, f, l: (f, l.softmax(1)), 'ends? in a softmax')])
def test_a_network_that_federate_warns_of_is_warned_of_at_the_server(home, how, line):
    with pytest.warns(UserWarning, match=line):
        asked_first(home, lambda *a, **k: Odd(how), dict(method='MOON()', rounds=1))

@pytest.mark.parametrize('x, y, line', [
    (lambda x: x, lambda y: y + 1, 'y_test'), (lambda x: x.flatten(1), lambda y: y, 'test'),
    (lambda x: x, lambda y: y[:5], 'test'), (lambda x: x/0, lambda y: y, 'x_test'),
    (lambda x: x[:0], lambda y: y[:0], 'no test samples')])
def test_a_test_file_that_cannot_be_meant_is_refused_before_a_site_is_asked(home, x, y, line, tmp_path, monkeypatch):
    monkeypatch.setattr(ff.Book, 'call', None)
    save_file(dict(x=x(home[0].x_test.float()).contiguous(), y=y(home[0].y_test)), tmp_path/'t')
    with pytest.raises(ValueError, match=line): asked_first(home, change=dict(test=str(tmp_path/'t')))
    save_file(dict(images=home[0].x_test), tmp_path/'t')
    with pytest.raises(ValueError, match='/t has images, but it must have x and y'):
        asked_first(home, change=dict(test=str(tmp_path/'t')))

@pytest.mark.parametrize('metrics, line', [
    (dict(odd=lambda logits, y: 1/0), "metric 'odd'.*failed"), (dict(odd=lambda logits, y: 'x'), 'returned a str'),
    (dict(epsilon=lambda logits, y: 1.), "'epsilon' is a column of")])
def test_a_metric_that_fails_is_refused_before_a_site_is_asked(home, metrics, line, monkeypatch):
    monkeypatch.setattr(ff.Book, 'call', None)
    change = {'method': "FedBN() + DP(noise=1., at='client', source='system')"} if 'epsilon' in metrics else {}
    with pytest.raises(ValueError, match=line): asked_first(home, change=change, metrics=metrics)

def test_without_flower_the_error_says_what_to_install():
    code = ("import sys, fedlit, fedlit.run; assert 'flwr' not in sys.modules; sys.modules['flwr'] = None\n"
            "try: import fedlit.flower\n"
            "except ImportError as e: print(e)")
    assert ("pip install 'fedlit[flower] @ git+https"
            in subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout)

# The example, where there is no checkout

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The package as a wheel has it."
    folder = tmp_path_factory.mktemp('built')
    subprocess.run([sys.executable, 'setup.py', '-q', 'build_py', '-d', str(folder)], cwd=APP.parents[1], check=True)
    return folder

@pytest.mark.slow # the results are packed, too
def test_the_example_comes_with_the_package(built, tmp_path):
    code = "import fedlit.flower as ff; print(ff.__file__, ff.write_app('mine/app'))"
    run = lambda: subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True,
                                 env={**os.environ, 'PYTHONPATH': str(built)})
    done = run()
    assert done.returncode == 0 and str(built) in done.stdout, done.stderr
    files = lambda root: {f.relative_to(root).as_posix(): f.read_bytes() for f in root.rglob('*')
                          if f.suffix in ('.py', '.toml')}
    assert files(tmp_path/'mine'/'app') == files(APP) and len(files(APP)) == 4
    (tmp_path/'mine'/'app'/'app.py').write_text('changed', encoding='utf-8')
    assert 'is there already' in run().stderr and (tmp_path/'mine'/'app'/'app.py').read_text('utf-8') == 'changed'

def test_a_checkout_writes_its_own_example(tmp_path):
    assert (ff.write_app(tmp_path/'app')/'app.py').read_text('utf-8') == (APP/'app.py').read_text('utf-8')

# Processes, TLS and a folder for each of five sites

FAULTY = '''
import time
import numpy as np
from pathlib import Path
from flwr.app import Array
from flwr.clientapp import ClientApp
from fedlit.flower import client_app, server_app

class Faulty(ClientApp):
    "In round 1 a site does what its SuperNode was told to."
    def __call__(self, message, context):
        fault, first = (context.node_config.get('fault'),
                        message.metadata.group_id == '1' and message.metadata.message_type == 'train')
        if first and fault == 'killed':
            Path(context.node_config['folder'], 'training').touch()
            time.sleep(600)
        answer = good(message, context)
        if first and fault == 'late': time.sleep(float(context.run_config['timeout']))
        if first and fault in ('nan', 'shape'):
            arrays = answer.content['arrays']
            arrays['params/head.weight'] = Array(np.full((10, 64), np.nan, np.float32) if fault == 'nan' else
                                                 np.zeros((3, 64), np.float32))
        return answer

good = client_app()
client = Faulty()
server = server_app()
'''
TOLD = {1: 'nan', 2: 'shape', 3: 'late', 4: 'killed'} # a switch that only the test's own app reads
unix = pytest.mark.skipif(os.name == 'nt', reason='Flower starts its processes as POSIX does')

def agreed(**changes):
    "The run config of the example app, as Flower flattens it."
    said = tomllib.loads((APP/'pyproject.toml').read_text(encoding='utf-8'))['tool']['flwr']['app']['config']
    return {f'{k}.{n}' if isinstance(v, dict) else k: u
            for k, v in said.items() for n, u in (v.items() if isinstance(v, dict) else [(k, v)])} | changes

@pytest.mark.slow
@pytest.mark.long # two to five minutes; the one below starts processes in every CI
@unix
@pytest.mark.skipif(os.environ.get('FEDLIT_DEPLOY') == '0',
                    reason='FEDLIT_DEPLOY=0: no processes, which take some three minutes of processor time')
def test_a_deployment_with_tls_and_its_faults(tmp_path):
    "Five SuperNodes and two that do not belong: one test, to start them once. All compute on one thread, as this does."
    folder = tmp_path/'deployed'
    prepare.certificates(folder/'keys')
    prepare.certificates(folder/'other', 'another CA')
    for k in range(7): prepare.site_key(folder/'keys'/f'site{k}')
    task, parts = prepare.split(folder, 5)
    with deploy.Deployment(folder) as d:
        d.superlink()
        nodes = d.register(*(f'site{k}' for k in range(6)))        # site 6 is a stranger
        assert len(nodes.split()) == 6
        for k in range(5): d.supernode(k, **({'fault': TOLD[k]} if k in TOLD else {}))
        d.supernode(5, ca=folder/'other'/'ca.crt')                 # trusts another certificate authority
        d.supernode(6)
        printed = d.run(APP, rounds=2, wait=300., timeout=300., nodes=' '.join(nodes.split()[:5]))
        run = Run.load(folder/'global.safetensors')
        five_supernodes_reach_the_accuracy_of_the_simulation(task, parts, printed, run)
        a_wrong_certificate_and_an_unknown_key_do_not_get_in(d, printed)
        faults_between_processes_do_no_harm(d, task, parts, run.history['seconds'].iloc[-1], tmp_path/'faulty')

def five_supernodes_reach_the_accuracy_of_the_simulation(task, parts, printed, run):
    plan = ff.read_plan(agreed())
    other = federate(plan.model, task, parts, plan.method, 2, plan.local, seed=0, progress=False)
    assert (run.history['participants'].tolist() == [5, 5]
            and len(set(re.findall(r'node (\d+) is client', printed))) == 5)
    assert max((run.state.params[k] - v).abs().max().item() for k, v in other.state.params.items()) < 1e-4
    assert (run.history['accuracy'].tolist()
                == pytest.approx(other.history['accuracy'].tolist(), abs=1.5/len(task.y_test))
            and run.history['accuracy'].iloc[-1] > .6)

def a_wrong_certificate_and_an_unknown_key_do_not_get_in(d, printed):
    wrong, stranger, server = ((d.logs/f'{n}.log').read_text(encoding='utf-8') for n in ('site5', 'site6', 'superlink'))
    assert 'CERTIFICATE_VERIFY_FAILED' in wrong and 'SuperNode ID' not in wrong, wrong[-2000:]
    assert 'SuperNode ID' not in stranger and 'No SuperNode found with the given public key' in server, stranger[-2000:]
    assert 'is client 5' not in printed and 'is client 6' not in printed

def faults_between_processes_do_no_harm(d, task, parts, seconds, app):
    app.mkdir()
    shutil.copy(APP/'pyproject.toml', app)
    (app/'app.py').write_text(FAULTY, encoding='utf-8')
    begun, timeout = d.folder/'sites'/'4'/'training', 2.5*seconds + 10
    def kill_in_the_middle():
        while not begun.exists(): time.sleep(.1)
        d.kill('site4')
    threading.Thread(target=kill_in_the_middle, daemon=True).start()
    printed = d.run(app, method='SCAFFOLD()', rounds=2, least=1, wait=300., timeout=timeout,
                    checkpoint='faulty.safetensors')
    (d.logs/'faults.log').write_text(printed, encoding='utf-8')
    run, plan = Run.load(d.folder/'faulty.safetensors'), ff.read_plan(agreed(method='SCAFFOLD()'))
    for line in (r'round 1: the answer of client 1 \(node \d+\) is refused: '
                 r'params/head.weight holds numbers that are not finite',
                 r'client 2 \(node \d+\) is refused: params/head.weight is float32 \(3, 64\)',
                 'round 1 goes on without client 3',
                 'round 1 goes on without client 4',
                 'round 2 goes on without client 4'):
        assert re.search(line, printed), printed
    assert run.history['left_out'].iloc[0] == '1 2 3 4' and '4' in run.history['left_out'].iloc[1] != '0 1 2 3 4'
    there = [[k for k in range(5) if str(k) not in out.split()] for out in run.history['left_out']]
    state = rounds_of(plan, task, parts, there, plan.local)
    assert max((run.state.params[k] - v).abs().max().item() for k, v in state.params.items()) < 1e-4

@pytest.mark.slow
@unix
@pytest.mark.skipif(os.environ.get('FEDLIT_DEPLOY') == '0', reason='FEDLIT_DEPLOY=0: no processes')
def test_a_server_that_lies_to_processes_gets_one_noise_a_round(tmp_path):
    "A site's process comes and goes with every message, and still it knows what it has answered."
    prepare.certificates(tmp_path/'keys')
    prepare.site_key(tmp_path/'keys'/'site0')
    prepare.split(tmp_path, 1)
    app = tmp_path/'lying'
    app.mkdir()
    shutil.copy(APP/'pyproject.toml', app)
    (app/'app.py').write_text(LYING, encoding='utf-8')
    with deploy.Deployment(tmp_path) as d:
        d.superlink()
        d.register('site0')
        d.supernode(0)
        d.run(app, method=NOISY, clients=1, least=1, rounds=1, checkpoint='lies.json',
              test='[[0, 0], [0, 0], [0, 1], [1, 0]]', # each costs a process that imports PyTorch
              **{'model.hidden': '(2,)', 'model.features': 2, 'local.epochs': 1})
    first, again, moved, beyond = json.loads((tmp_path/'lies.json').read_text(encoding='utf-8'))
    assert len(first) == 64 and again == first
    for said, line in ((moved, 'round 1 is asked for, but this site has answered round 1 (answers so far: 1'),
                       (beyond, 'round 2 is asked for, but the plan has 1')): assert line in said, said

@pytest.mark.slow
@unix
@pytest.mark.skipif(not os.environ.get('FEDLIT_RAY'), reason='ray takes a minute and more; FEDLIT_RAY=1 runs it')
def test_flwr_run_on_the_simulation_engine(tmp_path):
    prepare.certificates(tmp_path/'keys')
    task, parts = prepare.split(tmp_path, 5)
    with deploy.Deployment(tmp_path) as d:
        d.superlink(simulation=True)
        printed = d.run(APP, '--federation-config', 'num-supernodes=5 client-resources-num-cpus=1', rounds=2,
                        wait=300., timeout=300., sites=str(tmp_path/'sites'), test=str(tmp_path/'test.safetensors'))
    five_supernodes_reach_the_accuracy_of_the_simulation(task, parts, printed, Run.load(tmp_path/'global.safetensors'))

@pytest.mark.parametrize('change', [{'clients': 10**9}, {'rounds': 10**9},
                                    {'clients': 10**9, 'local.epochs': 'Between(1, 3)'},
                                    {'rounds': 10**9, 'local.lr': 'Decay(.1, .99)'}, {'model.hidden': str((8,)*10**4)}])
def test_a_run_config_cannot_keep_a_site_busy(home, change):
    began = time.process_time()
    try: ff.read_plan({**home[2], 'model.name': 'mlp', **change}, allowed=(100, 5e8))
    except ValueError as e: assert 'layers' in str(e)
    assert time.process_time() - began < 30
