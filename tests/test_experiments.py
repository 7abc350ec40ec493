"Domain and sub-model experiments: what they run, what they write, what they say when something is missing."
import json
import pytest
from dataclasses import replace
from fedlit.data import load
from fedlit.domains import DIGITS_DOMAINS, gains, main as domains_main, table_iii
from fedlit.methods import FedBN
from fedlit.partition import classes_per_client
from fedlit.reproduce import run_all
from fedlit.round import Local
from fedlit.thesis import TABLES, Setting, grid, public_set, result_file, results, run_setting, run_settings, share

def test_domains_run_resume_and_report(tmp_path):
    small = replace(DIGITS_DOMAINS, methods=DIGITS_DOMAINS.methods[:1] + DIGITS_DOMAINS.methods[-1:], seeds=(0, 1), rounds=1, local=Local(epochs=1))
    df = run_all(small, tmp_path, processes=1, progress=False)
    assert len(df) == 8 and all(len(o) == 4 for o in df.own)
    stamps = {f: f.stat().st_mtime_ns for f in tmp_path.glob('runs/*.json')}
    run_all(small, tmp_path, processes=1, progress=False)
    assert stamps == {f: f.stat().st_mtime_ns for f in tmp_path.glob('runs/*.json')}
    t = table_iii(df)
    assert list(t.columns) == ['plain', 'negative', 'tilted', 'striped', 'mean'] and len(t) == 4
    g = gains(df)
    by = {(r.method, r.seed): r.personal for r in df.itertuples()}
    one = [100*(by[repr(FedBN() + DIGITS_DOMAINS.part), s] - by[repr(FedBN()), s]) for s in (0, 1)]
    assert g.loc['FedBN', 'gain'].startswith(f'{sum(one)/2:+.2f}')
    with pytest.raises(SystemExit): domains_main(['weekend'])

def test_one_domain_a_client():
    task = load('digits_domains')
    for c in DIGITS_DOMAINS.parts(task, 'domain', 0): assert len(task.domain_train[c].unique()) == 1

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

def test_settings():
    assert repr(Setting('FedRolex()').made()).startswith('FedRolex(rates=(1.0, 0.5, 0.25, 0.125, 0.0625)') and 'MaskedCE' in repr(Setting('FedRolex()').made())
    assert Setting('FedGSE(pool=200, samples=64)', rates=(.5,)).made().parts[0].rates == (.5,)
    assert share(.3) == (.5,)*3 + (.0625,)*7
    assert len(grid(('A()', 'B()'), classes=[2, 4])) == 2*2*3
    every = [s for v in TABLES.values() for s in v]
    assert len({result_file('x', s) for s in every}) == len(set(every))
    for s in every: s.made()

def test_results_are_files_and_missing_ones_are_named(tmp_path):
    s = Setting('HeteroFL()', rounds=2, clients=10, local=Local(epochs=1, batch_size=16))
    with pytest.raises(FileNotFoundError, match='1 of 1 results are missing.*HeteroFL.*python -m fedlit.thesis'): results([s], tmp_path)
    run_settings([s, s], tmp_path, processes=1)
    (file,) = tmp_path.glob('*.json')
    stamp = file.stat().st_mtime_ns
    run_settings([s], tmp_path, processes=1)
    assert file.stat().st_mtime_ns == stamp
    row = json.loads(file.read_text())
    assert row['setting']['method'] == 'HeteroFL()' and row['accuracy'] == pytest.approx(run_setting(s)['accuracy'], abs=1e-6)
    assert results([s], tmp_path).accuracy[0] == pytest.approx(100*row['accuracy'])
