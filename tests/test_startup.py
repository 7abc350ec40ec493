"What is imported late, so that a short job does not wait for it."
import subprocess, sys
import pytest, torch

HEAVY = 'matplotlib', 'sklearn', 'scipy', 'torchvision', 'torch._dynamo', 'sympy', 'IPython'

def loaded(code, *names):
    "Which modules of `names` a fresh process has after `code`."
    code += f"\nimport sys; print('loaded', *[n for n in {names!r} if n in sys.modules])"
    return subprocess.run([sys.executable, '-c', code],
                          capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()[1:]

@pytest.mark.parametrize('code', [
    'import fedlit', "from fedlit.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"])
def test_help_does_without_torch(code):
    assert loaded(code, 'torch', 'numpy', 'pandas', 'fastcore', *HEAVY) == []

def test_a_short_job_imports_little():
    code = ("import fedlit.run, fedlit.data, fedlit.models, fedlit.partition\n"
            "from fedlit.data import load\n"
            "from fedlit.models import build\n"
            "build('mlp', load('digits'))")
    assert loaded(code, 'torch', *HEAVY) == ['torch']

@pytest.mark.parametrize('argv', [
    ['run', '--method', 'FedFoo()'], ['run', '--method', 'MOON(mu=', '--quiet'], ['run', '--method', 'MOON(mu=x)'],
    ['compare', '--methods', 'FedFoo()', 'FedAvg()'], ['interactions', 'FedFoo()', 'MOON()'],
    ['run', '--rounds', 'x'], ['run', '--alpha', '-1'], ['run', '--clients', '0'], ['run', '--from', 'nofile'],
    ['run', '--partition', 'idd'], ['run', '--executor', 'torchrun:vamp'], ['run', '--record', 'x'], ['nothing'],
    ['run', '--model', 'resnet19'], ['run', '--data', 'cifar11'],
    ['run', '--lr', 'fast'], ['run', '--optimizer', 'SDG'], ['run', '--participation', 'Sometimes(.1)'],
    ['compare', '--data', 'nothing'], ['interactions', 'MOON()', 'FedProx()', '--model', 'nothing']], ids=' '.join)
def test_a_wrong_argument_is_told_without_torch(argv):
    code = f"from fedlit.cli import main\ntry: main({argv!r})\nexcept SystemExit as e: assert e.code"
    assert loaded(code, 'torch', 'numpy', 'pandas', *HEAVY) == []

def test_the_names_of_methods_are_known_without_their_code():
    from fedlit.data import datasets
    from fedlit.models import models
    from fedlit.parse import known, listed, values
    assert sorted(listed()) == sorted(known()) and sorted(listed('values')) == sorted(values())
    from fedlit.round import EXECUTORS
    assert sorted(listed('models')) == models() and sorted(listed('datasets')) == datasets()
    assert listed('executors') == ['auto', *EXECUTORS, 'torchrun']

def test_digits_are_those_of_scikit_learn(monkeypatch):
    from sklearn.datasets import load_digits
    import fedlit.data as data
    ours, theirs = data._digits_table(), load_digits()
    assert (torch.equal(ours[:, :64], torch.tensor(theirs.data))
            and torch.equal(ours[:, 64].long(), torch.tensor(theirs.target)))
    monkeypatch.setattr(data.Path, 'exists', lambda self: False) # a scikit-learn that keeps its file elsewhere
    assert torch.equal(data._digits_table(), ours)
