"The benchmark's own code: equal work for its loop and for fedlit; results kept, redone and tabled as they should be."
import json
import numpy as np, pytest, torch
from bench import __main__ as bench, drive, peers, report, work
from bench.run_loop import run as loop
from bench.run_dataloader import run as dataloader
from bench.run_fedlit import local, run as fedlit
from fedlit.round import plan

TINY = dict(work.WORKLOADS['tiny'], rounds=2, warmup=1)

@pytest.fixture(scope='module')
def data(tmp_path_factory): return work.Data(work.write(TINY, tmp_path_factory.mktemp('data')))

def planned(task, data, round, k):
    "The batches that fedlit takes, for the loop."
    index, counts = plan([torch.as_tensor(p) for p in data.parts], [k], local(task), task['seed'], round)
    return [index[0, t, :n] for t, n in enumerate(counts[0].tolist())]

def test_same_order_same_parameters(data):
    ours, theirs = fedlit(TINY, data, {}), loop(TINY, data, {}, order=planned)
    assert ours['weights'].keys() == theirs['weights'].keys() == data.start.keys()
    for k, v in ours['weights'].items():
        assert not np.allclose(v, data.start[k])
        np.testing.assert_allclose(v, theirs['weights'][k], atol=1e-5, err_msg=k)

def test_same_order_for_the_convolutions():
    task = dict(work.WORKLOADS['W2'], images=80, clients=4, sampled=4, epochs=1, rounds=1, batch=8)
    arrays = work.make(task)
    small = work.Data.__new__(work.Data)
    small.x, small.y = arrays['x'].astype(np.float32)/255, arrays['y']
    small.parts = np.split(arrays['index'], np.cumsum(arrays['sizes'])[:-1])
    small.start = {k[6:]: v for k, v in arrays.items() if k.startswith('start/')}
    ours, theirs = fedlit(task, small, {}), loop(task, small, {}, order=planned)
    for k, v in ours['weights'].items(): np.testing.assert_allclose(v, theirs['weights'][k], atol=1e-5, err_msg=k)

def test_same_samples_and_near_losses(data):
    every = sum(map(len, data.parts))*TINY['epochs']
    outs = [f(TINY, data, {}) for f in (loop, dataloader, fedlit)]
    assert [o['samples'] for o in outs] == [every]*3
    assert all(len(o['seconds']) == TINY['rounds'] for o in outs)
    losses = [work.score(o['weights'], data)['train_loss'] for o in outs]
    before = work.score(data.start, data)['train_loss']
    assert max(losses) - min(losses) < .05 and max(losses) < before

def test_every_sample_has_one_client(data):
    assert sorted(np.concatenate(data.parts).tolist()) == list(range(len(data.y)))

def test_score_is_the_networks(data):
    from bench.nets import build
    net = build('mlp', data.start)
    logits, y = net(torch.from_numpy(data.x)), torch.from_numpy(data.y)
    assert (work.score(data.start, data)['train_loss']
            == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), abs=1e-5))

def contest(**more):
    done = dict(label='1 thread', env=dict(OMP_NUM_THREADS='1'), seconds=[.3, .1, .2], median=.15, total=2.,
                samples=400, peak_tree_mb=10., peak_self_mb=12., load_before=[0., 0., 0.], finite=True,
                train_loss=.5, test_accuracy=.9, **more)
    return dict(tries=[done], best=0, versions=dict(torch='1'))

def settings(c): return dict(work=work.WORKLOADS['tiny'], contender=c)

def test_results_are_kept(tmp_path):
    calls, path = [], tmp_path/'tiny-loop.json'
    work_done = lambda: calls.append(1) or contest()
    first, new = drive.case(path, settings('loop'), work_done)
    assert new and drive.case(path, settings('loop'), work_done) == (first, False) and len(calls) == 1
    assert drive.case(path, settings('loop'), work_done, again=True)[1] and len(calls) == 2
    assert drive.case(path, dict(settings('loop'), more=1), work_done)[1] and len(calls) == 3 # other settings
    assert [p.name for p in tmp_path.iterdir()] == [path.name]

def test_the_best_of_all_tries_counts():
    "Measured again, tries add up; other versions or another machine start anew."
    one = dict(machine='m', versions=dict(torch='2'), tries=[dict(median=2.), dict(error='no')], best=0)
    two = dict(one, tries=[dict(median=3.), dict(median=1.)], best=1)
    both = drive.joined(one, two)
    assert len(both['tries']) == 4 and both['tries'][both['best']]['median'] == 1.
    assert drive.joined(two, one)['best'] == 1
    for other in (dict(one, machine='n'), dict(one, versions={}), None): assert drive.joined(other, two) == two

@pytest.mark.parametrize('text', ['', '{"format": 1, "tri', '[]', '{"format": 0, "settings": {}}',
                                  '{"format": 1, "settings": {}, "error": "no network"}'])
def test_what_is_not_whole_is_measured_again(tmp_path, text):
    path = tmp_path/'x.json'
    path.write_text(text)
    seen, new = drive.case(path, {}, contest)
    assert new and drive.load(path) == seen

def test_interrupted_writing_leaves_the_old(tmp_path):
    path = tmp_path/'x.json'
    drive.save(path, dict(a=1))
    with pytest.raises(TypeError): drive.save(path, dict(a=object()))
    assert json.loads(path.read_text()) == dict(a=1)

def test_missing_peer_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, 'uv', lambda: ['/nowhere/uv'])
    monkeypatch.setattr(drive, 'write', lambda work, folder: tmp_path/'data.npz')
    monkeypatch.setattr(peers, 'environment', lambda name, make=peers.environment: make(name, tmp_path/'envs'))
    seen, new = drive.case(tmp_path/'tiny-flwr.json', settings('flwr'),
                           lambda: drive.contend('tiny', 'flwr', TINY, tmp_path))
    assert 'no environment for flwr' in seen['error'] and '/nowhere/uv' in seen['error']
    drive.case(tmp_path/'tiny-loop.json', settings('loop'), contest)
    text = report.table(tmp_path)
    assert 'Flower' in text and 'did not run: no environment for flwr' in text and 'plain PyTorch loop' in text

def test_a_failing_process_is_said(tmp_path):
    import sys
    seen, weights = drive.start(sys.executable, 'bench.no_such_module', dict(work={}, options={}))
    assert weights is None and 'no_such_module' in seen['error']

def test_table_and_figures_are_made_from_files(tmp_path):
    assert 'Nothing measured yet' in report.table(tmp_path)
    for c in ('loop', 'fedlit'): drive.case(tmp_path/f'tiny-{c}.json', settings(c), contest)
    odd = contest()
    odd['tries'][0].update(median=.3, test_accuracy=.5)
    drive.case(tmp_path/'tiny-pfl.json', settings('pfl'), lambda: odd)
    paths = report.write(tmp_path)
    text = paths[0].read_text()
    assert '| 0.15 (0.1 to 0.2) | 1.00 |' in text and '| 2.00 |' in text and 'ends -0.400 in test accuracy' in text
    assert [p.name for p in paths] == ['table.md', 'figure.svg'] and all(p.stat().st_size for p in paths)
    drive.case(tmp_path/'tiny-loop.json', dict(settings('loop'), x=1),
               lambda: dict(contest(), machine=dict(cpu='another', cores=1, system='x')))
    assert 'come from different machines' in report.table(tmp_path)

def test_only():
    assert bench.chosen('w1,FLWR'.lower(), False, 'cnn') == (['W1'], ['flwr'], {})
    assert bench.chosen('growth', False, 'cnn')[0] == ()
    assert bench.chosen(None, False, 'cnn')[0] == work.HEARD
    with pytest.raises(SystemExit): bench.chosen('nobody', False, 'cnn')

def test_turns_are_taken_by_the_round(monkeypatch):
    import pandas as pd
    from types import SimpleNamespace
    from bench import overheads
    monkeypatch.setattr(overheads, 'METHODS', dict(FedAvg=1, two=2, three=3))
    order = []
    def go(m, rounds):
        for r in range(1, rounds + 1):
            order.append(m)
            yield SimpleNamespace(
                history=pd.DataFrame(dict(seconds=[100.]*min(r, 2) + [float(m*s) for s in range(3, r + 1)],
                                          peak_mb=[7.]*r)),
                settings=dict(executor='loop'))
    seen = overheads.turns(dict(rounds=5, warmup=2), go, held=lambda: 4)
    assert order == [1, 2, 3, 2, 3, 1, 3, 1, 2, 1, 2, 3, 2, 3, 1] # everybody is first once in a while
    assert (seen['seconds']['two'] == [6, 8, 10] and seen['ratios']['three'] == [3, 3, 3]
            and seen['medians'] == dict(FedAvg=1, two=2, three=3))
    assert seen['added_mb'] == dict(FedAvg=3, two=3, three=3)

@pytest.mark.slow
def test_overheads_are_measured_and_shown(tmp_path):
    drive.case(tmp_path/'overheads-tiny.json', work.OVERHEADS['tiny'], lambda: bench.overhead(work.OVERHEADS['tiny']))
    seen = drive.load(tmp_path/'overheads-tiny.json')
    assert {len(s) for s in seen['seconds'].values()} == {2} and seen['threads'] == 1
    assert '| FedAvg again |' in report.table(tmp_path)

@pytest.mark.parametrize('what,names', [
    ('submodels', ['the small network alone', 'HeteroFL', 'FedDSE', 'FedGSE']),
    ('ragged', ['even, BatchNorm', 'ragged, BatchNorm', 'even', 'ragged'])])
def test_pairs_are_measured_and_shown(tmp_path, what, names):
    settings = dict(submodels=work.SUBMODELS, ragged=work.RAGGED)[what]['tiny']
    seen, _ = drive.case(tmp_path/f'{what}-tiny.json', settings, lambda: bench.pairs(settings, what))
    assert [r['name'] for r in seen['rows']] == names and {len(r['seconds']) for r in seen['rows']} == {2}
    assert all(r['without'] <= r['ratio'] for r in seen['rows']) and seen['rows'][0]['ratio'] == 1
    assert all((r['choosing'] > 0) == (r['executor'] == 'extract') for r in seen['rows'])
    assert f'| {names[1]} |' in report.table(tmp_path)

def test_gpu_data_and_counts(tmp_path):
    from bench import gpu
    from fedlit.models import wrap
    from bench.nets import build
    task, said = gpu.images(tmp_path, 12, 0)
    assert said.startswith('random') and task.x_train.shape == (12, 3, 32, 32) and len(task.augment) == 2
    np.savez(tmp_path/gpu.PART, x=np.full((20, 3, 32, 32), 7, np.uint8), y=np.zeros(20, np.int64))
    task, said = gpu.images(tmp_path, 12, 0)
    assert gpu.PART in said and len(task.x_train) == 12 and (task.x_train == 7).all()
    counts = gpu.traffic(wrap(build('mlp'), 'head'), (1, 8, 8), 32)
    assert counts['flops'] == 6*(64*128 + 128*64 + 64*10)
    moved = 64+64 + 64+128 + 128+128 + 128+64 + 64+64 + 64+10 # flatten, three layers, two ReLUs
    assert counts['activation_bytes'] == 3*4*moved
    bound = gpu.roofline(dict(flops=67e6, activation_bytes=1e6, step_bytes=0), 1e5, 'NVIDIA H200')
    assert bound['fraction']['fp32'] == pytest.approx(.1) and gpu.roofline(counts, 1, 'cpu') == dict(peaks=None)
