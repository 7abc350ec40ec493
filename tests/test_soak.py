"Many rounds: memory and files stay flat, histories are whole, Ctrl-C leaves a run that goes on. FEDLIT_SOAK=1: 1,000."
import os, signal, statistics, subprocess, sys, time
import pytest
from fedlit.cli import main
from soak import soak
from test_files import content

ROUNDS = 1000 if os.environ.get('FEDLIT_SOAK') else 120
WARM = 60 # rounds until nearly every client has been there once, and is remembered

@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='memory is read from /proc')
def test_memory_is_flat_and_no_file_stays_open(tmp_path):
    run, seen = soak(ROUNDS, tmp_path/'c.safetensors')
    mib, files, _ = zip(*seen)
    assert run.history['round'].tolist() == list(range(1, ROUNDS+1)) and run.history['train_loss'].notna().all()
    assert statistics.median(mib[-WARM//2:]) < statistics.median(mib[WARM:WARM*3//2]) + 10, mib[::10]
    assert len(set(files[1:])) == 1, files
    assert sorted(f.name for f in tmp_path.iterdir()) == ['c.safetensors', 'c.safetensors.last']

def asked(file, rounds):
    return ['run', '--quiet', '--method', 'FedAvgM() + MOON()', '--partition', 'iid', '--clients', '100',
            '--participation', '.1', '--epochs', '1', '--rounds', str(rounds), '--evaluate-every', '10',
            '--checkpoint', str(file)]

@pytest.mark.slow
@pytest.mark.skipif(os.name == 'nt', reason='Windows has no SIGINT for one process')
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, capsys):
    file = tmp_path/'c.safetensors'
    # what runs in the background ignores the signal
    heard = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler)'
    child = subprocess.Popen([sys.executable, '-c', f'{heard}; import torch; torch.set_num_threads(1); '
                              f'from fedlit.cli import main; main({asked(file, 100_000)!r})'],
                             stderr=subprocess.PIPE, text=True)
    try:
        while not file.exists():
            assert child.poll() is None, child.stderr.read()
            time.sleep(.01)
        time.sleep(.1)
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)[1]
        assert f'interrupted; {file} has the rounds that were finished' in said and child.returncode == 1
    finally: child.kill()
    at = content(file)[0]['round']
    rounds = 10*(at//10 + 2)
    main(asked(file, rounds))
    main(asked(tmp_path/'calm.safetensors', rounds))
    assert content(file) == content(tmp_path/'calm.safetensors') and content(file)[0]['round'] == rounds > at >= 1
