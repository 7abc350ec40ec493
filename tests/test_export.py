"""Trained networks for elsewhere: plain names, one client's own network as a file, a folder with a card, one upload.

The oracle is plain torch: the user's own class loads the tensors and gives the logits that the run gives."""
import json, re, sys
from pathlib import Path
from unittest.mock import create_autospec
import pytest, torch
from safetensors.torch import load_file
from torch import nn
from fedlit.data import Task, load
from fedlit.method import FedAvg
from fedlit.methods import APFL, Ditto, FedALA, FedDecorr, FedPer, FedPara, MOON, PerFedAvg
from fedlit.participation import RoundRobin
from fedlit.models import build, rebuild, wrap
from fedlit.partition import dirichlet
from fedlit.local import Local
from fedlit.result import Run
from fedlit.run import federate

DIGITS = load('digits')
TASK = Task('digits of mine', DIGITS.x_train, DIGITS.y_train, DIGITS.x_test, DIGITS.y_test, 10, mean=(.3,), std=(.4,),
            labels=tuple('zero one two three four five six seven eight nine'.split()))
CLIENTS = dirichlet(TASK.y_train, clients=4, alpha=.5, seed=0)

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.norm, self.fc = nn.BatchNorm1d(16), nn.Linear(16, 10)
    def forward(self, x): return self.fc(self.norm(self.stem(x)).relu())

def go(method=None, net=None, **kw):
    return federate(net or wrap(Mine(), 'fc'), TASK, CLIENTS, method or FedAvg(), 1, Local(epochs=1), progress=False,
                    **kw)

X = TASK.normalise(TASK.x_test)

@pytest.mark.parametrize('method,client', [(FedAvg(), None), (FedPer(), None), (FedPer(), 2), (MOON(), None)], ids=str)
def test_the_users_own_class_takes_the_state_and_the_file(method, client, tmp_path):
    run = go(method)
    state, fresh = run.state_dict(client), Mine().eval()
    assert list(state) == list(fresh.state_dict()) # the user's own names, in their order
    fresh.load_state_dict(state)
    assert torch.equal(fresh(X), run.logits(TASK.x_test, client))
    assert type(run.network(client)) is Mine and not run.network(client).training
    assert torch.equal(run.network(client)(X), fresh(X))
    state['fc.weight'].zero_()
    assert run.state_dict(client)['fc.weight'].abs().sum() > 0 # a copy
    fresh.load_state_dict(load_file(run.save_model(tmp_path/'m.safetensors', client)))
    assert torch.equal(fresh(X), run.logits(TASK.x_test, client))

def test_a_network_that_was_not_wrapped_keeps_its_names():
    run = go(net=build('mlp', TASK, seed=0))
    assert list(run.state_dict()) == list(build('mlp', TASK).state_dict())
    assert torch.equal(run.network()(X)[1], run.logits(TASK.x_test))

def test_a_clients_network_has_its_own_buffers_even_if_no_state_dict_has_them():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
            self.register_buffer('mean', torch.zeros(16), persistent=False)
        def forward(self, x):
            z = self.stem(x.flatten(1))
            if self.training: self.mean = self.mean*.5 + z.detach().mean(0)*.5
            z = (z - self.mean).relu()
            return z, self.head(z)
    run = go(Ditto(), Centred())
    assert not torch.equal(run.network(1).mean, run.network(2).mean)
    for client in (None, 1): assert torch.equal(run.network(client)(X)[1], run.logits(TASK.x_test, client))

def test_what_is_personal_is_not_in_the_servers_file(tmp_path):
    run = go(FedPer())
    heads = [run.state_dict(k)['fc.weight'] for k in range(4)]
    kept = load_file(run.save_model(tmp_path/'m.safetensors'))
    assert not any(torch.equal(kept['fc.weight'], h) for h in heads)
    run.to_folder(tmp_path/'f')
    assert {p.name for p in (tmp_path/'f').iterdir()} == {'model.safetensors', 'config.json', 'README.md'}
    assert torch.equal(load_file(tmp_path/'f'/'model.safetensors')['fc.weight'], kept['fc.weight'])

def test_tied_weights_are_written_twice(tmp_path):
    class Tied(Mine):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(16, 10)
            self.other.weight = self.fc.weight
    run = go()
    run.model = wrap(Tied(), 'fc')
    assert {'fc.weight', 'other.weight'} <= set(load_file(run.save_model(tmp_path/'m.safetensors')))

def test_methods_that_change_the_network_in_use():
    run = go(FedPara(), net=build('mlp', TASK, seed=0))
    net = run.network()
    assert torch.equal(net(X)[1], run.logits(TASK.x_test)) and list(net.state_dict()) == list(run.state_dict())

@pytest.mark.parametrize('net', [None, build('mlp', TASK, seed=0, hidden=(8,))], ids=['own', 'built'])
def test_the_code_of_the_card_runs(tmp_path, net, monkeypatch):
    run = go(MOON() + FedDecorr(floor=.1), net)
    run.to_folder(tmp_path)
    card = (tmp_path/'README.md').read_text(encoding='utf-8')
    code, = re.findall(r'```python\n(.*?)```', card, re.S)
    monkeypatch.chdir(tmp_path)
    names = dict(Mine=Mine)
    exec(code.replace('from mine import Mine\n', ''), names)
    x = names['prepare'](TASK.x_test)
    assert torch.equal(x, X)
    with torch.no_grad(): made = names['net'](x)
    assert torch.equal(made[1] if net else made, run.logits(TASK.x_test))
    config = json.loads((tmp_path/'config.json').read_text(encoding='utf-8'))
    assert config['input']['mean'] == [.3] and config['labels'][3] == 'three' and config['method'] == repr(run.method)

def test_the_card_says_what_was_done(tmp_path):
    run = go(FedPer(), metrics=dict(f1=lambda logits, y: .25))
    card = lambda client=None: (run.to_folder(tmp_path/'net', client)/'README.md').read_text(encoding='utf-8')
    whole = card()
    assert 'bytes divided' not in whole # digits are floats
    for word in ('FedPer(', 'digits of mine', '4 clients', '1 round', 'zero, one, two', 'f1', '0.250',
                 f"{run.last['accuracy']:.3f}"): assert word in whole, word
    assert 'client 2' in card(2) and 'trained on the data of client 2' in card(2)
    with pytest.raises(ValueError, match='client=9, but clients are 0 to 3'): card(9)
    with pytest.raises(ValueError, match='client=9'): run.save_model(tmp_path/'x', 9)
    assert not (tmp_path/'x').exists()

def test_the_card_is_one_that_the_hub_reads(tmp_path):
    hub = pytest.importorskip('huggingface_hub')
    run = go(metrics=dict(f1=lambda logits, y: .25))
    data = hub.ModelCard.load(run.to_folder(tmp_path)/'README.md').data
    assert data.library_name == 'fedlit' and 'federated-learning' in data.tags
    assert data.pipeline_tag == 'image-classification'
    seen = {r.metric_type: r.metric_value for r in data.eval_results}
    assert seen == pytest.approx({k: run.last[k] for k in ('accuracy', 'loss', 'f1')})

def test_one_call_uploads_the_folder(monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    api, seen = create_autospec(hub.HfApi, instance=True), {}
    api.upload_folder.side_effect = lambda **kw: seen.update(
        kw, files={p.name: p.read_bytes() for p in Path(kw['folder_path']).iterdir()})
    monkeypatch.setattr(hub, 'HfApi', lambda **kw: seen.update(api=kw) or api)
    run = go(FedPer())
    run.push_to_hub('me/digits', client=1, private=True, token='t')
    api.create_repo.assert_called_once_with('me/digits', private=True, exist_ok=True)
    assert seen['repo_id'] == 'me/digits' and seen['api'] == dict(token='t')
    assert set(seen['files']) == {'model.safetensors', 'config.json', 'README.md'}
    assert b'client 1' in seen['files']['README.md'] and b'# me/digits' in seen['files']['README.md']

def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(ImportError, match=r"push_to_hub needs huggingface_hub: pip install 'fedlit\[hub\]'"):
        go().push_to_hub('me/x')

def test_rebuild_is_what_load_does(tmp_path):
    net = build('mlp', TASK, seed=0, hidden=(8,))
    run = go(net=net)
    again = rebuild(run.settings['model'])
    again.load_state_dict(run.state_dict())
    assert torch.equal(again.eval()(X)[1], run.logits(TASK.x_test))
    run.save(tmp_path/'r')
    assert torch.equal(Run.load(tmp_path/'r').logits(TASK.x_test), run.logits(TASK.x_test))

@pytest.mark.parametrize('method', [PerFedAvg(), FedALA(), Ditto(), APFL()], ids=str)
def test_a_clients_own_network_is_the_one_it_uses(tmp_path, method):
    tests = [torch.arange(40*k, 40*k + 40) for k in range(4)]
    run = go(method, net=build('mlp', TASK, seed=0))
    right = (run.predict(TASK.x_test[40:80], client=1) == TASK.y_test[40:80]).float().mean().item()
    assert right == pytest.approx(run.per_client(TASK, tests)['personal'][1])
    state = run.state_dict(client=1)
    assert any(not torch.equal(v, state[k]) for k, v in run.state_dict().items())
    text = (run.to_folder(tmp_path, client=1)/'README.md').read_text(encoding='utf-8')
    assert 'model-index' not in text and 'own network of client 1' in text # the accuracy is the server's network's
    back = Run.load(run.save(tmp_path/'run'))
    if method in (PerFedAvg(), FedALA()):
        with pytest.raises(ValueError, match='from its samples, which no file has'): back.predict(TASK.x_test, client=1)

def test_the_card_says_who_takes_part(tmp_path):
    text = (go(participation=RoundRobin(.5)).to_folder(tmp_path)/'README.md').read_text(encoding='utf-8')
    assert '4 clients, 1 round, the clients of each by RoundRobin(share=0.5)' in text and 'model-index' in text

def test_the_card_counts_the_rounds_that_were_trained_and_names_who_never_was(tmp_path):
    run = go(participation=.004, without=(0, 2))
    run.settings['rounds'] = 9 # as of a run that was left early
    text = (run.to_folder(tmp_path)/'README.md').read_text(encoding='utf-8')
    assert '4 clients, 1 round, 0.4% of the clients in each, none of the clients 0, 2' in text
    assert json.loads((tmp_path/'config.json').read_text(encoding='utf-8'))['rounds'] == 1
