"The benchmark's own code: equal work for its loop and for fedlit; results kept, redone and tabled as they should be."
import json, sys, warnings
from types import SimpleNamespace
import numpy as np, pandas as pd, pytest, torch
from bench import __main__ as bench, drive, gpu, overheads, peers, report, work
from bench.nets import build
from bench.run_loop import run as loop
from bench.run_dataloader import run as dataloader
from bench.run_fedlit import local, run as fedlit
from fedlit.batches import plan
from fedlit.models import wrap

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
    path.write_text(text, encoding='utf-8')
    seen, new = drive.case(path, {}, contest)
    assert new and drive.load(path) == seen

def test_interrupted_writing_leaves_the_old(tmp_path):
    path = tmp_path/'x.json'
    drive.save(path, dict(a=1))
    with pytest.raises(TypeError): drive.save(path, dict(a=object()))
    assert json.loads(path.read_text(encoding='utf-8')) == dict(a=1)

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
    seen, weights = drive.start(sys.executable, 'bench.no_such_module', dict(work={}, options={}))
    assert weights is None and 'no_such_module' in seen['error']

def test_the_table_is_made_from_files(tmp_path):
    assert 'Nothing measured yet' in report.table(tmp_path)
    for c in ('loop', 'fedlit'): drive.case(tmp_path/f'tiny-{c}.json', settings(c), contest)
    odd = contest()
    odd['tries'][0].update(median=.3, test_accuracy=.5)
    drive.case(tmp_path/'tiny-pfl.json', settings('pfl'), lambda: odd)
    text = report.write(tmp_path).read_text(encoding='utf-8')
    assert '| 0.15 (0.1 to 0.2) | 1.00 |' in text and '| 2.00 |' in text and 'ends -0.400 in test accuracy' in text
    drive.case(tmp_path/'tiny-loop.json', dict(settings('loop'), x=1),
               lambda: dict(contest(), machine=dict(cpu='another', cores=1, system='x')))
    assert 'come from different machines' in report.table(tmp_path)

def test_uneven_clients_are_uneven():
    sizes = {w: work.make(work.WORKLOADS[w])['sizes'] for w in ('W1', 'W1u')}
    assert sizes['W1'].sum() == sizes['W1u'].sum() and sizes['W1u'].max() > sizes['W1'].max()
    assert sizes['W1u'].std() > sizes['W1'].std() and sizes['W1u'].min() >= 10

def test_only():
    assert bench.chosen('w1,FLWR'.lower(), False, 'cnn') == (['W1'], ['flwr'], {})
    assert bench.chosen('growth', False, 'cnn')[0] == ()
    assert bench.chosen(None, False, 'cnn')[0] == work.HEARD
    assert set(bench.chosen(None, False, 'cnn')[2]['product']) < set(work.PRODUCTS)
    with pytest.raises(SystemExit): bench.chosen('nobody', False, 'cnn')

def test_turns_are_taken_by_the_round(monkeypatch):
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
    drive.case(tmp_path/'overheads-tiny.json', work.OVERHEADS['tiny'],
               lambda: bench.alone('overheads', work.OVERHEADS['tiny'], options={}))
    seen = drive.load(tmp_path/'overheads-tiny.json')
    assert {len(s) for s in seen['seconds'].values()} == {2} and seen['threads'] == 1
    assert '| FedAvg again |' in report.table(tmp_path)

@pytest.mark.parametrize('what,names', [
    ('submodels', ['the small network alone', 'HeteroFL', 'FedDSE', 'FedGSE', 'FedDSE, 128 samples']),
    ('ragged', ['even, BatchNorm', 'ragged, BatchNorm', 'even', 'ragged'])])
def test_pairs_are_measured_and_shown(tmp_path, what, names):
    settings = dict(submodels=work.SUBMODELS, ragged=work.RAGGED)[what]['tiny']
    seen, _ = drive.case(tmp_path/f'{what}-tiny.json', settings,
                         lambda: bench.alone('pairs', settings, options=dict(what=what)))
    assert [r['name'] for r in seen['rows']] == names and {len(r['seconds']) for r in seen['rows']} == {2}
    assert all(r['without'] <= r['ratio'] for r in seen['rows']) and seen['rows'][0]['ratio'] == 1
    assert all((r['choosing'] > 0) == (r['executor'] == 'extract') for r in seen['rows'])
    assert f'| {names[1]} |' in report.table(tmp_path)

def test_gpu_data_and_counts(tmp_path):
    task, said = gpu.images(tmp_path, 12, 0)
    assert said.startswith('random') and task.x_train.shape == (12, 3, 32, 32) and len(task.augment) == 2
    np.savez(tmp_path/gpu.PART, x=np.full((20, 3, 32, 32), 7, np.uint8), y=np.zeros(20, np.int64))
    task, said = gpu.images(tmp_path, 12, 0)
    assert gpu.PART in said and len(task.x_train) == 12 and (task.x_train == 7).all()
    counts = gpu.traffic(wrap(build('mlp'), 'head'), (1, 8, 8), 32)
    assert counts['flops'] == 6*(64*128 + 128*64 + 64*10)
    moved = 64+64 + 64+128 + 128+128 + 128+64 + 64+64 + 64+10 # flatten, three layers, two ReLUs
    assert counts['activation_bytes'] == 3*4*moved
    bound = gpu.roofline(dict(flops=67e6, activation_bytes=1e6, fused_bytes=1e5, step_bytes=0), 1e5, 'NVIDIA H200')
    assert bound['fraction']['fp32'] == pytest.approx(.1) and gpu.roofline(counts, 1, 'cpu') == dict(peaks=None)

GPU_PIECES = ['fedlit-auto', 'pfl', 'fedlit-bfloat16', 'fedlit-compile', 'fedlit-compile-bfloat16', 'loop-1-workers',
              'overheads', 'fedlit-vmap', 'fedlit-loop', 'pfl-compile']

def gpu_run(out, *args):
    gpu.main(['--device', 'cpu', '--tiny', '--out', str(out), '--root', str(out), *args])
    return (out/'table.md').read_text(encoding='utf-8')

@pytest.fixture
def small(monkeypatch):
    "A network that takes a moment instead of MobileNetV2, and one process for the loop's data."
    monkeypatch.setattr(gpu, 'TINY', dict(gpu.TINY, net='cnn_bn'))
    monkeypatch.setattr(gpu, 'machine', lambda: dict(cpu='c', cores=1, system='s'))

seldom = [pytest.mark.slow, pytest.mark.long]

@pytest.mark.parametrize('name', [pytest.param(n, marks=seldom*('compile' in n)) for n in GPU_PIECES])
def test_gpu_piece_is_measured_and_shown(tmp_path, small, name):
    text, seen = gpu_run(tmp_path, '--only', name), drive.load(tmp_path/f'{name}.json')
    assert f'| {name}' in text or name == 'overheads' and '| FedAvg again |' in text
    assert '## Goals' in text and 'did not run' not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f'{name}.json', 'table.md']) # nothing left over
    if name != 'overheads': assert len(seen['seconds']) == seen['settings']['work']['rounds']
    if 'bfloat16' in name: assert seen['precision'] == 'bfloat16' and np.isfinite(seen['train_loss'])

@pytest.mark.slow
@pytest.mark.long
def test_gpu_tiny_is_mobilenet(tmp_path):
    assert 'MobileNetV2' in gpu_run(tmp_path, '--only', 'fedlit-auto,fedlit-bfloat16')

def test_gpu_piece_that_is_there_is_kept(tmp_path, capsys, small):
    gpu_run(tmp_path, '--only', 'fedlit-loop')
    first = (tmp_path/'fedlit-loop.json').read_text(encoding='utf-8')
    gpu_run(tmp_path, '--only', 'fedlit-loop')
    assert 'fedlit-loop: kept' in capsys.readouterr().out and (tmp_path/'fedlit-loop.json').read_text('utf-8') == first

def test_gpu_failing_piece_is_said_and_the_others_run(tmp_path, monkeypatch, small):
    def fails(*args, **kw): raise RuntimeError('no kernel')
    monkeypatch.setattr(gpu, 'plain', fails)
    text = gpu_run(tmp_path, '--only', 'loop-1-workers,fedlit-loop')
    assert 'loop-1-workers did not run: RuntimeError: no kernel' in text and '| fedlit-loop' in text

def test_gpu_warnings_are_shown(tmp_path, monkeypatch, small):
    def warns(*args, **kw):
        warnings.warn('a step cannot be compiled', stacklevel=1)
        return dict(seconds=[1., 1.], peak_device_mb=None)
    monkeypatch.setattr(gpu, 'plain', warns)
    assert 'loop-1-workers warned: a step cannot be compiled' in gpu_run(tmp_path, '--only', 'loop-1-workers')

def test_gpu_pfl_job_is_the_published_one():
    net = gpu.pfl_net(0)
    counts, job = gpu.pfl_counts(net, gpu.PFL), gpu.PFL
    assert counts['parameters'] == 1_626_442
    assert job['rounds']*job['users']*job['each']*counts['flops']/1e12 == pytest.approx(373, abs=.1)

def test_gpu_peaks_and_roofline():
    for v in gpu.PEAKS.values():
        assert v['fp32'] < v['tf32'] < v['bf16'] and v['bf16'] == 2*v['tf32'] and v['source']
    assert {'NVIDIA H200', 'NVIDIA H100 80GB HBM3', 'NVIDIA H100 PCIe', 'NVIDIA A100-SXM4-80GB'} <= gpu.PEAKS.keys()
    counts = dict(flops=1, activation_bytes=4e6, fused_bytes=1e6, step_bytes=0)
    bound = lambda p: gpu.roofline(counts, 3.35e5, 'NVIDIA H100 80GB HBM3', p)['fraction']
    assert bound('float32') == pytest.approx({'fp32': .4, 'tf32': .4, 'tf32 fused': .1})
    assert bound('bfloat16') == pytest.approx({'bf16': .2, 'bf16 fused': .05})
    for other in ('NVIDIA GH200 480GB', 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'NVIDIA H100 NVL'):
        assert gpu.roofline(counts, 1, other) == dict(peaks=None)

def test_gpu_goals():
    w3 = lambda rate, precision, work=gpu.FULL: dict(settings=dict(work=work), precision=precision,
                                                     images_a_second=rate)
    seen = {'fedlit-auto': w3(13_000., 'float32'), 'fedlit-compile': w3(14_500., 'float32'),
            'fedlit-bfloat16': w3(29_000., 'bfloat16'), 'loop-4-workers': dict(w3(10**6, 'float32')),
            'pfl': dict(settings=dict(work=gpu.PFL), precision='float32', whole=59.)}
    rows = list(gpu.goals(seen))
    assert [r[-2:] for r in rows] == [['14500 (fedlit-compile)', 'met'], ['29000 (fedlit-bfloat16)', 'missed'],
                                      ['59.0 (pfl)', 'met']]
    assert [r[1] for r in rows] == ['at least 14000 images/s', 'at least 30000 images/s', 'under 60 s']
    # a small try measures no goal
    assert {r[-1] for r in gpu.goals({'fedlit-auto': w3(1e9, 'float32', gpu.TINY)})} == {'not measured'}
