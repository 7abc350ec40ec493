"A table and a folder of one's own, in Python and on the command line."
import json, numpy as np, pandas as pd, pytest, torch, warnings
from dataclasses import replace
from PIL import Image
from fedlit.cli import main
from fedlit.data import Task, load, samples
from fedlit.ground.readers import CHARACTERS
from fedlit.local import Local
from fedlit.result import Run
from fedlit.setting import Setting, task_of
from fedlit.compare import compare, experiment
from fedlit.scores import tests_of as own_tests
from fedlit.run import federate
from fedlit.partition import iid, dirichlet, by_owner
from fedlit.models import build
from fedlit.method import FedAvg

@pytest.fixture
def wards():
    rng = np.random.default_rng(0)
    n = 120
    age, kind = rng.permutation(n) + 20, rng.choice(['a', 'b', 'c'], n)
    return pd.DataFrame(dict(age=age, fixed=1., kind=kind, late=rng.random(n) < .3, days=age/10 + (kind == 'a'),
                             again=(age > 90).astype(int), room=rng.integers(0, 2, n), grade=rng.integers(1, 7, n),
                             clinic=rng.choice(['north', 'south', 'west'], n)))

def test_who_leaves_out_the_number_of_classes_is_told_the_largest_label():
    x, y = torch.randn(8, 3), torch.arange(8) % 4
    with pytest.raises(ValueError, match='classes=None, .* the largest label is 3'): Task('mine', x, y, x[:2], y[:2])

def test_columns_become_numbers(wards):
    task = Task.from_table(wards, y='days', x=['age', 'fixed', 'kind', 'late'])
    assert task.columns == ('age', 'fixed', 'late', 'kind_a', 'kind_b', 'kind_c') and task.target == 'numbers'
    seen = task.normalise(task.x_train)
    assert seen.mean(0).abs().max() < 1e-5 and (seen[:, 1] == 0).all() # a column that never changes
    assert (seen.std(0, correction=0)[[0, 2, 3]] - 1).abs().max() < 1e-4
    assert len(task.y_test) == 24 and len(task.y_train) == 96
    whole = pd.concat([wards.days]*1).to_numpy(np.float32)
    assert sorted(torch.cat([task.y_train, task.y_test])[:, 0].tolist()) == pytest.approx(sorted(whole.tolist()))

def test_rows_keep_together(wards):
    "Samples, targets and owners of a row, in a file as in a frame."
    wards['days'] = wards.age*2. + wards.clinic.map(dict(north=0, south=1000, west=2000))
    task = Task.from_table(wards, y='days', x=['age'], owner='clinic')
    for part in 'train', 'test':
        x, y, d = (getattr(task, f'{k}_{part}') for k in ('x', 'y', 'domain'))
        assert torch.equal(y[:, 0], 2*x[:, 0] + 1000*d)
    assert task.domains == ('north', 'south', 'west')
    share = task.domain_test.bincount()/torch.tensor(wards.clinic.value_counts().sort_index().to_numpy())
    assert (share - .2).abs().max() < .05

@pytest.mark.parametrize('y, target, classes', [('grade', 'class', 6), ('kind', 'class', 3), ('days', 'numbers', 1),
                                                (['again', 'late'], 'labels', 2), (['days', 'age'], 'numbers', 2)])
def test_what_a_column_says_of_itself(wards, y, target, classes):
    task = Task.from_table(wards, y=y, owner='clinic')
    assert (task.target, task.classes) == (target, classes)
    assert not {*([y] if isinstance(y, str) else y), 'clinic'} & {*task.columns}

def test_what_is_said_of_a_column(wards):
    with pytest.raises(ValueError, match="'age' holds .* different whole numbers; say target='numbers'"):
        Task.from_table(wards, y='age')
    assert Task.from_table(wards, y='age', target='numbers').target == 'numbers'
    assert Task.from_table(wards, y='age', target='class').classes == wards.age.nunique()
    assert Task.from_table(wards, y='again', target='labels').y_train.shape[1] == 1

@pytest.mark.parametrize('given, said', [
    (dict(y='dayz'), "no column 'dayz'; there are age, fixed"),
    (dict(y='days', x=['age', 'nothing']), "no column 'nothing'"),
    (dict(y='days', owner='doctor'), "no column 'doctor'"),
    (dict(y='days', test=0), r'test=0 of 120 samples, but it must be a share in \(0, 1\)'),
    (dict(y='days', test='half'), 'must be a share'),
    (dict(y='days', x=['age', 'days']), "'days' is asked for twice"),
    (dict(y='days', x=['age', 'age']), "'age' is asked for twice"),
    (dict(y='clinic', owner='clinic'), "'clinic' is asked for twice"),
    (dict(y='days', x=[]), 'no column is left'),
    (dict(y=['kind', 'again']), "'kind' of y holds text"),
    (dict(y=['late', 'again'], target='class'), "target='class' is for one column, but y names late, again"),
    (dict(y='kind', target='numbers'), "target='numbers' is for numbers, but column 'kind' holds text"),
    (dict(y='kind', target='labels'), "target='labels' is for numbers"),
    (dict(y='days', test=.999), 'leave some to train on')])
def test_what_a_table_is_refused_for(wards, given, said):
    with pytest.raises(ValueError, match=said): Task.from_table(wards, **given)

@pytest.mark.parametrize('change, words', [
    (lambda w: w.assign(pair=[[1, 2]]*len(w)), r"'pair' holds \[1, 2\].*x="),
    (lambda w: w.assign(wave=1 + 2j), r"'wave' holds \(1\+2j\).*x="),
    (lambda w: w.iloc[:0], 'the table has no rows'),
    (lambda w: w.rename(columns={'fixed': 'age'}), "several columns 'age'"),
    (lambda w: pd.concat({c: w[[c]] for c in w}, axis=1), "several columns 'days'")])
def test_what_a_table_may_not_hold(wards, change, words):
    with pytest.raises(ValueError, match=words): Task.from_table(change(wards), y='days')

def test_missing_values_and_too_many_texts(wards, tmp_path):
    wards.loc[3, 'age'] = np.nan
    with pytest.raises(ValueError, match="'age' lacks a value in 1 of 120 rows"): Task.from_table(wards, y='days')
    wards['age'], wards['name'] = 1., [f'patient {i}' for i in range(120)]
    with pytest.raises(ValueError, match="'name' holds 120 different texts"): Task.from_table(wards, y='days')
    with pytest.raises(ValueError, match="is no table; its name must end in .csv"):
        Task.from_table(tmp_path/'wards.xls', y='days')
    with pytest.raises(FileNotFoundError): Task.from_table(tmp_path/'wards.csv', y='days')

@pytest.mark.parametrize('kind', ['csv', 'tsv', 'parquet'])
def test_files(wards, kind, tmp_path):
    path = tmp_path/f'wards.{kind}'
    if kind == 'parquet':
        pytest.importorskip('pyarrow')
        wards.to_parquet(path)
    else: wards.to_csv(path, index=False, sep=dict(csv=',', tsv='\t')[kind])
    a, b = Task.from_table(wards, y='days'), load('table', path=str(path), y='days')
    assert b.name == 'wards' and torch.equal(a.x_train, b.x_train) and torch.equal(a.y_test, b.y_test)

@pytest.fixture
def pictures(tmp_path):
    "Two owners with two classes each; one class is dark."
    rng = np.random.default_rng(0)
    for owner in 'ann', 'bob':
        for k, c in enumerate(('dark', 'light')):
            (tmp_path/owner/c).mkdir(parents=True)
            for i in range(10):
                p = rng.integers(128*k, 128*k + 128, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(p).save(tmp_path/owner/c/f'{i}.png')
    return tmp_path

def test_folders(pictures):
    task = Task.from_folder(pictures, size=8)
    assert task.domains == ('ann', 'bob') and task.labels == ('dark', 'light') and task.x_train.shape == (32, 3, 8, 8)
    assert (task.x_train.float().mean((1, 2, 3)) > 128).long().equal(task.y_train)
    assert task.domain_test.bincount().tolist() == [4, 4] and task.y_test.bincount().tolist() == [4, 4]
    one = Task.from_folder(pictures/'ann', size=8, test=.5)
    assert one.domains is None and one.labels == ('dark', 'light') and len(one.y_test) == 10
    for share in 0, 1.5, 'half':
        with pytest.raises(ValueError, match='must be a share'): Task.from_folder(pictures, test=share)
    with pytest.raises(ValueError, match='has no folders; it must have one for each class'):
        Task.from_folder(pictures/'ann'/'dark')

def test_folders_of_a_published_split_are_its_halves(pictures):
    for a, b in (('ann', 'Train'), ('bob', 'test')): (pictures/a).rename(pictures/b)
    (pictures/'test'/'light'/'0.png').unlink()
    task = Task.from_folder(pictures, size=8)
    assert task.domains is None and task.labels == ('dark', 'light')
    assert task.y_train.bincount().tolist() == [10, 10] and task.y_test.bincount().tolist() == [10, 9]
    (pictures/'test').rename(pictures/'val')
    with pytest.raises(ValueError, match='the folders Train, val.* train and test.*task.validation'):
        Task.from_folder(pictures, size=8)
    (pictures/'val').rename(pictures/'bob')
    with pytest.raises(ValueError, match='Train, bob'): Task.from_folder(pictures, size=8)

def fed(*words): # what it ends with: 0, or what is wrong
    try: main(['run', *map(str, words), '--quiet', '--rounds', '2', '--epochs', '1'])
    except SystemExit as e: return e.code
    return 0

def test_a_table_on_the_command_line(wards, tmp_path, capsys):
    wards.to_csv(tmp_path/'wards.csv', index=False)
    where = tmp_path/'wards.csv'
    assert not fed('--data', where, '--y', 'days', '--owner', 'clinic', '--partition', 'by_owner', '--clients', 3,
                   '--method', 'FedProx(mu=0.1)', '--save', tmp_path/'run.safetensors')
    assert 'mse' in capsys.readouterr().out
    run = Run.load(tmp_path/'run.safetensors')
    again = run.federation() # in words, with the path
    assert [len(c) for c in again.clients] == torch.bincount(again.task.domain_train).tolist()
    assert torch.equal(again.run().state.params['head.weight'], run.state.params['head.weight'])
    assert not fed('--data', where, '--y', 'again', 'late', '--alpha', 1, '--clients', 3)
    assert 'average_precision' in capsys.readouterr().out
    for words, said in {('--data', where): 'needs --y, the column to predict',
                        ('--y', 'days'): '--y belongs to a table',
                        ('--data', where, '--y', 'age'): "say target='numbers'",
                        ('--data', where, '--y', 'days', '--clients', 3, '--method', 'FedLC()'): 'one class'}.items():
        assert said in str(fed(*words)), words

def test_a_folder_on_the_command_line(pictures, capsys):
    assert not fed('--data', pictures, '--partition', 'by_owner', '--clients', 2)
    assert 'accuracy' in capsys.readouterr().out
    assert 'is a folder' in str(fed('--data', pictures, '--owner', 'x'))

def test_words_of_a_setting(wards, tmp_path):
    wards.to_csv(tmp_path/'wards.csv', index=False)
    words = f"table(path={str(tmp_path/'wards.csv')!r}, y='days', train=50, validation=0.2)"
    task = task_of(Setting(task=words).task)
    assert len(task.y_train) == 40 and len(task.y_val) == 10 and task.name == words

# ---- benchmarks ----

def leaf(folder, name, halves):
    for part, users in halves.items():
        (folder/'leaf'/'data'/name/'data'/part).mkdir(parents=True)
        for i, (user, (x, y)) in enumerate(users.items()): # a file each
            said = dict(users=[user], num_samples=[len(y)], user_data={user: dict(x=x, y=y)})
            (folder/'leaf'/'data'/name/'data'/part/f'all_data_{i}.json').write_text(json.dumps(said), encoding='utf-8')

def test_a_table_that_was_changed_is_read_anew(wards, tmp_path):
    words = f"table(path='{(path := tmp_path/'wards.csv')}', y='room')"
    wards.to_csv(path, index=False)
    assert len(task_of(words).y_train) == 96
    wards[:60].to_csv(path, index=False)
    assert len(task_of(words).y_train) == 48

def test_leaf_femnist(tmp_path):
    x = np.random.default_rng(0).random((5, 784))
    leaf(tmp_path, 'femnist', dict(train=dict(f0001=(x[:2].tolist(), [3, 61]), f0000=(x[2:4].tolist(), [0, 9])),
                                   test=dict(f0001=(x[4:].tolist(), [7]))))
    task = load('femnist', tmp_path)
    assert task.classes == 62 and task.domains == ('f0000', 'f0001') and task.x_train.shape == (4, 1, 28, 28)
    assert task.y_train.tolist() == [3, 61, 0, 9] and task.domain_train.tolist() == [1, 1, 0, 0]
    assert task.domain_test.tolist() == [1] and task.x_test[0, 0, 1, 0] == pytest.approx(x[4, 28])

def test_leaf_shakespeare(tmp_path):
    text = 'To be, or not to be: that is the question: whether it is nobler in the mind to s'
    assert len(text) == 80 == len(CHARACTERS)
    leaf(tmp_path, 'shakespeare', dict(train=dict(HAMLET=([text, text[1:] + 'u'], ['u', 'f']), GHOST=([text], ['*'])),
                                       test=dict(HAMLET=([text], ['u']))))
    task = load('shakespeare', tmp_path)
    back = ''.join(CHARACTERS[k] for k in task.x_train[0])
    assert back == text and CHARACTERS[task.y_train[0]] == 'u' and task.y_train[2] == 80 and task.classes == 81
    assert task.x_train.dtype == torch.int64 and task.domains == ('GHOST', 'HAMLET')

def test_digits5(tmp_path):
    savemat = pytest.importorskip('scipy.io').savemat
    rng, base = np.random.default_rng(0), tmp_path/'Digit-Five'
    base.mkdir()
    with pytest.raises(FileNotFoundError, match='mnist_data.mat, mnistm_with_label.mat'): load('digits5', tmp_path)
    images = lambda *shape: rng.integers(0, 256, shape, dtype=np.uint8)
    rows = lambda *y: np.eye(10)[list(y)]
    grey, m, cells = images(2, 28, 28, 1), images(2, 28, 28, 3), np.empty((2, 2), object)
    savemat(base/'mnist_data.mat', dict(train_28=grey, test_28=grey[:1], label_train=rows(4, 5), label_test=rows(4)))
    savemat(base/'mnistm_with_label.mat', dict(train=m, test=m[1:], label_train=rows(1, 0), label_test=rows(0)))
    for part in 'train', 'test': savemat(base/f'svhn_{part}_32x32.mat', dict(X=images(32, 32, 3, 2), y=[[10], [3]]))
    syn = images(2, 32, 32, 3)
    syn[0] = 7
    savemat(base/'syn_number.mat', dict(train_data=syn, test_data=syn, train_label=[[2], [6]], test_label=[[2], [6]]))
    for i in 0, 1: cells[i, 0], cells[i, 1] = np.full((2, 1, 28, 28), .5), np.array([[8], [9]])
    savemat(base/'usps_28x28.mat', dict(dataset=cells))
    task = load('digits5', tmp_path)
    assert task.y_train.tolist() == [4, 5, 1, 0, 0, 3, 2, 6, 8, 9] and task.y_test.tolist() == [4, 0, 0, 3, 2, 6, 8, 9]
    assert task.domain_train.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and task.domains[2] == 'svhn'
    assert task.x_train.shape == (10, 3, 28, 28) and (task.x_train[0] == torch.tensor(grey[0])[..., 0]).all()
    assert torch.equal(task.x_train[2], torch.tensor(m[0]).permute(2, 0, 1))
    assert (task.x_train[6] == 7).all() and (task.x_train[8] == 128).all() and task.mean == (.5, .5, .5)

# ---- what a first reader stumbled over ----

def test_floats_of_a_few_whole_numbers_are_classes(wards):
    assert Task.from_table(wards.assign(again=wards.again*1.), y='again').labels == ('0', '1')

def test_numbers_as_text_and_infinity(wards):
    with pytest.raises(ValueError, match="'age' holds numbers as text"):
        Task.from_table(wards.assign(age=wards.age.astype(str)), y='days')
    with pytest.raises(ValueError, match="'fixed' holds infinity"):
        Task.from_table(wards.assign(fixed=np.inf), y='days')
    assert Task.from_table(wards, y='days', x='age').columns == ('age',)

MINUTES = 1_700_000_000_000 + 60_000*np.arange(120) # Unix time in milliseconds
@pytest.mark.parametrize('column', [MINUTES, 2**40 + np.arange(120), MINUTES.astype(float), 1e300*np.arange(120),
                                    1e-300*np.arange(120), 2**53 + np.arange(120)], ids=range(6))
def test_a_column_whose_digits_float32_cannot_hold_is_named(wards, column):
    wards['time'] = column
    with pytest.raises(ValueError, match=r"'time'\] needs more digits than float32 has.*- frame\['time'\].min\(\)"):
        Task.from_table(wards, y='kind', x=['age', 'time'])
    with pytest.raises(ValueError, match="'time'\\] needs"): Task.from_table(wards, y='time', target='numbers')
    Task.from_table(wards, y='time', x=['age'], target='class') # labels are numbered
    wards['time'] = (wards.time - wards.time.min())/np.ptp(wards.time)
    assert len(Task.from_table(wards, y='kind', x=['time']).x_train.unique()) == 96

def test_arrays_whose_digits_float32_cannot_hold_are_named():
    x, time = torch.randn(120, 2), torch.from_numpy(1.7e9 + np.arange(120.))
    for y in (time, time.long()):
        with pytest.raises(ValueError, match=r'y_train needs more digits .* \(y_train - y_train.min\(\)\)'):
            Task('own', x, y, x, y, target='numbers')
    both = torch.stack([x[:, 0].double(), time], 1)
    with pytest.raises(ValueError, match=r'x_train\[:, 1\] needs more digits'): Task('own', both, x, both, x)
    Task('own', both - both.min(0).values, time - time.min(), both, time) # what is tested need not vary

EVEN = np.arange(120)
@pytest.mark.parametrize('column', [2**40*(EVEN % 2), [2.**40]*120, 1990 + EVEN % 30, 1_700_000_000 + 86_400*EVEN,
                                    52.52 + .001*np.random.default_rng(0).normal(size=120), 10.**(EVEN - 80.)/1e6,
                                    np.random.default_rng(0).random(120), 16_000_000 + EVEN], ids=range(8))
def test_ordinary_columns_are_rounded_without_harm(wards, column):
    Task.from_table(wards.assign(time=column), y='kind', x=['age', 'time'])

def test_a_column_of_times_is_no_text(wards):
    day = pd.Timestamp('2026-01-01') + pd.to_timedelta(wards.age, 'D')
    for times in day, day.dt.tz_localize('UTC'), day - day.min():
        with pytest.raises(ValueError, match=r"'day' holds times.*\(frame\['day'\] - frame\['day'\].min\(\)\).dt.tot"):
            Task.from_table(wards.assign(day=times), y='days', x=['age', 'day'])

@pytest.mark.parametrize('form', ['%Y-%m-%d', '%d.%m.%Y', '%m/%d/%Y %H:%M'])
def test_a_column_of_dates_in_a_file_is_no_text_either(wards, form, tmp_path):
    day = pd.Timestamp('2026-01-01') + pd.to_timedelta(wards.age % 28, 'D')
    wards.assign(day=day.dt.strftime(form)).to_csv(tmp_path/'wards.csv', index=False)
    with pytest.raises(ValueError, match="'day' holds dates as text"): Task.from_table(tmp_path/'wards.csv', y='days')

def test_an_index_that_was_saved_with_a_table_is_noticed(wards, tmp_path):
    path = tmp_path/'wards.CSV'
    wards.query('age > 60').to_csv(path)
    with pytest.warns(UserWarning, match="'Unnamed: 0' counts the rows"): Task.from_table(path, y='days')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Task.from_table(path, y='days', x=['age', 'kind'])
    assert not fed('--data', path, '--y', 'late', '--clients', 3) # whatever the case of the ending

def test_rows_of_a_later_day_are_read_as_the_first_were(wards):
    task = Task.from_table(wards, y='days', x=['age', 'kind', 'late'])
    run = federate(build('mlp', task, seed=0), task, iid(task.strata(), 3), FedAvg(), 1, progress=False)
    few = wards[wards.kind == 'b'].head(3) # no 'a', no 'c', and the outcome beside
    x = samples('x', few, task.columns)
    assert task.columns == ('age', 'late', 'kind_a', 'kind_b', 'kind_c')
    assert x[:, 3].tolist() == [1, 1, 1] and x[:, 0].tolist() == few.age.tolist()
    assert torch.equal(run.predict(few), run.predict(x))
    with pytest.raises(ValueError, match="'kind_z', a column and a value"): run.predict(few.assign(kind='z'))

@pytest.mark.parametrize('scaled', [True, False])
def test_whole_numbers_are_no_tokens_in_a_table(wards, scaled, tmp_path):
    few = wards[['age', 'room', 'grade']].head(3)
    task = Task.from_table(wards, y='days', x=list(few))
    if not scaled: task = replace(task, mean=None, std=None)
    run = federate(build('mlp', task, seed=0), task, iid(task.strata(), 3), FedAvg(), 1, Local(lr=1e-4), progress=False)
    run.save(tmp_path/'run')
    right = run.predict(few.astype(float))
    for r in run, Run.load(tmp_path/'run'):
        assert all(torch.equal(r.predict(v), right) for v in (few, few.values, few.values.tolist()))
        with pytest.raises(ValueError, match=r'a sample of x has shape \(2,\)'): r.predict([[30, 1]])
    if scaled: assert torch.equal(task.normalise(torch.tensor(few.values)), task.normalise(torch.tensor(few.values*1.)))

def test_a_column_of_numbers_is_told_from_what_a_text_became(wards, tmp_path):
    "Whatever their names: `kind_age` was no value of `kind`."
    wards = wards.assign(kind_age=wards.age/7, kind_b_c=wards.age/9)
    task = Task.from_table(wards, y='days', x=['kind', 'kind_age', 'kind_b_c'])
    run = federate(build('mlp', task, seed=0), task, iid(task.strata(), 3), FedAvg(), 1, progress=False)
    run.save(tmp_path/'run')
    few = wards[wards.kind == 'b'].head(3)
    for r in run, Run.load(tmp_path/'run'):
        assert torch.equal(r.predict(few), run.predict(samples('x', few, task.columns, task.texts)))
        for c in 'kind_age', 'kind_b_c', 'kind':
            with pytest.raises(ValueError, match=f"x has the column '{c}.*' missing"): r.predict(few.drop(columns=c))

@pytest.mark.parametrize('change, said', [
    (dict(kind=[None, 'a', 'b']), "x lacks a value in row 0 of column 'kind'"),
    (dict(age=[1., np.nan, 2.]), "x lacks a value in row 1 of column 'age'")])
def test_later_rows_that_lack_a_value_are_refused(wards, change, said):
    task = Task.from_table(wards, y='late', x=['age', 'kind'])
    run = federate(build('mlp', task, seed=0), task, iid(task.y_train, 3), FedAvg(), 1, progress=False)
    few = wards.head(3).reset_index(drop=True)
    with pytest.raises(ValueError, match=said): run.predict(few.assign(**change))
    with pytest.raises(ValueError, match="x has the column 'age' missing"): run.predict(few.drop(columns='age'))
    with pytest.raises(ValueError, match="x has the column 'kind_a' missing"): run.predict(few.drop(columns='kind'))
    x = samples('x', few, task.columns)
    x[2, 0] = np.nan
    for v in x, pd.DataFrame(x.numpy(), columns=task.columns):
        with pytest.raises(ValueError, match="sample 2 of x is nan in column 'age', .* fill it"): run.predict(v)
    run.state.params['head.bias'] += np.nan
    with pytest.raises(ValueError, match='NaN, which is no class; the run has diverged'): run.predict(x[:2])

def test_clients_own_tests_of_a_table(wards):
    "Whatever the tenths that a client holds."
    for seed in range(20):
        task = Task.from_table(wards.sample(100, random_state=seed), y='days')
        own = own_tests(task, dirichlet(task.strata(), 4, alpha=.5, seed=seed))
        assert all(len(t) for t in own)

def test_a_partition_is_words_or_a_function(wards):
    task = Task.from_table(wards, y='days', owner='clinic')
    given = dict(task=task, seeds=1, clients=3, rounds=1)
    with pytest.raises(TypeError, match='partition is a list'):
        compare([FedAvg()], partition=by_owner(task.domain_train), **given)
    a, b = (compare([FedAvg()], partition=p, **given).mse[0]
            for p in ('by_owner', lambda t, n, s: by_owner(t.domain_train)))
    assert a == b
    with pytest.warns(UserWarning, match="these runs have no 'accuracy'; there are round"):
        assert [*compare([FedAvg()], partition='by_owner', columns=('accuracy',), **given)] == ['method', 'seed']

@pytest.mark.parametrize('partition,given,many', [
    ('by_owner', {}, 12), ('by_owner(least=1)', {}, 12), ('by_owner()', dict(clients=2), 2),
    ('by_owner(every=False)', {}, 10)])
def test_a_comparison_has_all_owners_unless_it_says_how_many(wards, partition, given, many):
    task = Task.from_table(wards.assign(clinic=np.arange(len(wards)) % 12), y='days', owner='clinic')
    run = experiment(task, partition=partition, rounds=1, **given)(FedAvg(), 0).run()
    assert run.settings['clients'] == many

def test_a_comparison_has_all_owners_even_if_they_are_few(wards):
    assert len(compare([FedAvg()], Task.from_table(wards, y='days', owner='clinic'), partition='by_owner', rounds=1))

def test_rounds_to_an_error(wards):
    task = Task.from_table(wards, y='days', x='age')
    with pytest.warns(UserWarning, match='easier to learn'):
        run = federate(build('mlp', task, seed=0), task, iid(task.strata(), 3), FedAvg(), 4, progress=False)
    h = run.history.mse
    assert run.rounds_to(h.min()) == 1 + h.to_numpy().argmin() == run.rounds_to(h.min(), 'mse')

def test_owners_on_the_command_line(wards, tmp_path):
    wards.to_csv(tmp_path/'w.csv', index=False)
    where = ('--data', tmp_path/'w.csv', '--y', 'days')
    assert not fed(*where, '--owner', 'clinic', '--partition', 'by_owner', '--save', tmp_path/'run.safetensors')
    assert Run.load(tmp_path/'run.safetensors').state.clients == 3
    assert '--owner' in str(fed(*where, '--partition', 'by_owner'))
    assert 'no such folder' in str(fed('--data', f'{tmp_path}/nothing/'))
