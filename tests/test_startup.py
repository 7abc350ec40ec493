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
    code = ("import fedlit.run, fedlit.data, fedlit.models, fedlit.partition, fedlit.figure\n"
            "from fedlit.data import load\n"
            "from fedlit.models import build\n"
            "build('mlp', load('digits'))")
    assert loaded(code, 'torch', *HEAVY) == ['torch']

def test_a_federation_makes_no_table_until_it_is_asked_for():
    code = ("import torch\n"
            "from fedlit.data import Task\n"
            "from fedlit.methods import FedAvg\n"
            "from fedlit.models import build\n"
            "from fedlit.run import federate\n"
            "x, y = torch.randn(8, 1, 8, 8), torch.arange(8)%2\n"
            "task = Task('own', x, y, x, y, classes=2)\n"
            "run = federate(build('mlp', task), task, [range(4), range(4, 8)], FedAvg(), rounds=2, progress=False)\n")
    assert loaded(code, 'pandas') == []
    assert loaded(code + "assert run.history['round'].tolist() == [1, 2]", 'pandas') == ['pandas']

WRONG = ('run --rounds x', 'run --alpha -1', 'run --clients 0', 'run --from nofile', 'run --partition idd',
         'run --record x', 'nothing', 'run --record graph --device cpu', 'check nofile.py')

def test_a_wrong_argument_is_told_without_torch():
    code = (f"from fedlit.cli import main\nfor words in {WRONG!r}:\n    try: main(words.split())\n"
            "    except SystemExit as e: assert e.code, words\n    else: raise AssertionError(words)")
    assert loaded(code, 'torch', 'numpy', 'pandas', *HEAVY) == []

@pytest.mark.parametrize('argv, said', [
    (['run', '--method', 'FedFoo()'], 'no method is called'), (['run', '--executor', 'torchrun:vamp'], 'vamp'),
    (['run', '--method', 'FedDecor()'], 'did you mean FedDecorr'), (['run', '--data', 'digit'], 'did you mean digits'),
    (['run', '--model', 'resnet19'], 'resnet18'), (['run', '--data', 'cifar11'], 'cifar10'),
    (['run', '--optimizer', 'SDG'], 'SGD'), (['run', '--method', 'MOON(muu=1)'], "did you mean 'mu'"),
    (['run', '--lr', 'Decay(-1, .5)'], '--lr takes'), (['compare', '--methods', 'Ditto(mu=1)'], 'Ditto'),
    (['reproduce', 'all', 'moon/fig99'], 'moon/fig'), (['report', 'nothing'], 'nothing')], ids=str)
def test_what_is_misspelt_is_told_before_data_are_loaded(argv, said, monkeypatch, capsys):
    from fedlit import cli, data
    monkeypatch.setattr(data, 'load', lambda *a, **kw: pytest.fail('data were loaded'))
    with pytest.raises(SystemExit) as e: cli.main(argv)
    assert said in f'{e.value} {capsys.readouterr().err}'

def refused(code):
    with pytest.raises((ValueError, TypeError, OSError)) as e: code()
    return str(e.value)

def test_the_command_line_says_the_same_of_a_value_as_a_file_does():
    from fedlit.cli import _names, parser
    from fedlit.parse import local
    for k in 'lr', 'epochs', 'steps', 'optimizer':
        a = parser().parse_args(['run', f'--{k}', 'Adam(foo=1)'])
        assert refused(lambda a=a: _names(a)) == refused(lambda k=k: local(**{k: 'Adam(foo=1)'}))

def test_files_are_told_in_the_same_words():
    from fedlit import cli, laws
    for path in 'nofile.py', './no/file.py', 'tests': # of these only files are imported
        asked = cli.parser().parse_args(['check', path])
        assert refused(lambda a=asked: cli.check(a)) == refused(lambda path=path: laws.import_file(path))

def test_digits_are_those_of_scikit_learn(monkeypatch):
    from sklearn.datasets import load_digits
    import fedlit.data as data
    ours, theirs = data._digits_table(), load_digits()
    assert (torch.equal(ours[:, :64], torch.tensor(theirs.data))
            and torch.equal(ours[:, 64].long(), torch.tensor(theirs.target)))
    monkeypatch.setattr(data.Path, 'exists', lambda self: False) # a scikit-learn that keeps its file elsewhere
    assert torch.equal(data._digits_table(), ours)
