"The papers: every entry runs; results are files that survive kills, damage and company; the main job is an entry."
import json, os, random, re, signal, sys, time
from dataclasses import replace
from pathlib import Path
import pytest, torch
from fedlit.cli import main
from fedlit.data import Crop, Flip, load
from fedlit.models import models
from fedlit.papers import catalogue, collapse
from fedlit.papers.catalogue import CATALOGUE, SCALES, Entry, about, plan, published, reproduce, select
from fedlit.papers.claims import ahead, verdict
from fedlit.papers.drawings import rounds_figure, table
from fedlit.papers.entries import stands_on
from fedlit.papers.feddecorr import PAIR, helps
from fedlit.papers.settings import (MEASURES, Setting, address, averaged, call, checkpoint_mib, clients_of, found,
                                    public_set, run_setting, run_settings, task_of, trained)
from fedlit.partition import classes_per_client
from fedlit.round import Local
from fedlit.run import Run
from fedlit.tree import flatten

ROOT = Path(__file__).parents[1]

def test_every_cell_with_an_entry_is_in_the_catalogue():
    cells = [''.join(c['source']) for f in (ROOT/'nbs'/'papers').glob('*.ipynb')
             for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
    exported = [s for s in cells if s.startswith('#| exports')]
    named = [id for s in exported for id in re.findall(r"^ *entry\('([^']+)'", s, re.M)]
    families = [f'{paper}/{id}' for s in exported for paper in re.findall(r"entry\(f'(\w+)/\{id\}'", s)
                for id in re.findall(r"^more_\w+\('([^']+)'", s, re.M)]
    assert sorted(named + families) == sorted(CATALOGUE)
    for e in CATALOGUE.values():
        assert e.source and e.caption and e.claims and all(callable(n) for n in e.claims.values()), e.id
        if e.id != 'collapse': # which is drawn without the small pictures of the other pages
            assert any(re.search(rf"^show\('{re.escape(e.id)}'\)", s, re.M) for s in cells), f'{e.id} is on no page'

@pytest.mark.parametrize('scale', SCALES)
def test_grids(scale):
    for e in CATALOGUE.values():
        grid, whole = e.grid(scale), plan(scale, e.folder)
        assert all(list(l) == list(grid[0][0]) and address(s) in whole for l, s in grid)
        assert len({tuple(l.values()) for l, _ in grid}) == len(grid), e.id
    whole = plan(scale)
    for s in whole.values(): assert s.model in models() and set(s.measure) <= set(MEASURES) and call(s.partition)
    if scale != 'embedded': assert {s.data for s in whole.values() if s.rounds} & {'cifar10', 'mnist'}

def tiny(s): return replace(s, rounds=min(s.rounds, 1), local=replace(s.local, epochs=1))

DONE = {} # entries that begin with the same run share it

@pytest.mark.parametrize('id', CATALOGUE)
def test_the_first_run_of_every_entry(id):
    first = tiny(select(CATALOGUE[id], 'embedded')[0][1])
    key = address(first), first.measure
    DONE[key] = r = DONE.get(key) or run_setting(first)
    assert not r.get('failed') and set(r['measured']) == set(first.measure)
    if first.rounds: assert 0 <= r['history']['accuracy'][-1] <= 1 and len(r['history']['round']) == 1
    json.dumps(r, allow_nan=False)

def test_published_numbers_are_found():
    for e in CATALOGUE.values():
        if e.published: assert len(published(e.published)) and published(e.published).value.notna().all(), e.id
    t = published('Table 1')
    assert ((t.data == 'cifar10') & (t.alpha == .05) & (t.method == 'FedAvg')).any()

@pytest.fixture
def small(monkeypatch, tmp_path):
    "An entry of four quick runs, and a folder of its own."
    base = Setting(rounds=2, local=Local(epochs=1))
    grid = lambda scale: [(dict(data='digits', method=m, seed=i), replace(base, method=t, seed=i))
                          for m, t in (('FedAvg', 'FedAvg()'), ('FedAvg+FedDecorr', 'FedDecorr()')) for i in (0, 1)]
    entry = Entry('tiny/fig1', 'Fig. 1', 'Two methods', grid, rounds_figure(),
                  {'FedDecorr helps': helps(), 'MOON helps': helps('MOON')})
    monkeypatch.setitem(CATALOGUE, entry.id, entry)
    plan.cache_clear()
    monkeypatch.chdir(tmp_path)
    yield entry
    plan.cache_clear()

def test_a_deleted_result_and_figure_are_named(small, capsys):
    main(['reproduce', 'tiny/fig1', '--processes', '1', '--quiet'])
    main(['report', 'tiny/fig1'])
    assert '4 of 4 runs' in capsys.readouterr().out
    main(['report', 'tiny/fig1'])
    out = capsys.readouterr().out
    assert ('missing' not in out and re.search('MOON helps .*cannot be evaluated: there is no method=MOON', out)
            and '1 cannot be evaluated' in out)
    figure = Path('results/catalogue/report/embedded/tiny/fig1.png')
    gone = Path('results/catalogue')/address(select(small, 'embedded')[1][1])
    figure.unlink()
    gone.unlink()
    main(['report', 'tiny/fig1'])
    out = capsys.readouterr().out
    assert str(gone) in out and 'fedlit reproduce tiny/fig1 --scale embedded' in out and f'missing: {figure}' in out
    assert ('cannot be evaluated: 1 results are missing' in out
            and out.splitlines()[-1].startswith('0 of 2 claims hold here'))
    before = {f: f.stat().st_mtime_ns for f in Path('results/catalogue/digits').glob('*.json')}
    main(['reproduce', 'tiny/fig1', '--processes', '1', '--quiet'])
    assert gone.exists() and before == {f: f.stat().st_mtime_ns for f in before}
    assert not list(Path('results').rglob('.*'))

def test_only_and_its_errors(small, capsys):
    main(['reproduce', 'tiny/fig1', '--only', 'method=FedAvg,seed=1', '--processes', '1', '--quiet'])
    assert '1 runs at scale embedded' in capsys.readouterr().out and len(list(Path('results').rglob('*.json'))) == 1
    for words, said in ((['tiny/fig2'], "no entry 'tiny/fig2'.*tiny/fig1"),
                        (['tiny/fig1', '--scale', 'papers'], "no scale 'papers'.*paper"),
                        (['tiny/fig1', '--only', 'methd=FedAvg'], "no label 'methd'.*method"),
                        (['tiny/fig1', '--only', 'seed=7'], "seed=7.*seed=0"),
                        (['tiny/fig1', '--rounds', '3'], '--rounds belong to the main job')):
        with pytest.raises(SystemExit, match=said): main(['reproduce', *words])

@pytest.mark.filterwarnings('ignore:.*is damaged')
def test_damaged_files_count_as_missing(tmp_path):
    s = Setting(rounds=1, local=Local(epochs=1))
    run_settings([s], tmp_path, processes=1, progress=False)
    file = tmp_path/address(s)
    whole = file.read_text()
    r = json.loads(whole)
    for bad in ('', whole[:len(whole)//2], '[]', 'null', json.dumps(dict(r, setting=dict(r['setting'], seed=1))),
                json.dumps(dict(r, measured={})), json.dumps(dict(r, history=None))):
        file.write_text(bad)
        assert found(tmp_path, s) is None
    assert run_settings([s], tmp_path, processes=1, progress=False) == 0
    again = found(tmp_path, s)
    assert (again['history']['accuracy'] == r['history']['accuracy']
            and again['history']['train_loss'] == r['history']['train_loss'])

def test_a_run_that_diverges_is_a_result(tmp_path):
    s = Setting(rounds=1, local=Local(epochs=1, lr=1e20), measure=('curve', 'spectra'))
    assert (run_settings([s], tmp_path, processes=1, progress=False) == 0
            and 'produced NaN or infinity' in found(tmp_path, s)['failed'])
    e = Entry('x/y', '', '', lambda scale: [(dict(data='digits', method='FedAvg', seed=0), s)], table('method', 'data'),
              {'is good': ahead(dict(method='FedAvg'), dict(method='FedAvg'))})
    said = about(e, 'embedded', out=tmp_path)
    assert (said.claims.verdict[0].startswith('cannot be evaluated')
            and 'produced NaN or infinity' in said.tables[0][1].to_string())

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork') or sys.platform == 'darwin', reason='kills forked processes')
ROBUST = Setting('MOON() + FedAvgM(momentum=0.5, form="paper") + FedDecorr()', clients=6, participation=.5, rounds=12,
                 local=Local(epochs=1), measure=('curve', 'spectra'))

KILLS = int(os.environ.get('FEDLIT_KILLS', 4)) # FEDLIT_KILLS=20 for the long form

def alone(work):
    "Run `work` in a process of its own; its number."
    if pid := os.fork(): return pid
    try: work()
    finally: os._exit(0)

def finish(folder):
    "What a killed process is asked to do: train from the checkpoint, then write run and result."
    run, *_ = trained(ROBUST, folder/'checkpoint.safetensors')
    run.save(folder/'final.safetensors')
    run_settings([ROBUST], folder, processes=1, progress=False)

def same(a, b):
    a, b = (flatten(dict(params=s.params, buffers=s.buffers, server=s.server,
                         client={k: v[:] if hasattr(v, 'written') else v for k, v in flatten(s.client).items()}))
            for s in (a, b))
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)

@pytest.mark.slow
@needs_fork
def test_killed_at_any_moment_it_ends_as_if_never_stopped(tmp_path):
    calm, wild = tmp_path/'calm', tmp_path/'wild'
    began = time.monotonic()
    os.waitpid(alone(lambda: finish(calm)), 0)
    whole, rng, kills = time.monotonic() - began, random.Random(0), 0
    for _ in range(KILLS):
        pid = alone(lambda: finish(wild))
        time.sleep(rng.uniform(0, whole/4))
        os.kill(pid, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        # killed after the end: begin again from the last checkpoint
        for f in (wild/'final.safetensors', wild/address(ROBUST)): f.unlink(missing_ok=True)
    assert kills > KILLS/2
    os.waitpid(alone(lambda: finish(wild)), 0)
    a, b = (Run.load(d/'final.safetensors') for d in (calm, wild))
    clock = ['seconds', 'peak_mb']
    assert (same(a.state, b.state) and len(a.history) == 12
            and a.history.drop(columns=clock).equals(b.history.drop(columns=clock)))
    one, two = (found(d, ROBUST) for d in (calm, wild))
    assert (one['measured'] == two['measured']
            and {k: v for k, v in one['history'].items() if k not in clock}
                == {k: v for k, v in two['history'].items() if k not in clock})
    assert not list((wild/'checkpoints').glob('*.safetensors'))

@needs_fork
def test_two_processes_share_a_folder(tmp_path):
    settings = [Setting(rounds=2, local=Local(epochs=1), seed=i) for i in range(4)]
    pids = [alone(lambda: run_settings(settings, tmp_path, processes=1, progress=False)) for _ in range(2)]
    while any(os.waitpid(p, os.WNOHANG) == (0, 0) for p in pids[-1:]):
        for f in tmp_path.rglob('*.json'): json.loads(f.read_text())    # whole whenever it is looked at
        time.sleep(.005)
    os.waitpid(pids[0], 0)
    assert all(found(tmp_path, s) for s in settings) and not list(tmp_path.rglob('.*'))

def test_minutes_stop_at_a_round(tmp_path):
    assert run_settings([ROBUST], tmp_path, processes=1, minutes=1e-9, progress=False) == 1       # not begun: no time
    part = trained(ROBUST, tmp_path/'c.safetensors', minutes=1e-9)
    assert part is None and Run.load(tmp_path/'c.safetensors').state.round == 1
    run = trained(ROBUST, tmp_path/'c.safetensors')[0]
    assert same(run.state, trained(ROBUST)[0].state)
    with pytest.raises(ValueError, match='minutes=1 needs checkpoint='): trained(ROBUST, minutes=1)

def test_checkpoints_of_the_papers_models():
    blank = {c: f'blank(shape=(3, 32, 32), classes={c})' for c in (10, 100)}
    mobile = Setting(task=blank[10], model='mobilenetv2', options=())
    moon = Setting('MOON()', task=blank[10], model='moon_cnn', options=())
    for s in (mobile, replace(mobile, method='FedDecorr()'), moon,
              Setting('FedDSE()', task=blank[100], model='feddse_resnet18', options=()),
              Setting(task=blank[10], model='resnet18', options=())):
        assert checkpoint_mib(s) < 64
    assert checkpoint_mib(replace(mobile, method='MOON()')) > 64 # a network a client: says so instead of hiding it

def test_committed_results_have_their_addresses():
    for name, own in (('catalogue', 'results/catalogue'), ('digits', 'reproduced')):
        folder = ROOT/'results'/name
        files = [f for f in folder.glob('*/*.json')]
        if not files: pytest.skip(f'no results in {folder}')
        known = {a for s in SCALES for a in plan(s, own)}
        for f in files: assert f.relative_to(folder) in known, f
        there = [(a, s) for a, s in plan('embedded', own).items() if (folder/a).exists()]
        for a, s in there: assert found(folder, s), a
    assert len(there) == 42 # of the main job, all

def test_addresses_stay():
    # written down before data could be made smaller: whatever Setting learns, old results must be found
    assert address(Setting()).as_posix() == 'digits/FedAvg-d2f421b79155.json'
    whole = Setting('MOON()', task='cifar10', model='resnet18', options=())
    assert address(whole).as_posix() == 'cifar10/MOON-53075e970f27.json'
    small = replace(Setting(), task='digits(size=4, train=500, test=100)')
    assert address(small).parent.name == small.data == 'digits' and address(small) != address(Setting())

def test_smaller_data():
    task, whole = task_of('digits(size=4, train=500, test=100)'), load('digits')
    assert (task.x_train.shape, task.x_test.shape) == ((500, 1, 4, 4), (100, 1, 4, 4))
    assert (task.y_train.bincount() - whole.y_train.bincount()*500/len(whole.y_train)).abs().max() < 1.5
    bytes_ = replace(whole, x_train=(whole.x_train*255).to(torch.uint8), augment=(Crop(4), Flip()))
    small = averaged(bytes_, 4)
    exact = bytes_.x_train[7, 0].float().view(4, 2, 4, 2).mean((1, 3))
    assert small.x_train.dtype == torch.uint8 and (small.x_train[7, 0] - exact).abs().max() <= .5
    assert small.augment == (Crop(2), Flip()) and torch.equal(small.y_train, whole.y_train)

def test_what_is_watched_survives_a_stop(tmp_path):
    s = replace(ROBUST, rounds=3, measure=('curve', 'spectra_by_round'))
    whole = run_setting(s)
    file = tmp_path/'c.safetensors'
    assert run_setting(s, file, minutes=1e-9) is None and Run.load(file).state.round == 1
    again = run_setting(s, file)
    seen = again['measured']['spectra_by_round']
    assert seen == whole['measured']['spectra_by_round'] and {len(v) for v in seen.values()} == {3}
    assert {'rank_curve', 'local_rank_curve', 'R_curve'} <= set(seen)

def test_the_short_scale_shares_its_runs():
    pair = {address(s) for l, s in select(CATALOGUE['feddecorr/table1'], 'short') if l['method'] in PAIR}
    assert len(pair) == 2*4*10
    for id in ('fig2a', 'fig2b', 'fig10', 'fig9', 'fig3', 'fig3-local', 'fig4', 'tpami-fig4', 'tpami-fig6', 'fig11'):
        assert {address(s) for _, s in select(CATALOGUE[f'feddecorr/{id}'], 'short')} <= pair, id

def test_it_is_said_what_a_figure_stands_on():
    said = {scale: stands_on(CATALOGUE['feddecorr/table7'].grid(scale)) for scale in SCALES}
    assert said['embedded'].startswith('digits; mlp(') and 'resnet' not in said['embedded']
    assert said['short'].startswith('cifar10 (16x16 pixels, 10,000 for training, 2,000 for tests); cnn_bn')
    assert 'mobilenetv2, resnet18, resnet32' in said['paper']
    for e in CATALOGUE.values(): # no label has the name of data or of a network that a run does not have
        for labels, s in (run for scale in ('embedded', 'short') for run in e.grid(scale) if run[1].rounds):
            data = labels['data'].removeprefix('small_')
            assert data == s.data and (labels['data'] == data) == ('size=' not in s.task), (e.id, labels)
            network = str(labels.get('model', '')).lower()
            assert not network or network.startswith(('perceptron', 'convolutions')), (e.id, labels)

def test_one_domain_a_client():
    task, s = load('digits_domains'), select(CATALOGUE['feddecorr/tpami-table3'], 'embedded')[0][1]
    parts, tests = clients_of(s, task)
    assert len(parts) == 4 and tests is None and all(len(task.domain_train[c].unique()) == 1 for c in parts)

def test_sub_model_rows():
    pick = lambda id, **labels: next(s for l, s in CATALOGUE[id].grid('embedded')
                                     if all(l[k] == v for k, v in labels.items())).method
    assert (pick('feddse/table3.4', method='FedRolex').startswith('FedRolex(rates=(1.0, 0.5, 0.25, 0.125, 0.0625)')
            and 'MaskedCE' in pick('feddse/table3.4', method='FedRolex'))
    assert ('rates=(0.25,)' in pick('feddse/table3.6', method='FedDSE T=1', capacity='all clients 1/4')
            and 'temperature=1.0' in pick('feddse/table3.6', method='FedDSE T=1', capacity='all clients 1/4'))
    assert pick('feddse/fig3.6', method='FedDSE', rho=.5).count('0.0625') == 5

@pytest.mark.parametrize('how', ['held', 'uploaded', 'broader', 'generated'])
def test_public_sets(how):
    task = load('digits')
    clients = classes_per_client(task.y_train, 20, 2, seed=0)
    x, y, left = public_set(task, clients, how, 200)
    assert x.shape[1:] == task.x_train.shape[1:] and len(x) == len(y) and 150 <= len(x) <= 220 and x.isfinite().all()
    before, after = sum(map(len, clients)), sum(map(len, left))
    assert after == before - (len(x) if how == 'held' else 0)
    assert len(y.unique()) == 10
    if how == 'generated': # per class near the real mean of that class
        for k in range(10):
            real = task.normalise(task.x_train[task.y_train == k]).mean(0)
            other = task.normalise(task.x_train[task.y_train == (k+1) % 10]).mean(0)
            assert (x[y == k].mean(0) - real).norm() < (x[y == k].mean(0) - other).norm()

# ---- the main job ----

@pytest.fixture
def short_job(monkeypatch):
    "The main job with two seeds, two alphas and one round of one epoch."
    whole = collapse.collapse_runs
    def few(scale, seeds=(0, 1, 2), rounds=None):
        return [(l, replace(s, rounds=rounds or 1, local=Local(epochs=1, batch_size=128)))
                for l, s in whole(scale, seeds[:2]) if l['alpha'] in (.05, float('inf'))]
    monkeypatch.setattr(collapse, 'collapse_runs', few)
    plan.cache_clear()
    yield few('embedded')
    plan.cache_clear()
    monkeypatch.undo()
    collapse.main_job()

@pytest.mark.filterwarnings('ignore:.*is damaged')
def test_the_main_job_small(short_job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(['reproduce', '--processes', '1', '--quiet'])
    printed, out = capsys.readouterr().out, tmp_path/'reproduced'
    files = sorted(out.glob('digits/*.json'))
    assert len(files) == len(short_job) == 20 and '20 runs at scale embedded' in printed
    assert (all((out/f'{n}.png').stat().st_size > 5000 for n in ('spectra', 'accuracy', 'rounds', 'gap'))
            and all((out/f'{n}.csv').exists() for n in ('accuracy', 'claims'))
            and 'claims hold' in printed and 'missing:' not in printed and re.search(r'\d s in all', printed))
    judged = about(CATALOGUE['collapse'], 'embedded').claims
    assert set(judged.verdict) <= {'holds', 'does not hold', 'undecided'} and len(judged) >= 15
    victim = files[3]
    before = {f: f.stat().st_mtime_ns for f in files}
    victim.write_text('{"half":')
    assert reproduce(['collapse'], processes=1, progress=False) == 0
    assert (json.loads(victim.read_text())['seed'] in (0, 1)
            and all(f.stat().st_mtime_ns == t for f, t in before.items() if f != victim))

def test_seeds_and_rounds_of_the_main_job(short_job, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(catalogue, 'run_settings', lambda todo, *a, **kw: asked.extend(todo) or 0)
    monkeypatch.setattr(catalogue, 'report', lambda *a, **kw: None)
    main(['reproduce', '--seeds', '3', '4', '--rounds', '2', '--quiet'])
    assert len(asked) == 20 and {s.seed for s in asked} == {3, 4} and {s.rounds for s in asked} == {2}
    assert CATALOGUE['collapse'].options == '--seeds 3 4 --rounds 2'
    for words, said in ((['--minutes', '5'], '--minutes belongs to entries'),
                        (['moon', '--seeds', '1'], '--seeds and --rounds belong to the main job')):
        with pytest.raises(SystemExit, match=said): main(['reproduce', *words])

def test_a_report_takes_the_seeds_that_were_run(tmp_path, capsys):
    asked = [s for _, s in collapse.collapse_runs('embedded', (5,), 1)][:2]
    run_settings([*asked, replace(asked[0], seed=7), Setting(rounds=1)], tmp_path, processes=1, progress=False)
    assert collapse.runs_in(tmp_path) == ((5, 7), 1)
    main(['report', '--out', str(tmp_path)])
    out = capsys.readouterr().out
    assert '3 of 28 runs' in out and 'fedlit reproduce collapse --scale embedded --seeds 5 7 --rounds 1 --out' in out
    collapse.main_job()

def test_verdicts():
    assert (verdict([.1, .11, .12]) == 'holds' and verdict([-.1, -.11, -.12]) == 'does not hold'
            and verdict([1, -1, 1]) == 'undecided' and verdict([3.]) == 'undecided')
