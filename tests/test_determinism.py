"The same seed, machine and executor give the same bits: twice, in another process, with deterministic algorithms."
import hashlib, json, os, subprocess, sys
import pytest, torch
from fedlit.data import Crop, load
from fedlit.methods import FedAvgM, FedDecorr, HeteroFL, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.partition import iid
from fedlit.local import Local
from fedlit.run import federate
from fedlit.ground.tree import flatten
from fedlit.cli import main
from dataclasses import replace

CASES = dict(loop=FedAvgM() + MOON() + FedDecorr(),
             threads=MOON() + SCAFFOLD(),
             vmap=FedAvgM() + MOON() + FedDecorr(),
             extract=HeteroFL(rates=(1., .5)))

def bits(executor):
    "A digest of all that a small run leaves: every tensor of its state, and its history without the clock."
    torch.set_num_threads(2 if executor == 'threads' else 1)
    task = replace(load('digits').subset(200, test=50), augment=(Crop(padding=1),))
    net = build('mlp', task, seed=0, hidden=(16,), features=16, norm='batch')
    run = federate(net, task, iid(task.y_train, 4, seed=0), CASES[executor], 2, Local(batch_size=16), .75, seed=3,
                   executor=executor, progress=False)
    s, seen = run.state, hashlib.sha256()
    for k, v in flatten(dict(params=s.params, buffers=s.buffers, server=s.server,
                             client=s.client, personal=s.personal)).items():
        v = v if isinstance(v, torch.Tensor) else v[:] # what clients remember is a Table
        seen.update(k.encode() + v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashlib.sha256(seen.digest() + run.history.drop(columns=['seconds', 'peak_mb'])
                          .to_json(double_precision=15).encode()).hexdigest()

@pytest.fixture(scope='module')
def here(): return {e: bits(e) for e in CASES}

@pytest.mark.parametrize('executor', CASES)
def test_a_run_is_the_same_to_the_bit(executor, here):
    assert bits(executor) == here[executor]

def test_and_in_another_process(here):
    "Another process has other addresses, other hashes of strings, and another history of random numbers."
    code = ('import json, torch; torch.rand(7); from test_determinism import CASES, bits; '
            'print(json.dumps({e: bits(e) for e in reversed(CASES)}))')
    done = subprocess.run([sys.executable, '-c', code], cwd=os.path.dirname(__file__),
                          env={**os.environ, 'PYTHONHASHSEED': '7'}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == here

def test_the_switch_for_gpus_changes_nothing_on_a_cpu(here):
    torch.use_deterministic_algorithms(True)
    try: assert {e: bits(e) for e in CASES} == here
    finally: torch.use_deterministic_algorithms(False)

def test_the_command_line_has_the_switch(monkeypatch, capsys):
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    try:
        main(['run', '--quiet', '--deterministic', '--rounds', '1', '--epochs', '1', '--clients', '2',
              '--train-samples', '100'])
        assert torch.are_deterministic_algorithms_enabled() and os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    finally: torch.use_deterministic_algorithms(False)

def test_another_seed_is_another_run(here):
    "A digest that never changes would pass everything above."
    assert len(set(here.values())) == len(CASES)
