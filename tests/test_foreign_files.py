"Runs of other networks, names with slashes, long histories, and odd files with a right checksum."
import json, re, time
import numpy as np, pandas as pd, pytest, torch
from torch import nn
from fedlit.data import load
from fedlit.ground.files import read_tensors, write_tensors
from fedlit.methods import FedAvg, FedPara, FedPer, MOON
from fedlit.models import build, modest
from fedlit.partition import iid
from fedlit.result import BESIDE, FORMAT, LONG, Run
from fedlit.local import Local
from fedlit.run import federate
from test_files import forked, needs_fork

TASK = load('digits').subset(120, test=40)
CLIENTS = iid(TASK.y_train, 4, seed=0)
FAST = dict(local=Local(epochs=1), progress=False)

def net(seed=0, **kw): return build('mlp', TASK, seed=seed, hidden=(8,), features=8, **kw)

class Named(nn.Module):
    "One network under names of one's own."
    def __init__(self, body='body', head='head', norm=False, more=False, width=8):
        super().__init__()
        self.parts = nn.ModuleDict({body: nn.Linear(64, width), head: nn.Linear(width, 10)})
        self.names = body, head
        if norm: self.norm = nn.BatchNorm1d(width)
        if more: self.more = nn.Linear(2, 2)
    def forward(self, x):
        z = self.parts[self.names[0]](x.flatten(1)).relu()
        if hasattr(self, 'norm'): z = self.norm(z)
        return z, self.parts[self.names[1]](z)

# ---- other names ----

@pytest.mark.parametrize('other, said', [
    (dict(body='trunk'), 'has no parts.trunk.bias, parts.trunk.weight for this Named, but parts.body.bias'),
    (dict(head='top'), 'parts.top'), (dict(norm=True), 'has no norm.bias'), (dict(more=True), 'has no more.bias'),
    (dict(width=9), r'parts.body.weight of this Named has the shape \(9, 64\), but in the run it is \(8, 64\)')])
def test_a_run_is_not_put_into_another_network(tmp_path, other, said):
    run = federate(Named(), TASK, CLIENTS, FedAvg(), 1, **FAST)
    run.save(tmp_path/'r.st')
    with pytest.raises(ValueError, match=f'^(?!.*no run).*{said}'):
        Run.load(tmp_path/'r.st', model=Named(**other))
    with pytest.raises(ValueError, match=said): run.put_into(Named(**other))
    assert Run.load(tmp_path/'r.st').model is None # a network of the user's needs the network to load
    back = Run.load(tmp_path/'r.st', model=Named())
    assert torch.equal(back.model(TASK.x_test)[1], run.model(TASK.x_test)[1])

def test_a_network_that_lacks_a_part_of_the_run_is_refused(tmp_path):
    federate(Named(norm=True), TASK, CLIENTS, FedAvg(), 1, **FAST).save(tmp_path/'r.st')
    with pytest.raises(ValueError, match='the run has norm.bias, norm.num_batches_tracked, norm.running_mean and more'):
        Run.load(tmp_path/'r.st', model=Named())

@pytest.mark.parametrize('method', [FedAvg(), FedPara(), FedPer() + MOON()], ids=repr)
def test_a_run_comes_back_with_its_own_network(tmp_path, method):
    run = federate(net(norm='batch'), TASK, CLIENTS, method, 1, **FAST)
    run.save(tmp_path/'r.st')
    assert torch.equal(Run.load(tmp_path/'r.st').model(TASK.x_test)[1], run.model(TASK.x_test)[1])

def test_a_buffer_that_no_state_dict_has_comes_back(tmp_path):
    class Own(Named):
        def __init__(self, scale=1.):
            super().__init__()
            self.register_buffer('scale', torch.tensor(scale), persistent=False)
        def forward(self, x): return super().forward(x*self.scale)
    run = federate(Own(2.), TASK, CLIENTS, FedAvg(), 1, **FAST)
    run.save(tmp_path/'r.st')
    assert torch.equal(Run.load(tmp_path/'r.st', model=Own()).model(TASK.x_test)[1], run.model(TASK.x_test)[1])

# ---- slashes ----

@pytest.mark.parametrize('names', [('a/b', 'top'), ('a', 'a/b'), ('~1', '/'), ('a/', '//~0~1')])
@pytest.mark.parametrize('method', [FedAvg(), MOON()], ids=repr)
def test_a_slash_in_a_name_survives_saving(tmp_path, names, method):
    ask = lambda rounds, **kw: federate(Named(*names), TASK, CLIENTS, method, rounds, seed=1, **FAST, **kw)
    torch.manual_seed(0)
    whole = ask(2)
    whole.save(tmp_path/'r.st')
    back = Run.load(tmp_path/'r.st', model=Named(*names))
    assert torch.equal(back.model(TASK.x_test)[1], whole.model(TASK.x_test)[1])
    torch.manual_seed(0)
    ask(1, checkpoint=tmp_path/'c')
    torch.manual_seed(0)
    assert all(torch.equal(v, whole.state.params[k]) for k, v in ask(2, checkpoint=tmp_path/'c').state.params.items())

# ---- long histories ----

@pytest.mark.slow
def test_a_long_history_does_not_outgrow_the_header(tmp_path):
    run = federate(net(), TASK, CLIENTS, FedAvg(), 1, **FAST)
    assert len(read_tensors(run.save(tmp_path/'short.st'), FORMAT)[0]['history']) == 1  # as ever
    row = dict(run.history.iloc[0], bad=20_000, bad_clients=' '.join(map(str, range(20_000))))
    run.history = pd.DataFrame([dict(row, round=r+1) for r in range(1000)])     # 110 million characters
    header, _ = read_tensors(run.save(tmp_path/'long.st'), FORMAT)
    assert header['history'] == BESIDE
    back = Run.load(tmp_path/'long.st').history
    assert len(back) == 1000 and back['bad_clients'].iloc[-1] == row['bad_clients'] and back['round'].iloc[-1] == 1000

def test_a_run_goes_on_from_a_long_history(tmp_path, monkeypatch):
    monkeypatch.setattr('fedlit.result.LONG', 10)
    ask = lambda rounds, **kw: federate(net(), TASK, CLIENTS, FedAvg(), rounds, **FAST, **kw)
    ask(2, checkpoint=tmp_path/'c')
    assert read_tensors(tmp_path/'c', FORMAT)[0]['history'] == BESIDE and LONG > 10
    run, whole = ask(3, checkpoint=tmp_path/'c'), ask(3)
    assert run.history['accuracy'].tolist() == whole.history['accuracy'].tolist() and len(run.history) == 3

# ---- a right checksum, and odd content ----

@pytest.fixture(scope='module')
def good(tmp_path_factory):
    run = federate(net(), TASK, CLIENTS, FedPer() + MOON(), 1, participation=.5, **FAST)
    return read_tensors(run.save(tmp_path_factory.mktemp('good')/'r.st'), FORMAT)

JUNK = None, True, -1, 0, 2**70, 1.5, float('nan'), 'x', '', [], {}, [[]], [None], [1, 'a'], {'a': None}, ['params/x']

def changed(header, rng):
    "A header with one entry of another kind, or without it; and the same one or two levels down."
    place, path = header, []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        k = keys[rng.integers(len(keys))]
        path.append(k)
        if isinstance(place[k], (dict, list)) and len(place[k]) and rng.random() < .6: place = place[k]
        else: break
    if rng.random() < .2: del place[k]
    else: place[k] = JUNK[rng.integers(len(JUNK))]
    return path

def damaged(tensors, rng):
    "Tensors of which one lacks, or has another shape or type."
    k = sorted(tensors)[rng.integers(len(tensors))]
    v = tensors.pop(k)
    change = [lambda: {}, lambda: {k: v[:0] if v.ndim else v[None]}, lambda: {k: v.double()*1.5},
              lambda: {k: torch.stack([v, v])}, lambda: {k: v.flatten()[:3]}, lambda: {k + '/deep': v},
              lambda: {k: v, 'params/new': v}]
    return {**tensors, **change[rng.integers(len(change))]()}

def outcome(path):
    "What reading says: the error, which must be one that names the file; '' where it is taken."
    try: run = Run.load(path)
    except ValueError as e:
        assert path.name in str(e) and '\n' not in str(e) and len(str(e)) < 1500, e
        return str(e)
    repr(run)
    if run.model is not None: run.model(TASK.x_test)
    return ''

def test_odd_content_is_refused_by_name(tmp_path, good):
    "200 files that somebody made, each with a right checksum: a named error, or a run."
    rng, said = np.random.default_rng(0), []
    for n in range(200):
        header, tensors = json.loads(json.dumps(good[0])), {k: v.clone() for k, v in good[1].items()}
        path = tmp_path/f'{n}.st'
        what = changed(header, rng) if n % 3 else 'tensors'
        if what == 'tensors': tensors = damaged(tensors, rng)
        try: write_tensors(path, tensors, header)
        except (TypeError, ValueError, AttributeError): continue
        said.append((what, outcome(path)))
    refused = [s for _, s in said if s]
    assert len(said) > 180 and len(refused) > 100 and len(set(refused)) > 40

CRAFTED = {
    'history': dict(history=[1]), 'rows': dict(history={'a': 1}), 'round': dict(round='x'), 'rounds': dict(round=-1),
    'clients': dict(clients=10**15), 'none': dict(clients=0), 'names': dict(order=['params/none']),
    'twice': dict(order=['params/head.bias']*2), 'elsewhere': dict(order=['secret/x']), 'tables': dict(tables=['x']),
    'settings': dict(settings=[]), 'method': dict(method=3), 'unknown': dict(method='Nothing()'),
    'deep': dict(method='('*3000 + 'FedAvg()' + ')'*3000), 'classes': dict(classes={'A': 3}),
    'format': dict(format='x')}

@pytest.mark.parametrize('odd', CRAFTED)
def test_crafted_headers(tmp_path, good, odd):
    write_tensors(tmp_path/'odd.st', good[1], {**good[0], **CRAFTED[odd]})
    assert outcome(tmp_path/'odd.st')

@needs_fork
def test_a_small_file_asks_for_little_memory(tmp_path, good):
    "Bombs: a network, a sample, a history, factors that are small in the file and huge outside."
    header, tensors = good
    spec = header['settings']['model']
    def with_model(**kw): return {**header, 'settings': {**header['settings'], 'model': {**spec, **kw}}}
    wide = {f'params/big.{k}': torch.ones(60_000, 1) for k in ('X1', 'Y1', 'X2', 'Y2')}
    bombs = dict(
        network=(tensors, with_model(options=dict(hidden=[30_000, 30_000]))),
        layers=(tensors, with_model(options=dict(hidden=[1]*10**6))),
        sample=(tensors, with_model(name='small_cnn', shape=[3, 60_000, 60_000], options={})),
        classes=(tensors, with_model(classes=10**9)),
        history=(tensors, {**header, 'history': [{str(k): 1} for k in range(60_000)]}),
        clients=(tensors, {**header, 'clients': 10**10}),
        factors=({**tensors, **wide}, {**header, 'method': 'FedPara()', 'order': [*header['order'], *wide]}))
    for name, (held, told) in bombs.items(): write_tensors(tmp_path/f'{name}.st', held, told)
    def cramped():
        import resource
        for name in bombs:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert 'that fedlit can read' in outcome(tmp_path/f'{name}.st'), name
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)/1024
            assert grown < 300, (name, grown)
        assert time.process_time() < 60
    assert forked(cramped) == 0

def test_the_good_file_is_good(tmp_path, good):
    write_tensors(tmp_path/'good.st', good[1], good[0])
    assert outcome(tmp_path/'good.st') == '' and re.fullmatch('MOON.*|FedPer.*', good[0]['method'])

def test_a_network_of_countless_layers_is_not_begun(tmp_path):
    began = time.process_time()
    with pytest.raises(ValueError, match='more than 10000 layers'), modest():
        build('resnet18', TASK, seed=0, depths=(10**9, 1, 1, 1))
    assert time.process_time() - began < 30
    with modest(): build('mlp', TASK, seed=0)
