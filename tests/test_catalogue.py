"The papers: every entry runs; results are files that survive kills, damage and company; the main job is an entry."
import io, json, math, os, pickle, random, re, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from PIL import Image
from fedlit.cli import main
from fedlit.data import Crop, Flip, load, recipe
from fedlit.figure import spectra
from fedlit.ground.files import all_results, write_json, result, result_path
from fedlit.models import models
from fedlit.papers import catalogue, collapse
from fedlit.papers.catalogue import entries, plan, reproduce, show, until_decided, verdicts
from fedlit.papers.claims import Numbers, ahead, by_sign, evaluate, judge, ours, results, tally, verdict_view, within
from fedlit.papers.collapse import committed_verdicts
from fedlit.papers.drawings import png_of, rounds_figure, small_picture, table
from fedlit.papers.entries import (CATALOGUE, SCALES, Entry, compare_published, found_rows, judge_entries, looks, means,
                                   note_look, published_numbers, read_published, remember, repeats, report_entry,
                                   row_name, select, stands_on, with_seeds, write_table)
from fedlit.papers.evidence import LEVEL, paired_test, sequential_test
from fedlit.papers.feddecorr import DOMAINS, PAIR, gain_of
from fedlit.papers.feddse import THESIS
from fedlit.papers.measures import MEASURES
from fedlit.papers.settings import Setting, _groups, address, federation_of, result_of, run_setting, run_settings
from fedlit.parse import method as parse
from fedlit.partition import classes_per_client
from fedlit.local import Local
from fedlit.result import Run
from fedlit.setting import _keep_task, average_pixels, call, clients_of, plain, public_set, task_of
from federation import same
from test_files import CLOCK

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

def tiny(s):
    epochs = s.local.epochs if 'FedDecomp' in s.method else 1 # its private part takes some of them
    return replace(s, rounds=min(s.rounds, 1), local=replace(s.local, epochs=epochs))

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
        numbers = published_numbers(e.published)
        assert not e.published or len(numbers) and numbers.value.notna().all(), e.id
    t = published_numbers('Table 1')
    assert ((t.data == 'cifar10') & (t.alpha == .05) & (t.method == 'FedAvg')).any()

def test_a_published_number_stands_in_a_source():
    t = read_published()
    assert set(t[t.by == ''].paper) == {'FedDecorr', 'FedDSE/FedGSE thesis'} # MOON's tables are lost in its source
    other = t[t.by != ''].source
    assert other.str.match(r'https://github.com/adap/flower/blob/[0-9a-f]{40}/').all()
    beside_moon = compare_published(CATALOGUE['moon/table1'], found_rows(CATALOGUE['moon/table1'], 'embedded')[0])
    assert not [c for c in beside_moon if c.startswith('paper')]
    moon = beside_moon.set_index('method').loc['MOON']
    assert (moon['Flower, cifar10'], moon['Flower, cifar100']) == (70.71, 66.36)

@pytest.fixture
def small(monkeypatch, tmp_path):
    "An entry of four quick runs, and a folder of its own."
    base = Setting(rounds=2, local=Local(epochs=1))
    grid = lambda scale: [(dict(data='digits', method=m, seed=i), replace(base, method=t, seed=i))
                          for m, t in (('FedAvg', 'FedAvg()'), ('FedAvg+FedDecorr', 'FedDecorr()')) for i in (0, 1)]
    entry = Entry('tiny/fig1', 'Fig. 1', 'Two methods', grid, rounds_figure(),
                  {'FedDecorr helps': gain_of(), 'MOON helps': gain_of('MOON')})
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
    assert ('missing' not in out and re.search('not evaluated: MOON helps\n *there is no method=MOON', out)
            and '1 not evaluated' in out)
    figure = Path('results/catalogue/report/embedded/tiny/fig1.png')
    gone = Path('results/catalogue')/address(select(small, 'embedded')[1][1])
    figure.unlink()
    gone.unlink()
    main(['report', 'tiny/fig1'])
    out = capsys.readouterr().out
    assert str(gone) in out and 'fedlit reproduce tiny/fig1 --scale embedded' in out and f'missing: {figure}' in out
    assert ('1 result is missing' in out and '2 not evaluated' in out
            and out.splitlines()[-1].startswith('0 of 2 claims hold here'))
    before = {f: f.stat().st_mtime_ns for f in Path('results/catalogue/digits').glob('*.json')}
    main(['reproduce', 'tiny/fig1', '--processes', '1', '--quiet'])
    assert gone.exists() and before == {f: f.stat().st_mtime_ns for f in before}
    assert not list(Path('results').rglob('.*'))

def test_only_and_its_errors(small, capsys):
    main(['reproduce', 'tiny/fig1', '--only', 'method=FedAvg,seed=1', '--processes', '1', '--quiet'])
    assert '1 run at scale embedded' in capsys.readouterr().out and len(list(Path('results').rglob('*.json'))) == 1
    for words, said in ((['tiny/fig2'], "no entry 'tiny/fig2'.*tiny/fig1"),
                        (['tiny/fig1', '--scale', 'papers'], "no scale 'papers'.*paper"),
                        (['tiny/fig1', '--only', 'methd=FedAvg'], "no label 'methd'.*method"),
                        (['tiny/fig1', '--only', 'seed=7'], "seed=7.*seed=0"),
                        (['tiny/fig1', '--until-decided', '--seeds', '5'], 'leave --seeds out'),
                        (['tiny/fig1', '--max-seeds', '5'], 'belongs to --until-decided')):
        with pytest.raises(SystemExit, match=said): main(['reproduce', *words])

@pytest.mark.filterwarnings('ignore:.*is damaged')
def test_damaged_files_count_as_missing(tmp_path):
    s = Setting(rounds=1, local=Local(epochs=1))
    run_settings([s], tmp_path, processes=1, progress=False)
    file = tmp_path/address(s)
    whole = file.read_text(encoding='utf-8')
    r = json.loads(whole)
    for bad in ('', whole[:len(whole)//2], '[]', 'null', json.dumps(dict(r, setting=dict(r['setting'], seed=1))),
                json.dumps(dict(r, measured={})), json.dumps(dict(r, history=None))):
        file.write_text(bad, encoding='utf-8')
        assert result_of(tmp_path, s) is None
    assert run_settings([s], tmp_path, processes=1, progress=False) == 0
    again = result_of(tmp_path, s)
    assert (again['history']['accuracy'] == r['history']['accuracy']
            and again['history']['train_loss'] == r['history']['train_loss'])

def test_a_run_that_diverges_is_a_result(tmp_path):
    s = Setting(rounds=1, local=Local(epochs=1, lr=1e20), measure=('curve', 'spectra'))
    assert (run_settings([s], tmp_path, processes=1, progress=False) == 0
            and 'produced NaN or infinity' in result_of(tmp_path, s)['failed'])
    e = Entry('x/y', '', '', lambda scale: [(dict(data='digits', method='FedAvg', seed=0), s)], table('method', 'data'),
              {'is good': ahead(dict(method='FedAvg'), dict(method='FedAvg'))})
    said = report_entry(e, 'embedded', out=tmp_path)
    assert (said.claims.verdict[0] == 'not evaluated' and 'NaN or infinity' in said.claims.measured[0]
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
    run = federation_of(ROBUST, folder/'checkpoint.safetensors').run()
    run.save(folder/'final.safetensors')
    run_settings([ROBUST], folder, processes=1, progress=False)

@pytest.mark.slow
@needs_fork
def test_killed_at_any_moment_it_ends_as_if_never_stopped(tmp_path):
    calm, wild = tmp_path/'calm', tmp_path/'wild'
    began = time.monotonic()
    os.waitpid(alone(lambda: finish(calm)), 0)
    longest, rng, kills = (time.monotonic() - began)/4, random.Random(0), 0
    while kills < KILLS:
        pid = alone(lambda: finish(wild))
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(pid, 0)[1]): kills += 1
        else: longest /= 2 # it is faster than it was
        # killed after the end: begin again from the last checkpoint
        for f in (wild/'final.safetensors', wild/address(ROBUST)): f.unlink(missing_ok=True)
    os.waitpid(alone(lambda: finish(wild)), 0)
    a, b = (Run.load(d/'final.safetensors') for d in (calm, wild))
    assert same(a, b) and len(a.history) == 12
    one, two = (result_of(d, ROBUST) for d in (calm, wild))
    assert one['measured'] == two['measured']
    assert all(v == two['history'][k] for k, v in one['history'].items() if k not in CLOCK)
    assert not list((wild/'checkpoints').glob('*.safetensors'))

@needs_fork
def test_two_processes_share_a_folder(tmp_path):
    settings = [Setting(rounds=2, local=Local(epochs=1), seed=i) for i in range(4)]
    pids = [alone(lambda: run_settings(settings, tmp_path, processes=1, progress=False)) for _ in range(2)]
    while any(os.waitpid(p, os.WNOHANG) == (0, 0) for p in pids[-1:]):
        for f in tmp_path.rglob('*.json'): json.loads(f.read_text(encoding='utf-8'))    # whole whenever it is looked at
        time.sleep(.005)
    os.waitpid(pids[0], 0)
    assert all(result_of(tmp_path, s) for s in settings) and not list(tmp_path.rglob('.*'))

def test_minutes_stop_at_a_round(tmp_path):
    assert run_settings([ROBUST], tmp_path, processes=1, minutes=1e-9, progress=False) == 1       # not begun: no time
    part = federation_of(ROBUST, tmp_path/'c.safetensors', minutes=1e-9).run()
    assert part.state.round == Run.load(tmp_path/'c.safetensors').state.round == 1
    run = federation_of(ROBUST, tmp_path/'c.safetensors').run()
    assert same(run, federation_of(ROBUST).run())
    with pytest.raises(ValueError, match='minutes=1 needs checkpoint='): federation_of(ROBUST, minutes=1).run()

def test_committed_results_have_their_addresses():
    for name, own in (('catalogue', 'results/catalogue'), ('digits', 'reproduced')):
        folder = ROOT/'results'/name
        data = {f.name.removesuffix('.jsonl.xz') for f in folder.glob('*.jsonl.xz')}
        data |= {f.parent.name for f in folder.glob('*/*.json')}
        there = {Path(d)/n for d in data for n in all_results(folder/d)}
        if not there: pytest.skip(f'no results in {folder}')
        known = {a for e in CATALOGUE.values() if e.folder == own for s in SCALES for n in (None, 30)
                 for a in (address(t) for _, t in with_seeds(e.grid(s), n))}
        assert there <= known, sorted(there - known)[:3]
        whole = [s for s in plan('embedded', own).values() if address(s) in there]
        for s in whole: assert result_of(folder, s), address(s)
    assert len(whole) == 14*len(collapse.SEEDS) # of the main job, all

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
    small = average_pixels(bytes_, 4)
    exact = bytes_.x_train[7, 0].float().view(4, 2, 4, 2).mean((1, 3))
    assert small.x_train.dtype == torch.uint8 and (small.x_train[7, 0] - exact).abs().max() <= .5
    assert small.augment == (Crop(2), Flip()) and torch.equal(small.y_train, whole.y_train)

def test_pictures_as_large_as_a_paper_has_them(monkeypatch):
    asked, few = [], load('digits').subset(4, test=2)
    def pictures(name, **kw):
        asked.append((name, kw))
        side = kw.get('size', 64)
        return replace(few, name=name, x_train=torch.zeros(4, 3, side, side), x_test=torch.zeros(2, 3, side, side))
    monkeypatch.setattr('fedlit.setting.load', pictures)
    _keep_task.cache_clear()
    assert task_of('office_caltech10(size=256)').x_train.shape[2:] == (256, 256)
    assert task_of('domainnet').x_train.shape[2:] == (64, 64)
    assert task_of('office_caltech10(size=32)').x_train.shape[2:] == (32, 32) # means of squares, as ever
    assert [kw.get('size') for _, kw in asked] == [256, None, None]
    assert all(call(s.task)[1] == dict(size=256) for s in DOMAINS['paper'].values()) # FedBN's, which TPAMI V-A follows
    _keep_task.cache_clear()

def test_the_augmentation_that_the_thesis_prints():
    for d, s in THESIS['paper'].items(): # thesis 3.3.2: crops on all four data sets
        channels = 1 if d == 'mnist' else 3
        task = replace(load('digits').subset(4, test=2), name=d, x_train=torch.zeros(4, channels, 8, 8),
                       x_test=torch.zeros(2, channels, 8, 8))
        assert recipe(task, s.recipe).augment == (Crop(),) and len(recipe(task, s.recipe).mean) == channels

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
    assert (pick('feddse/table3.4', method='FedRolex').startswith('FedRolex(rates=(0.99, 0.5, 0.25, 0.125, 0.0625)')
            and 'MaskedCE' in pick('feddse/table3.4', method='FedRolex'))
    assert pick('fedgse/table4.3', method='FedRolex').startswith('FedRolex(rates=(1.0, 0.5, 0.25, 0.125, 0.0625)')
    assert ('rates=(0.25,)' in pick('feddse/table3.6', method='FedDSE T=1', capacity='all clients 1/4')
            and 'temperature=1.0' in pick('feddse/table3.6', method='FedDSE T=1', capacity='all clients 1/4'))
    assert pick('feddse/fig3.6', method='FedDSE', rho=.2).count('0.0625') == 8

@pytest.mark.parametrize('scale', SCALES)
def test_no_client_of_fed_dse_s_chapter_has_the_whole_network(scale):
    # thesis 3.3.2: no client reaches the server; 4.4: a fifth of the clients has the whole network
    cut = [s.method for id in CATALOGUE if id.startswith('feddse/') for _, s in CATALOGUE[id].grid(scale)
           if 'rates=' in s.method]
    assert cut and all(float(re.search(r'rates=\(([\d.]+)', m)[1]) < 1 and "rounding='down'" in m for m in cut)
    n, clients = 64, 10 # the strongest client of a layer of 64 neurons keeps 63
    dse = parse(next(m for m in cut if m.startswith('FedDSE') and '0.99' in m)).parts[0]
    assert dse.top(torch.arange(float(n)), dse.rate(0, clients, 0)).sum() == 63

@pytest.mark.parametrize('scale', ['embedded', 'short'])
def test_the_thesis_is_judged_by_the_last_third_of_the_rounds(scale):
    for id, e in CATALOGUE.items():
        if e.paper in ('feddse', 'fedgse') and e.value == 'accuracy_late':
            assert all('curve' in s.measure for _, s in e.grid(scale)), id

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

def test_a_client_with_few_samples_does_not_give_all_of_them_away():
    task = load('digits')
    few, many = torch.arange(12), torch.arange(12, 200)
    x, _, left = public_set(task, [few, many], 'held', 30)
    assert [len(c) for c in left] == [6, len(many) - 15] and len(x) == 21

# ---- the main job ----

@pytest.fixture
def short_job(monkeypatch):
    "The main job with two seeds, two alphas and one round of one epoch."
    def few(scale):
        return [(l, replace(s, rounds=1, local=Local(epochs=1, batch_size=128)))
                for l, s in collapse.collapse_runs(scale, (0, 1)) if l['alpha'] in (.05, float('inf'))]
    monkeypatch.setitem(CATALOGUE, 'collapse', replace(CATALOGUE['collapse'], grid=few))
    plan.cache_clear()
    yield few('embedded')
    plan.cache_clear()

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
    assert printed.index('Do uneven labels cost') < printed.index('Does it raise the acc') < printed.index('\nclaims')
    assert max(len(line) for line in printed.splitlines() if 'reproduced' not in line) <= 100 # but for paths
    claims = report_entry(CATALOGUE['collapse'], 'embedded').claims
    assert set(claims.verdict) <= {'holds', 'does not hold', 'undecided'} and len(claims) >= 15
    victim = files[3]
    before = {f: f.stat().st_mtime_ns for f in files}
    victim.write_text('{"half":', encoding='utf-8')
    assert reproduce(['collapse'], processes=1, progress=False) == 0
    assert (json.loads(victim.read_text(encoding='utf-8'))['seed'] in (0, 1)
            and all(f.stat().st_mtime_ns == t for f, t in before.items() if f != victim))

def test_seeds_of_the_main_job(short_job, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(catalogue, 'run_settings', lambda todo, *a, **kw: asked.extend(todo) or 0)
    monkeypatch.setattr(catalogue, 'report', lambda *a, **kw: None)
    monkeypatch.chdir(tmp_path)
    main(['reproduce', '--seeds', '3', '--quiet'])
    assert len(asked) == 30 and {s.seed for s in asked} == {0, 1, 2}
    for words, said in ((['--minutes', '5'], '--minutes belongs to entries'),
                        (['--until-decided'], '--until-decided belongs to entries')):
        with pytest.raises(SystemExit, match=said): main(['reproduce', *words])

# ---- settings as they are printed ----

# entries, without some of them | rows, as for `select` & more | fields of settings | all values; ... for more | source:
# TPAMI, ICLR: FedDecorr's two versions; MOON: its paper; thesis: FedDSE (3) and FedGSE (4), where 0 samples are all;
# code: released code, where the paper's text has no numbers
PRINTED = '''
feddecorr | | local.lr/local.momentum/local.batch_size | .01/.9/64 | TPAMI V-A
feddecorr -table4 -tpami-table3 -domain-spectra | | local.epochs | 10 | TPAMI V-A
feddecorr/table4 | | local.epochs | 1 5 10 20 | TPAMI V-F
feddecorr | cifar10 | local.weight_decay/rounds | 1e-5/100 | TPAMI V-A
feddecorr | cifar100 | local.weight_decay/rounds | 1e-4/100 | TPAMI V-A
feddecorr | tiny_imagenet | local.weight_decay | 1e-4 | TPAMI V-A
feddecorr -table3 | tiny_imagenet | rounds | 50 | TPAMI V-A
feddecorr -table3 -tpami-table3 -domain-spectra | | clients/participation | 10/1 | TPAMI III-A, V-B
feddecorr/table3 | | clients/rounds/participation | 10/50/1 20/50/1 30/50/1 50/100/.2 100/100/.2 | TPAMI V-D
feddecorr -fig6 -fig8 -table7 -tpami-table3 -domain-spectra | | model | mobilenetv2 | TPAMI V-A
feddecorr/fig8 | | model | resnet18 resnet32 | ICLR D.2
feddecorr/table7 | | model | mobilenetv2 resnet18 resnet32 | TPAMI V-I
feddecorr/fig2a fig2b fig7 fig8 fig9 fig10 tpami-fig4 | | alpha | .01 .05 .25 inf | TPAMI III-A
feddecorr/fig3 fig3-local tpami-fig6 | | alpha | .01 .05 | TPAMI IV-B
feddecorr/table1 table2 table8 table9 | | alpha | .05 .1 .5 inf | TPAMI V-B
feddecorr/fig5 table4 table7 | | alpha | .05 .1 | TPAMI V-E, V-F, V-I
feddecorr/table5 | | alpha | .5 | TPAMI V-G
feddecorr/tpami-table2 | cifar10 | classes | 3 4 5 | TPAMI V-B
feddecorr/tpami-table2 | cifar100 | classes | 20 30 40 | TPAMI V-B
feddecorr/tpami-table2 | tiny_imagenet | classes | 80 90 100 | TPAMI V-B
feddecorr/table10 | | classes | 2 ... | ICLR C.5
feddecorr -fig5 | | FedDecorr.beta | .1 | TPAMI V-A
feddecorr/fig5 | | FedDecorr.beta | .01 .05 .1 .2 .3 | TPAMI V-E
feddecorr | | FedProx.mu | 1e-3 | TPAMI V-A
feddecorr | | MOON.mu | 1 | TPAMI V-A
feddecorr | | FedAvgM.momentum | .5 | TPAMI V-A
feddecorr/tpami-table3 | | model/rounds/local.epochs/local.weight_decay | alexnet_bn/300/1/1e-5 | TPAMI V-A
feddecorr/tpami-table3 | office_caltech10 | clients | 4 | TPAMI V-A
feddecorr/tpami-table3 | domainnet | clients | 6 | TPAMI V-A
moon | | local.lr/local.momentum/local.weight_decay/local.batch_size | .01/.9/1e-5/64 | MOON 4.1
moon | cifar10 | model | moon_cnn | MOON 4.1
moon | cifar100 & tiny_imagenet | model | resnet50 | MOON 4.1
moon/table1 | method=SOLO | rounds/local.epochs | 30/10 | MOON 4.1, 300 epochs
moon/table1 table2 table5 fig6 | cifar10,method=MOON & cifar100,method=MOON | rounds/local.epochs | 100/10 | MOON 4.1
moon/table1 table2 table5 fig6 | tiny_imagenet,method=MOON | rounds/local.epochs | 20/10 | MOON 4.1
moon/fig7 | | local.epochs | 1 10 ... | MOON 4.4
moon | | MOON.tau | .5 | MOON 4.1
moon -table4 -fig2 | | alpha | .5 | MOON 4.1
moon/fig2 | network=a party alone | alpha | .5 | MOON 3.2, 4.1
moon/table4 | | alpha | 5. ... | MOON 4.6
moon -table3 -fig8 -fig2 | | clients/participation | 10/1 | MOON 4.1
moon/table3 fig8 | | clients/rounds/participation | 50/200/1 100/500/.2 | MOON 4.5
moon/table3 fig8 | | MOON.mu | 1 10 | MOON 4.5
moon -table3 -fig8 -tuning | cifar10 | MOON.mu | 5 | MOON 4.2
moon -table3 -fig8 | cifar100 & tiny_imagenet | MOON.mu | 1 | MOON 4.2
moon/tuning | | MOON.mu | .1 1 5 10 | MOON 4.2
moon -tuning | cifar10 | FedProx.mu | .01 | MOON 4.2
moon | cifar100 & tiny_imagenet | FedProx.mu | .001 | MOON 4.2
moon/tuning | | FedProx.mu | .001 .01 .1 1 | MOON 4.2
feddecomp | | clients/rounds/local.epochs/local.batch_size | 40/300/5/100 | code
feddecomp | | local.lr/local.momentum/local.weight_decay | .1/.9/0 | code
feddecomp | | train/test | 500/100 | code
feddecomp | cifar10 | model | feddecomp_resnet8 | code
feddecomp | cifar100 | model | feddecomp_resnet10 | code
feddecomp/main | cifar10 | FedDecomp.r_c/FedDecomp.rank | .6/4 | code
feddecomp/main | cifar100 & tiny_imagenet | FedDecomp.r_c/FedDecomp.rank | .8/40 | code
feddecomp/main ratios | | FedDecomp.lora_epochs | 2 | code
feddse -fig3.2 -fig3.9 | | clients/participation | 100/.1 | thesis 3.3.2
feddse/fig3.9 | | participation | .05 .1 .15 .2 | thesis 3.4.3
fedgse -table4.2 -fig4.9 | | clients/participation | 100/.1 | thesis 3.3.2, 4.4
fedgse/fig4.9 | | participation | .05 .1 .15 .2 | thesis 4.5.2
feddse fedgse -table4.2 | | local.epochs/local.lr | 2/.001 | thesis Tables 3.3, 4.1
feddse fedgse -table4.2 | | local.momentum/local.weight_decay | .9/5e-4 | thesis Tables 3.3, 4.1
feddse -fig3.2 | mnist | rounds | 800 | thesis Table 3.3
feddse/table3.6 fig3.8 fig3.10 | | model | cnn4 | thesis 3.3.1
fedgse -fig4.3 -fig4.4 -table4.2 | mnist | rounds | 800 | thesis Table 4.1
fedgse/fig4.3 fig4.4 | mnist | rounds | 100 | thesis 4.4.3
feddse fedgse | cifar10 & cifar100 & tiny_imagenet | rounds | 2500 | thesis Tables 3.3, 4.1
feddse/table3.4 | cifar10,method=FedDSE & cifar100,method=FedDSE | model | feddse_resnet18 | thesis 3.3.1
feddse/table3.4 | tiny_imagenet,method=FedDSE | model | feddse_resnet34 | thesis 3.3.1
feddse fedgse -table4.2 | | recipe | thesis | thesis 3.3.2
feddse fedgse -table4.2 -fig3.2 | | statistics | recomputed | thesis 3.3.3
feddse | | public | none | thesis 3.2.2
feddse/fig3.2 | heterogeneity=high | clients/classes | 5/2 | thesis 3.1.2
feddse/table3.4 | mnist & cifar10 | classes | 2 | thesis Table 3.2
feddse/table3.4 | cifar100 | classes | 8 | thesis Table 3.2
feddse/table3.4 | tiny_imagenet | classes | 16 | thesis Table 3.2
feddse/table3.5 | mnist & cifar10 | classes | 4 | thesis Table 3.2
feddse/table3.5 | cifar100 | classes | 16 | thesis Table 3.2
feddse/table3.5 | tiny_imagenet | classes | 32 | thesis Table 3.2
fedgse/table4.3 fig4.3 fig4.4 | mnist | classes | 2 | thesis Table 3.2, 4.4
fedgse/table4.3 | tiny_imagenet | classes | 16 | thesis Table 3.2, 4.4
fedgse/table4.4 | mnist | classes | 4 | thesis Table 3.2, 4.4
fedgse/table4.4 | tiny_imagenet | classes | 32 | thesis Table 3.2, 4.4
feddse/fig3.6 fig3.7 fig3.9 fig3.10 | | classes | 2 4 | thesis 3.4.1, 3.4.3, 3.4.4
fedgse/fig4.5 fig4.6 fig4.7 fig4.8 fig4.9 fig4.10 | | classes | 2 4 | thesis 4.5.1, 4.5.3
feddse/fig3.8 | | classes | 2 4 6 8 10 | thesis 3.4.2
fedgse/table4.5 | | classes | 2 4 6 8 10 | thesis Table 4.5
feddse/table3.4 table3.5 fig3.5 fig3.8 fig3.9 fig3.10 | | rates | .99,.5,.25,.125,.0625 | thesis 3.3.2
feddse/table3.6 | capacity=mixed | rates | .99,.5,.25,.125,.0625 | thesis 3.4.5
feddse/table3.6 | capacity=all clients 1/4 | rates | .25, | thesis 3.4.5
feddse/table3.6 | capacity=all clients 1/2 | rates | .5, | thesis 3.4.5
fedgse/table4.3 table4.4 fig4.3 fig4.4 fig4.9 fig4.10 table4.5 public | | rates | 1,.5,.25,.125,.0625 | thesis 4.4
feddse/fig3.6 fig3.7 | | rho | 0 .2 .4 .6 .8 1 | thesis 3.4.1
fedgse/fig4.5 fig4.6 fig4.7 | | rho | 0 .2 .4 .6 .8 1 | thesis 4.5.1
fedgse/fig4.8 | | rho | .2 .4 .6 .8 | thesis Fig. 4.8
feddse/fig3.6 fig3.7 | rho=.4 | rates | .5,.5,.5,.5,.0625,.0625,.0625,.0625,.0625,.0625 | thesis 3.4.1
fedgse/fig4.5 fig4.6 fig4.7 | rho=.4 | rates | 1,1,1,1,.0625,.0625,.0625,.0625,.0625,.0625 | thesis 4.5.1
feddse -table3.6 -table3.4 -table3.5 | | FedDSE.temperature | 0 | thesis 3.3.4
feddse/table3.6 | | FedDSE.temperature | 0 1 | thesis 3.4.5
feddse/table3.4 table3.5 fig3.5 fig3.6 fig3.7 fig3.8 fig3.9 table3.6 | | FedDSE.samples | 0 | thesis Table 3.3
feddse/fig3.10 | | FedDSE.samples | 64 128 256 0 | thesis 3.4.4
fedgse -fig4.10 | | FedGSE.samples | 128 | thesis Table 4.1
fedgse/fig4.10 | | FedGSE.samples | 64 128 256 512 | thesis 4.5.3
fedgse/table4.5 fig4.5 fig4.6 fig4.7 fig4.10 | | FedGSE.similar | SPL | thesis 4.4.1, Table 4.5
fedgse/fig4.3 fig4.4 | | FedGSE.similar | CSL | thesis 4.4.3
'''
PRINTED = [[which, only, *more] for line in PRINTED.strip().splitlines()
           for which, rows, *more in [[c.strip() for c in line.split('|')]] for only in rows.split(' & ')]

def entries_of(text):
    "'moon', 'feddse fedgse', 'moon -fig7' or 'moon/table1 table2': entries of papers, without some, or by name."
    first, *more = text.split()
    paper, _, name = first.partition('/')
    if name: return [CATALOGUE[f'{paper}/{n}'] for n in (name, *more)]
    papers, out = [w for w in (first, *more) if w[0] != '-'], [w[1:] for w in more if w[0] == '-']
    return [e for e in CATALOGUE.values()
            if e.paper in papers and e.source != 'not in the papers' and e.id.partition('/')[2] not in out]

def settings_of(e, only):
    "Labels and settings of an entry at paper scale as the paper has them; none where the rows are not there."
    try: return [(l, s) for l, s in select(e, 'paper', only) if l.get('method') == row_name(l.get('method'))]
    except ValueError: return []

def valued(labels, s, field):
    "The value of a field, such as local.lr, alpha (of the partition), MOON.mu or rho; None where there is none."
    parts = parse(s.method).parts
    if field == 'rho': return labels['rho']
    if field == 'public': return s.public or 'none'
    if field == 'rates': return next((p.rates for p in parts if hasattr(p, 'rates')), None)
    if field in ('alpha', 'classes', 'train', 'test'): return call(s.partition)[1].get(field)
    if field[0].isupper():
        part, field = field.split('.')
        return next((getattr(p, field) for p in parts if type(p).__name__ == part), None)
    for name in field.split('.'): s = getattr(s, name)
    return s

def printed_value(text):
    "A number, a word, or with a comma a tuple of them."
    if ',' in text: return tuple(map(printed_value, filter(None, text.split(','))))
    try: return float(text)
    except ValueError: return text

@pytest.mark.parametrize('which, only, fields, values, source', PRINTED, ids=[f'{r[0]} {r[1]} {r[2]}' for r in PRINTED])
def test_settings_at_paper_scale_are_the_printed_ones(which, only, fields, values, source):
    printed = {tuple(map(printed_value, v.split('/'))) for v in values.split() if v != '...'}
    seen = {e.id: {tuple(valued(l, s, f) for f in fields.split('/')) for l, s in settings_of(e, only)}
            for e in entries_of(which)}
    seen = {id: there for id, have in seen.items() if (there := {v for v in have if None not in v})}
    assert seen, f'no run of {which} has {fields}'
    for id, have in seen.items(): assert printed <= have if '...' in values else have == printed, (id, have, source)

def test_paper_and_released_code_stand_side_by_side():
    def methods(id, **where):
        return {l['method']: s.method for l, s in CATALOGUE[id].grid('paper')
                if all(l[k] == v for k, v in where.items())}
    both = methods('feddecorr/table1', data='cifar100')
    assert "beta=0.1" in both['MOON+FedDecorr'] and "beta=0.05" in both['MOON+FedDecorr (released)']
    assert "tau=0.5" in both['MOON'] and "tau=1.0" in both['MOON (released)']
    assert both['FedProx (released)'] == both['FedAvg'] != both['FedProx']
    assert "form='paper'" in both['FedAvg+FedDecorr (as printed)']
    ten = methods('feddecorr/tpami-table2', data='cifar10')
    assert 'momentum=0.9' in ten['FedAvgM (released)'] and 'FedNova' in ten
    for id in ('feddecorr/table8', 'feddecorr/tpami-table2', 'moon/table1', 'moon/table3'):
        form = methods(id, data='cifar10' if 'feddecorr' in id else 'cifar100')
        assert 'corrected' in form['SCAFFOLD'] and "form='paper'" in form['SCAFFOLD (as printed)'], id
    dse, gse = methods('feddse/table3.4', data='mnist'), methods('fedgse/table4.3', data='mnist')
    assert "mode='probs'" in dse['FedDSE T=1 (released)'] and "mode='softmax'" in dse['FedDSE T=1']
    assert "form='released'" in gse['FedGSE-SPL (released)'] and "form='released'" not in gse['FedGSE-SPL']
    own = {name: m for name, m in (dse | gse).items() if 'DSE(' in m or 'GSE(' in m}
    assert own and all(('OldCounts' in m) == ('(released)' in name) for name, m in own.items())
    for e in CATALOGUE.values(): # elsewhere a run is meant in one way, and no second row repeats the first
        rows = [(l, s) for l, s in e.grid('paper') if l.get('method') != row_name(l.get('method'))]
        assert all((*l.items(), s) not in {(*{**l, 'method': row_name(l['method'])}.items(), s)} for l, s in rows), e.id
        assert all(l.get('method') == row_name(l.get('method')) for c in ('embedded', 'short') for l, _ in e.grid(c))

def test_published_numbers_stand_beside_every_way_to_mean_a_row():
    rows = labelled(pd.DataFrame([dict(data='cifar100', alpha=.05, method=m, seed=0, accuracy_late=60.)
                                  for m in ('FedAvg+FedDecorr', 'FedAvg+FedDecorr (released)', 'FedAvgM')]))
    rows.attrs['labels'] = ['data', 'alpha', 'method', 'seed']
    t = compare_published(CATALOGUE['feddecorr/table1'], rows).set_index('method')
    paper = t['paper, cifar100']
    assert paper['FedAvg+FedDecorr'] == paper['FedAvg+FedDecorr (released)'] == 61.53 != paper['FedAvgM']
    assert t.difference.notna().all()

def test_no_difference_is_taken_from_times_in_an_unknown_unit():
    rows = labelled(pd.DataFrame([dict(data='cifar10', alpha=.5, method='FedAvg', seed=0, round_seconds=300.)]))
    rows.attrs['labels'] = ['data', 'alpha', 'method', 'seed']
    t = compare_published(CATALOGUE['feddecorr/table5'], rows)
    assert t['paper, cifar10'].tolist() == [6.7] and 'difference' not in t

def looked(made):
    "What a drawing shows: the table, or the pixels."
    if isinstance(made, pd.DataFrame): return made.to_csv()
    made.set_dpi(40)
    made.canvas.draw()
    pixels = bytes(made.canvas.buffer_rgba())
    plt.close(made)
    return pixels

@pytest.mark.parametrize('paper', ['feddecorr', 'moon', 'feddecomp', 'feddse', 'fedgse'])
def test_no_picture_is_drawn_twice(paper):
    groups = {}
    for e in CATALOGUE.values():
        if e.paper == paper: groups.setdefault(frozenset(address(s) for _, s in e.grid('embedded')), []).append(e)
    seen = {}
    for e in (e for group in groups.values() if len(group) > 1 for e in group if not repeats(e, 'embedded')):
        rows = results(e.grid('embedded'))[0]
        for name, draw in e.draws:
            if (made := draw(rows)) is None: continue
            shown = looked(made)
            assert shown not in seen, f'{e.id} {name} is {seen[shown]} once more: name it in like'
            seen[shown] = e.id

def test_what_is_not_drawn_again_says_where_it_is(tmp_path):
    e = CATALOGUE['feddecorr/table2']
    said = report_entry(e, 'embedded', to=tmp_path, out=ROOT/'results'/'catalogue')
    assert 'feddecorr/table1' in said.remarks and not said.tables and len(said.beside)
    assert repeats(e, 'paper') is None

# ---- claims and verdicts ----

def labelled(rows):
    rows.attrs['labels'] = ['data', 'method', 'seed']
    return rows

def given(**accuracies):
    "Rows of invented runs: the accuracies of each method, one a seed."
    return labelled(pd.DataFrame([dict(run=f'{m}-{i}', data='digits', method=m, seed=i, accuracy_late=float(v))
                                  for m, vs in accuracies.items() for i, v in enumerate(vs)]))

def invented(means, seeds=8, noise=.5):
    rng = np.random.default_rng(0)
    return given(**{m: v + noise*rng.standard_normal(seeds) for m, v in means.items()})

def gain(a, b, **more): return replace(ahead(dict(method=a), dict(method=b)), **more)

def test_the_four_verdicts():
    rows = given(A=[70.]*8, B=75 + np.arange(8)/10, C=70.1 + np.array([.5, -.4]*4))
    t = judge({'B': gain('B', 'A'), 'A': gain('A', 'B'), 'C': gain('C', 'A'), 'D': gain('D', 'A')}, rows)
    assert t.verdict.tolist() == ['holds', 'does not hold', 'undecided', 'not evaluated']
    assert t.test.tolist()[:3] == ['sign flips']*3 and t.measured[3] == 'there is no method=D here'
    needs = t['seeds to decide'].tolist()
    assert needs == ['', '', needs[2], ''] and 50 < int(needs[2]) < 200
    lost = [(dict(method='B', seed=7), None)]
    left = labelled(rows[(rows.method != 'B') | (rows.seed != 7)])
    part = judge({'B': gain('B', 'A'), 'C': gain('C', 'A')}, left, lost)
    assert part.seeds.tolist() == [7, 8] and part.test.tolist() == ['sequential', 'sign flips'] # C lacks nothing
    early = [(dict(method='B', seed=2), None)] # the order of the bets must not change when this seed arrives
    assert judge({'B': gain('B', 'A')}, labelled(rows[(rows.method != 'B') | (rows.seed != 2)]), early).seeds[0] == 2
    counts = {'B': replace(gain('B', 'A'), by=by_sign, whole=True)}
    assert judge(counts, rows, lost).verdict[0] == 'not evaluated'
    few = [(dict(method=m, seed=i), None) for m in 'AB' for i in range(7)]
    assert judge({'B': gain('B', 'A')}, labelled(rows[rows.seed == 7]), few).measured[0] == '14 results are missing'
    one = judge({'B': gain('B', 'A')}, labelled(rows[rows.seed == 0]))
    assert (one.verdict[0], one['seeds to decide'][0]) == ('undecided', 'one seed has no spread')

def test_three_seeds_rarely_decide_and_say_so():
    rows = given(A=[70, 71, 72], B=[71, 73, 73])          # ahead in every seed, by more than two standard errors
    t = judge({'B': gain('B', 'A')}, rows)
    assert t.test[0] == 't' and t.verdict[0] == 'undecided' and t.p[0] > LEVEL
    low, high = map(float, t.interval[0].split(' to '))
    assert low < 0 < high

def test_many_claims_ask_more_of_each():
    none = {f'X{i}': 70 + np.roll([.5, -.5, .3, -.4, .2, -.1, .6, -.6], i) for i in range(12)}
    rows = given(A=[70]*8, B=70 + np.array([1, 1.2, .8, 1.1, .9, 1, 1.3, -.2]), **none)
    alone = judge({'B': gain('B', 'A')}, rows)
    among = judge({'B': gain('B', 'A'), **{f'X{i}': gain(f'X{i}', 'A') for i in range(12)}}, rows)
    assert alone.verdict[0] == 'holds' and among.verdict[0] == 'undecided'
    assert among.p[0] == alone.p[0] < among.adjusted[0]
    again = judge({'B': gain('B', 'A'), **{f'X0 again {i}': gain('X0', 'A') for i in range(12)}}, rows)
    assert again.verdict[0] == 'holds' and again.verdict[1] == 'undecided'          # two claims, not thirteen
    unsure = judge({'B': gain('B', 'A', of=lambda rows: [1., -1., 2., .5, 3., -.5, 1., 0.])}, rows)
    as_well = judge({'B': gain('B', 'A', of=lambda rows: [1., -1., 2., .5, 3., -.5, 1., 0.]),
                     **{f'X{i}': gain(f'X{i}', 'A') for i in range(12)}}, rows)
    assert 8 < int(unsure['seeds to decide'][0]) < int(as_well['seeds to decide'][0])
    repeats = judge({'B': gain('B', 'A'), **{f'B again {i}': gain('B', 'A') for i in range(12)}}, rows)
    assert set(repeats.verdict) == {'holds'} and repeats.same.nunique() == 1       # repeats are one claim
    assert tally(repeats) == '1 of 1 claims hold here, 0 do not, 0 are undecided, 0 not evaluated.'

def test_our_questions_are_not_counted_as_the_papers():
    rows = invented(dict(A=70., B=75.))
    t = judge({'B': gain('B', 'A')} | ours({'ours': gain('A', 'B')}), rows)
    assert t.whose.tolist() == ['paper', 'ours'] and t.verdict.tolist() == ['holds', 'does not hold']
    assert tally(t).startswith('1 of 1 claims hold here, 0 do not')

def test_equal_numbers_of_other_runs_are_another_claim():
    rows = invented(dict(A=70., B=71.), noise=0.)
    twin = labelled(pd.concat([rows, rows.assign(method=rows.method + '2', run=rows.run + '2')]))
    t = judge({'1': gain('B', 'A'), '2': gain('B2', 'A2'), '3': gain('B', 'A', unit='%')}, twin)
    assert t.same.tolist() == [0, 1, 0]

def test_a_claim_of_no_difference_needs_evidence():
    rows = invented(dict(A=70., B=70., C=73.), noise=.3)
    level = lambda a, b, rows=rows: judge({'': gain(a, b, by=within(1.))}, rows).verdict[0]
    assert (level('B', 'A'), level('C', 'A'), level('A', 'C')) == ('holds', 'does not hold', 'does not hold')
    assert level('B', 'A', invented(dict(A=70., B=70.), seeds=3, noise=3.)) == 'undecided'

def test_false_alarms_of_a_claim_of_no_difference():
    rng = np.random.default_rng(0)
    at_the_edge = rng.standard_normal((600, 8)) + 1.
    holds = [e.side > 0 and e.p <= LEVEL for e in (within(1.)(d, paired_test) for d in at_the_edge)]
    against = [e.side < 0 and e.p <= LEVEL for e in (within(1.)(d, paired_test) for d in at_the_edge)]
    assert np.mean(holds) < LEVEL and np.mean(against) < LEVEL

def test_what_is_counted_has_no_seeds():
    one = given(A=[3])
    t = judge({'large': Numbers(lambda rows: [2.], '', by=by_sign)}, one)
    assert t.verdict[0] == 'holds' and math.isnan(t.p[0]) and t.interval[0] == ''

def test_the_claims_of_a_paper_are_judged_together():
    whole = verdicts('feddecorr')
    one = about_claims('feddecorr/table6')
    part = whole[whole.entry == 'feddecorr/table6']
    assert one.adjusted.tolist() == part.adjusted.tolist() and one.verdict.tolist() == part.verdict.tolist()
    e = CATALOGUE['feddecorr/table6']
    test = sequential_test if looks(e, 'embedded', 'results/catalogue')[1] else paired_test
    alone = judge(e.claims, *found_rows(e, 'embedded'), e.derive, test)
    assert alone.p.tolist() == part.p.tolist() and alone.adjusted.tolist() != part.adjusted.tolist()
    pairs = [('fig2a', 'fig9'), ('table1', 'table2'), ('table8', 'table9')]
    for a, b in pairs:
        first, again = (set(whole[whole.entry == f'feddecorr/{e}'].same) for e in (a, b))
        assert again <= first, (a, b)

def about_claims(id): return judge_entries([CATALOGUE[id]], 'embedded')

def test_a_run_that_was_tested_only_at_its_end_is_compared_at_its_end(tmp_path):
    grid = [(dict(data='digits', method=m, seed=0), Setting(seed=k)) for k, m in enumerate('AB')]
    history = dict(A=[.5, .6, .9, .7, .2, .8], B=[None]*5 + [.6])
    for labels, s in grid:
        write_json(tmp_path/address(s), dict(setting=plain(s), history=dict(accuracy=history[labels['method']]),
                                             measured=dict(curve=[])))
    rows = results(grid, tmp_path)[0]
    assert rows.accuracy_late.tolist() == [80., 60.] and 'last round' in rows.attrs['judged']['accuracy']
    alone = results(grid[:1], tmp_path)[0]
    assert alone.accuracy_late.tolist() == [50.] and alone.accuracy_best.tolist() == [90.]
    assert 'last third' in alone.attrs['judged']['accuracy']

def test_intervals_stand_beside_the_papers_numbers(tmp_path):
    e = CATALOGUE['feddecorr/table10']
    t = compare_published(e, results(select(e, 'embedded'))[0])
    assert {'ours', 'margin', 'last', 'best', 'seeds'} <= set(t) and (t.best >= t.ours).all() and (t.margin > 0).all()
    low, high = t['a new run from'], t.to
    assert ((low < t.ours - t.margin) | (low == 0)).all() and ((high > t.ours + t.margin) | (high == 100)).all()
    assert (low >= 0).all() and (high <= 100).all()

# what is not an average over seeds: seconds, a held-out seed, counts of samples, parameters; and a job of its own
FEWER = 'feddecorr/table5', 'moon/tuning', 'moon/fig5', 'fedgse/table4.2', 'collapse', 'depth/beta'

@pytest.mark.parametrize('id', [e.id for e in CATALOGUE.values() if e.id not in FEWER])
def test_a_judged_entry_has_twenty_seeds_that_are_all_there(id):
    rows, missing = found_rows(CATALOGUE[id], 'embedded')
    assert not missing and rows.seed.nunique() >= 20

@pytest.mark.slow
def test_a_seed_whose_partition_takes_long_to_find_has_one():
    [crowded, *_] = {s for _, s in select(CATALOGUE['feddecorr/table3'], 'embedded') if s.clients == 50}
    seed = 11 # the first ten thousand tables leave a client with fewer than two samples
    assert min(map(len, clients_of(replace(crowded, seed=seed), task_of(crowded.data))[0])) >= 2

ANYWHERE = 'feddecorr/table10', 'moon/table5', 'feddecomp/order' # one of each of three papers, seconds a run

@pytest.mark.slow
@pytest.mark.parametrize('id', ANYWHERE)
def test_a_fresh_seed_lies_where_the_committed_ones_say_also_on_another_processor(id, tmp_path):
    e = CATALOGUE[id]
    ours = means(e, found_rows(e, 'embedded')[0])
    fresh = [(dict(labels, seed=1000), replace(s, seed=1000)) for labels, s in with_seeds(e.grid('embedded'), 1)]
    file = tmp_path/'settings.pickle'
    file.write_bytes(pickle.dumps([s for _, s in fresh]))
    job = ('import pickle, sys; from fedlit.papers.settings import run_settings; '
           'run_settings(pickle.load(open(sys.argv[1], "rb")), sys.argv[2], 1, False, progress=False)')
    subprocess.run([sys.executable, '-c', job, file, tmp_path/'out'], check=True,
                   env={**os.environ, 'ATEN_CPU_CAPABILITY': 'default', 'OMP_NUM_THREADS': '1'})
    new = means(e, results(fresh, tmp_path/'out')[0])
    assert len(new) == len(ours) and (new.seeds == 1).all()
    inside = (ours['a new run from'] <= new.ours) & (new.ours <= ours.to) | ours.to.isna() # where all were the same
    bad = ours.assign(fresh=new.ours)[~inside]
    assert not len(bad), bad.to_string()

def test_where_a_new_run_lies_stands_wherever_an_entry_shows_accuracies(monkeypatch):
    import IPython.display
    seen = []
    monkeypatch.setattr(IPython.display, 'display', seen.append)
    columns = lambda: [set(t) for t in seen if isinstance(t, pd.DataFrame)]
    for id in ('feddecorr/table10', 'moon/table5'): # with published numbers and without
        seen.clear()
        show(id)
        assert any({'ours', 'a new run from', 'to'} <= c for c in columns()), id
    seen.clear()
    show('fedgse/table4.2') # parameters
    assert not any('ours' in c for c in columns())

# ---- more seeds ----

def test_more_seeds_are_the_same_settings():
    for e in CATALOGUE.values():
        grid = e.grid('embedded')
        n = len({s.seed for _, s in grid})
        if all(s.rounds for _, s in grid): assert sorted(map(str, with_seeds(grid, n))) == sorted(map(str, grid)), e.id
        more = with_seeds(grid, n + 2)
        assert {address(s) for _, s in grid} <= {address(s) for _, s in more}
        assert len(more) == (len(grid)*(n + 2)/n if any(s.rounds for _, s in grid) else len(grid)), e.id

def test_ten_seeds_by_command_are_one_look_and_three_more_are_two(small, capsys):
    main(['reproduce', 'tiny/fig1', '--seeds', '4', '--processes', '1', '--quiet'])
    assert '8 runs at scale embedded, 8 of them missing' in capsys.readouterr().out
    main(['report', 'tiny/fig1'])
    assert '8 of 8 runs' in capsys.readouterr().out
    out = Path('results/catalogue')
    assert looks(small, 'embedded', out) == ([4], False) and judge_entries([small], 'embedded', out=out).test[0] == 't'
    assert judge_entries([small], 'embedded', out=out).seeds[0] == 4
    main(['reproduce', 'tiny/fig1', '--seeds', '5', '--processes', '1', '--quiet'])
    assert '10 runs at scale embedded, 2 of them missing' in capsys.readouterr().out
    assert looks(small, 'embedded', out) == ([4, 5], True)
    assert judge_entries([small], 'embedded', out=out).test[0] == 'sequential'
    main(['reproduce', 'tiny/fig1', '--processes', '1', '--quiet']) # without a number: those that were asked for last
    assert '10 runs at scale embedded, 0 of them missing' in capsys.readouterr().out
    gone = out/address(select(small, 'embedded', seeds=5)[-1][1])
    gone.unlink()
    main(['report', 'tiny/fig1'])
    printed = capsys.readouterr().out
    assert str(gone) in printed and '9 of 10 runs' in printed
    assert judge_entries([small], 'embedded', out=out).seeds[0] == 4

@pytest.mark.parametrize('whole,seen', [(3, ([3, 4], True)), (2, ([2, 4], True)), (1, ([4], False))])
def test_two_seeds_that_are_whole_count_as_a_look(small, monkeypatch, whole, seen):
    e, out = trained(monkeypatch, small, 3)
    for labels, s in select(e, 'embedded'):
        if labels['seed'] >= whole: (out/address(s)).unlink()
    main(['reproduce', 'tiny/fig1', '--seeds', '4', '--quiet'])
    assert looks(small, 'embedded', out) == seen

def test_a_further_seed_measures_what_all_entries_want(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(catalogue, 'run_settings', lambda todo, *a, **kw: asked.extend(todo) or 0)
    reproduce(['feddecorr/fig2a'], out=tmp_path, seeds=5)
    assert {s.seed for s in asked} == set(range(5)) and all('each_spectrum' in s.measure for s in asked) # for fig2b

def fake(monkeypatch, effect):
    "Runs that take no time: FedDecorr is ahead by `effect` standard deviations."
    def instead(todo, out, *a, **kw):
        for s in todo:
            rng = np.random.default_rng([s.seed, len(s.method)])
            accuracy = .5 + .01*rng.standard_normal() + (.01*effect if 'FedDecorr' in s.method else 0)
            write_json(Path(out)/address(s), dict(setting=plain(s), history=dict(accuracy=[accuracy]*s.rounds),
                                                  measured={k: [] for k in s.measure}))
        return 0
    monkeypatch.setattr(catalogue, 'run_settings', instead)

def trained(monkeypatch, small, seeds):
    "The small entry with runs of so many seeds that take no time, of which nothing is noted; and where they are."
    fake(monkeypatch, 1)
    monkeypatch.setitem(CATALOGUE, small.id, replace(small, grid=lambda scale: with_seeds(small.grid(scale), seeds)))
    main(['reproduce', 'tiny/fig1', '--quiet'])
    return CATALOGUE[small.id], Path('results/catalogue')

def test_until_decided_stops_when_it_is(small, monkeypatch, capsys):
    fake(monkeypatch, 6)
    main(['reproduce', 'tiny/fig1', '--until-decided', '--max-seeds', '40', '--quiet'])
    out = capsys.readouterr().out
    seeds = [int(n) for n in re.findall(r'(\d+) seeds,', out)]
    assert seeds == list(range(3, seeds[-1]+1, 3)) and 6 < seeds[-1] < 40 and '1 of 1 claims decided' in out
    assert looks(small, 'embedded', 'results/catalogue') == (seeds, True)
    t = judge_entries([small], 'embedded', out='results/catalogue')
    assert t.verdict[0] == 'holds' and t.test[0] == 'sequential' and t.verdict[1] == 'not evaluated'
    files = len(list(Path('results').rglob('*.json')))
    main(['reproduce', 'tiny/fig1', '--until-decided', '--quiet'])                # nothing more to do
    assert files == len(list(Path('results').rglob('*.json')))

def test_until_decided_gives_up(small, monkeypatch, capsys):
    fake(monkeypatch, 0)
    assert until_decided(['tiny/fig1'], max_seeds=7, progress=False) == 0
    assert re.findall(r'(\d+) seeds, 0 of 1', capsys.readouterr().out) == ['3', '6', '7']
    assert judge_entries([small], 'embedded', out='results/catalogue').verdict[0] == 'undecided'

def test_a_misspelt_entry_beside_all_is_named():
    assert entries('all', 'moon') == entries() and entries('moon', 'all')[0].paper == 'moon'
    with pytest.raises(ValueError, match="no entry 'moon/fig99'"): entries('all', 'moon/fig99')

def test_seeds_of_a_convolution_train_in_one_stack_on_an_accelerator_alone(monkeypatch):
    "Which `auto` may be, and that is what a run without a device asks for."
    convolutions = [replace(Setting(model='cnn_bn', options=()), seed=i) for i in range(4)]
    def sizes(**kw): return [len(some) for some in _groups(convolutions, 2, kw)]
    for there, stacks in ((False, [1]*4), (True, [2, 2])):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda there=there: there)
        monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
        assert [sizes(), sizes(device='auto'), sizes(device='cpu')] == [stacks, stacks, [1]*4]

SOME_FAIL = '''import multiprocessing, sys
from pathlib import Path
from fedlit.papers.settings import work_off
def work(item):
    work.kept = multiprocessing.get_context('spawn').RLock() # what a progress bar makes
    if item % 2: raise ValueError(f'no {item}')
    Path(sys.argv[1], str(item)).touch()
if __name__ == '__main__': work_off(work, [1, 2, 3, 4], int(sys.argv[2]), progress=False)
'''

@pytest.mark.parametrize('processes', [1, 2])
def test_one_run_that_fails_stops_no_other_and_processes_end_by_themselves(tmp_path, processes):
    """The rest is worked off first, and then it says what was wrong, with the worker's traceback; and Python does not
    complain, when everything is done, of semaphores that were leaked."""
    (tmp_path/'some.py').write_text(SOME_FAIL, encoding='utf-8')
    command = [sys.executable, tmp_path/'some.py', tmp_path, str(processes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and 'ValueError: no 1' in done.stderr and "raise ValueError(f'no {item}')" in done.stderr
    assert (tmp_path/'2').exists() and (tmp_path/'4').exists() and 'leaked' not in done.stderr

KILLED = '''import os, signal, sys
from fedlit.papers.settings import work_off
def work(item):
    if item == 3: os.kill(os.getpid(), signal.SIGKILL)
if __name__ == '__main__': work_off(work, [1, 2, 3, 4], 2, progress=False)
'''

@pytest.mark.skipif(os.name == 'nt', reason='Windows has no such signal')
def test_a_process_that_is_killed_is_named_and_nobody_waits_for_it(tmp_path):
    "As by a system that has run out of memory: a pool of Python's would wait for ever."
    (tmp_path/'some.py').write_text(KILLED, encoding='utf-8')
    done = subprocess.run([sys.executable, tmp_path/'some.py'], capture_output=True, text=True, timeout=120)
    assert done.returncode and 'ChildProcessError: one of 2 processes was killed' in done.stderr

# ---- one rule for who judges ----

def of(table, claim): return table.set_index('claim').loc[claim, ['interval', 'seeds', 'test', 'p']].tolist()

def test_a_claim_is_judged_alike_in_its_entry_in_a_part_of_it_and_in_the_main_job():
    main_job = committed_verdicts('short')
    for id, claim, there in (
            ('feddecorr/table1', 'FedDecorr raises the accuracy of FedAvg (alpha 0.05)',
             'Table 1: FedDecorr raises the accuracy of FedAvg'),
            ('feddecorr/fig2a',
             'uneven labels tend to leave the global model fewer dimensions '
             '(number of values above 0.01 against alpha)',
             '')):
        whole = of(judge_entries([CATALOGUE[id]], 'short'), claim)
        data = of(judge_entries([CATALOGUE[id]], 'short', 'data=small_cifar10'), claim)
        assert whole == data and whole[2] == 'sequential'
        part = judge_entries([CATALOGUE[id]], 'short', 'alpha=0.05')
        assert not there or of(part, claim) == whole == of(main_job, there)
    part = judge_entries([CATALOGUE['feddecorr/fig3']], 'short', 'alpha=0.05')
    assert (of(part, "FedDecorr raises the global model's number of values above 0.01")
            == of(main_job, "Fig. 3: FedDecorr raises the global model's number of values above 0.01"))

def test_a_part_of_an_entry_has_the_seeds_and_the_looks_of_the_whole(small):
    note_look(small, 'embedded', 'results/catalogue', seeds=4)
    part = 'method=FedAvg'
    assert looks(small, 'embedded', 'results/catalogue', part) == ([4], False)
    note_look(small, 'embedded', 'results/catalogue', part, seeds=6)
    assert looks(small, 'embedded', 'results/catalogue', part) == ([4, 6], True)
    assert looks(small, 'embedded', 'results/catalogue') == ([4], True) # some of its runs were looked at twice

def test_a_report_on_what_is_incomplete_is_a_look(small, monkeypatch, capsys):
    e, out = trained(monkeypatch, small, 7)
    last = {f: f.read_bytes() for f in [out/address(s) for l, s in select(e, 'embedded') if l['seed'] == 6]}
    main(['report', 'tiny/fig1'])
    assert looks(e, 'embedded', out) == ([None], False)
    assert judge_entries([e], 'embedded', out=out).test[0] == 'sign flips'
    for f in last: f.unlink()
    main(['report', 'tiny/fig1'])
    for f, content in last.items(): f.write_bytes(content)
    assert looks(e, 'embedded', out) == ([None], True)
    assert judge_entries([e], 'embedded', out=out).test[0] == 'sequential'

def test_a_report_needs_no_leave_to_write_beside_the_results(small, monkeypatch, capsys):
    from fedlit.papers import entries
    e, out = trained(monkeypatch, small, 7)
    for l, s in select(e, 'embedded'): (out/address(s)).unlink() if l['seed'] == 6 else None
    def refused(*args): raise OSError(30, 'Read-only file system')
    monkeypatch.setattr(entries, 'write_json', refused)
    with pytest.warns(UserWarning, match='looks.json.*Read-only'): main(['report', 'tiny/fig1', '--to', 'elsewhere'])
    assert 'claims' in capsys.readouterr().out and Path('elsewhere/embedded/tiny').exists()

def test_what_is_shown_before_it_is_complete_is_noted():
    "Otherwise the last runs to come would turn a claim that was looked at into one that was not."
    for e in CATALOGUE.values():
        rows, missing = collapse.committed_results('short') if e.id == 'collapse' else found_rows(e, 'short')
        early = [w.claim for w in evaluate(e.claims, rows, missing, e.derive)
                 if w.evidence and w.evidence.test == 'sequential' and len(w.differences) > 1]
        assert not early or looks(e, 'short', result_path('catalogue'))[1], f'note_seen: {e.id}, {early}'

@pytest.mark.parametrize('name', ['claims', 'accuracy', 'beside'])
def test_the_tables_beside_the_main_jobs_results_are_those_of_its_results(name, tmp_path):
    e, rows, verdicts = CATALOGUE['collapse'], collapse.committed_results()[0], collapse.committed_verdicts()
    write = dict(claims=lambda: write_table(verdict_view(verdicts.assign(entry=e.id)), tmp_path/'now.csv'),
                 accuracy=lambda: write_table(e.draws[0][1](rows), tmp_path/'now.csv', index=True),
                 beside=lambda: write_table(compare_published(e, rows), tmp_path/'now.csv'))
    now, kept = pd.read_csv(write[name]()), pd.read_csv(result_path('digits')/f'{name}.csv')
    pd.testing.assert_frame_equal(now, kept) # fedlit report collapse --out results/digits

def test_the_light_bands_of_several_curves_survive_in_a_small_picture():
    def falls(by): return np.outer([.5, 1., 2.], 10.**(-by*np.arange(20)))
    def drawn():
        fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
        spectra({f'alpha {i}': falls(.05*i) for i in (1, 2, 3, 4)}, ax=left, threshold=1e-2)
        spectra({'FedAvg': falls(.2), '+ FedDecorr': falls(.1)}, ax=right, accent='+ FedDecorr')
        return fig
    def tinted(png): return (np.asarray(Image.open(io.BytesIO(png)).convert('RGB')).min(2) < 245).mean()
    assert tinted(small_picture(drawn()).data) > .95*tinted(png_of(drawn(), 150))

def test_a_verdict_is_not_beside_too_few_seeds():
    of = lambda name, values: labelled(pd.DataFrame(dict(data='digits', method=name, seed=range(len(values)),
                                                         accuracy_late=values)))
    rows = labelled(pd.concat([of('A', [0.]*6), of('B', [.1, .2, .5, 1., 2., 4.])], ignore_index=True))
    told = judge({'B': ahead('B', 'A')}, rows, test=sequential_test).iloc[0]
    assert told.verdict == 'holds' and told.interval == ''
    few = judge({'B': ahead('B', 'A')}, labelled(rows[rows.seed < 4]), test=sequential_test)
    assert few.verdict[0] == 'undecided' and few.interval[0] == 'too few seeds'

def test_two_processes_lose_no_entry_of_each_other(tmp_path):
    pytest.importorskip('fcntl')
    note = lambda i: remember(tmp_path/'x', f'{i}', repeated=False)
    with ThreadPoolExecutor(4) as pool: list(pool.map(note, range(40)))
    assert len(result(tmp_path/'x'/'looks.json')) == 40
