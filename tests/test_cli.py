"The command line: what it runs, what it says is wrong, and that its help does not load PyTorch."
import json, subprocess, sys
import pytest
from fedlit.cli import main
from fedlit.methods import FedDecorr, MOON
from fedlit.run import Run
from conftest import DATA

@pytest.mark.parametrize('args,word', [
    (['--method', 'FedDecor()'], 'did you mean FedDecorr'),
    (['--data', 'digit'], 'did you mean digits'),
    (['--rounds', '0'], 'rounds=0'),
    (['--alpha', '0'], 'alpha'),
    (['--clients', '5000'], '5000'),
    (['--data', 'cifar10', '--root', '/nowhere'], 'nowhere'),
    (['--model', 'mpl'], 'mlp'),
    (['--executor', 'x'], 'executor')])
def test_the_command_line_says_what_is_wrong(args, word):
    with pytest.raises(SystemExit, match=word): main(['run', '--quiet', '--rounds', '1', '--epochs', '1', *args])

@pytest.mark.filterwarnings('ignore:.*hardly vary')
def test_the_command_line(tmp_path, capsys):
    main(['run', '--quiet', '--rounds', '2', '--epochs', '1', '--method', 'MOON() + FedDecorr()',
          '--json', str(tmp_path/'r.json'), '--save', str(tmp_path/'r.safetensors')])
    assert (json.loads((tmp_path/'r.json').read_text())['history'][1]['round'] == 2
            and Run.load(tmp_path/'r.safetensors').method == MOON() + FedDecorr())
    main(['compare', '--quiet', '--rounds', '1', '--epochs', '1', '--methods', 'FedAvg()', 'FedProx()',
          '--seeds', '0', '1'])
    main(['list'])
    out = capsys.readouterr().out
    assert '±' in out and 'cifar10' in out and 'mobilenetv2' in out and 'FedDecorr(' in out

def test_help_is_quick_and_light():
    code = "import sys; from fedlit.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0

@pytest.mark.skipif(not (DATA/'cifar-10-batches-py').exists(), reason=f'no CIFAR-10 in {DATA}')
def test_cifar10_through_the_command_line(capsys):
    main(['run', '--quiet', '--data', 'cifar10', '--root', str(DATA), '--train-samples', '64', '--test-samples', '50',
          '--model', 'mobilenetv2', '--clients', '2', '--alpha', '0.5', '--rounds', '1', '--epochs', '1',
          '--batch-size', '64', '--method', 'FedDecorr()', '--evaluate-every', '5'])
    assert 'Run of FedDecorr' in capsys.readouterr().out
