"What is imported late, so that a short job does not wait for it."
import subprocess, sys
from dataclasses import fields
import pytest, torch
from fedlit.engine.messages import _kind

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

@pytest.mark.parametrize('argv', [
    ['run', '--method', 'FedFoo()'], ['run', '--method', 'MOON(mu=', '--quiet'], ['run', '--method', 'MOON(mu=x)'],
    ['compare', '--methods', 'FedFoo()', 'FedAvg()'], ['interactions', 'FedFoo()', 'MOON()'],
    ['run', '--rounds', 'x'], ['run', '--alpha', '-1'], ['run', '--clients', '0'], ['run', '--from', 'nofile'],
    ['run', '--partition', 'idd'], ['run', '--executor', 'torchrun:vamp'], ['run', '--record', 'x'], ['nothing'],
    ['run', '--model', 'resnet19'], ['run', '--data', 'cifar11'],
    ['run', '--lr', 'fast'], ['run', '--optimizer', 'SDG'], ['run', '--participation', 'Sometimes(.1)'],
    ['compare', '--data', 'nothing'], ['interactions', 'MOON()', 'FedProx()', '--model', 'nothing'],
    ['run', '--method', 'FedAvg() + MOON(muu=1)'], ['run', '--method', 'MOON(mu=True)'],
    ['run', '--method', 'MOON(1, 2, 3, 4, 5, 6)'], ['compare', '--methods', 'Ditto(mu=1)'],
    ['run', '--lr', 'Milestones'], ['run', '--lr', 'Warmup(Decay(.1), 5)'], ['run', '--optimizer', 'Adam(foo=1)'],
    ['run', '--participation', 'BySize(.1, rows=1)'], ['run', '--record', 'graph', '--device', 'cpu'],
    ['reproduce', 'nothing'], ['reproduce', 'all', 'moon/fig99'], ['report', 'nothing'], ['check', 'nofile.py']],
    ids=' '.join)
def test_a_wrong_argument_is_told_without_torch(argv):
    code = f"from fedlit.cli import main\ntry: main({argv!r})\nexcept SystemExit as e: assert e.code"
    assert loaded(code, 'torch', 'numpy', 'pandas', *HEAVY) == []

def refused(code):
    with pytest.raises((ValueError, TypeError, OSError)) as e: code()
    return str(e.value)

@pytest.mark.parametrize('text', [
    'MOON(muu=1)', 'MOON(mu=True)', 'MOON(1, 2, 3, 4, 5, 6)', 'MOON(1, mu=2)', 'FedRep(neckk=1)', 'FedYogi("a")',
    'FedAvg(mu=1)', 'Quantize(bits=2.5)', 'FedDSE(widths=1, x=2)'])
def test_a_method_says_the_same_of_its_arguments_before_it_is_imported(text):
    from fedlit.parse import method
    assert refused(lambda: method(text, spelling=True)) == refused(lambda: method(text))

@pytest.mark.parametrize('text', [
    'Milestones', 'Milestones(.1)', 'Adam(foo=1)', 'adamw(1, 2, 3, 4)', 'Available(a=1)', 'Warmup(Decay(.1), 5)',
    'PowerOfChoice(.1, share=.1)', 'SGD(lr=1)'])
def test_a_value_says_the_same_of_its_arguments_before_it_is_imported(text):
    from fedlit.parse import value
    assert refused(lambda: value(text, spelling=True)) == refused(lambda: value(text))

def test_the_command_line_says_the_same_of_a_value_as_a_file_does():
    from fedlit.cli import _names, parser
    from fedlit.parse import local
    for k in 'lr', 'epochs', 'steps', 'optimizer':
        a = parser().parse_args(['run', f'--{k}', 'Adam(foo=1)'])
        assert refused(lambda a=a: _names(a)) == refused(lambda k=k: local(**{k: 'Adam(foo=1)'}))

def test_what_a_class_judges_is_left_to_it():
    from fedlit.parse import method, value
    for text in 'MOON(mu=-1)', 'MOON(mu=inf)', 'FedAvgM() + FedAdam()': assert method(text, spelling=True) is None
    for text in 'Decay(-1, .5)', 'BySize(2)', 'Adam(betas=3)': assert value(text, spelling=True) is None

def test_the_parameters_of_every_class_are_known_without_its_code():
    from inspect import signature
    from fedlit.parse import _outline, known, values
    bare = lambda cls: [(p.name, p.kind, p.default) for p in signature(cls).parameters.values()]
    for name, cls in {**known(), **values()}.items():
        assert (outline := _outline(name)) and bare(outline) == bare(cls), name
        assert {f.name: _kind(f) for f in fields(outline)} == {f.name: _kind(f) for f in fields(cls)}, name

def test_what_every_class_prints_is_taken_before_it_is_imported():
    from fedlit.parse import known, method
    for cls in known().values(): assert method(repr(cls()), spelling=True) is None

def test_a_class_of_which_more_would_have_to_be_known_has_no_outline(monkeypatch):
    from fedlit import parse
    def outline(text):
        monkeypatch.setattr(parse, '_texts', lambda *_: [text])
        return parse._outline.__wrapped__('A')
    whole = 'class A(Method):\n    b: int = 1\n    c: float = field(default=.5)'
    assert [f.name for f in fields(outline(whole))] == ['b', 'c']
    for text in ('class A(Method):\n    b: int = N', 'class A(Method):\n    def __init__(self, b): pass',
                 'class A(B): pass', 'class A(Method, key=1): pass', '@dataclass\nclass A(Method): pass', 'import A'):
        assert outline(text) is None, text

def test_entries_and_files_are_told_in_the_same_words(monkeypatch):
    from fedlit import cli, laws
    from fedlit.papers.catalogue import entries
    from fedlit.papers.entries import CATALOGUE
    from fedlit.parse import listed
    assert sorted(listed('entries')) == sorted(CATALOGUE)
    for asked in ['nothing'], ['all', 'moon/fig99'], ['moon', 'collapse', 'feddecorr/tabel1'], ['x'*40]:
        assert refused(lambda asked=asked: cli._known(asked)) == refused(lambda asked=asked: entries(*asked))
    cli._known(['all', 'moon', 'collapse', 'feddse/fig3.2'])
    for path in 'nofile.py', './no/file.py', 'tests': # of these only files are imported
        assert refused(lambda path=path: cli._there(path)) == refused(lambda path=path: laws.imported(path))

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
