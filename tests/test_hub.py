"""Data sets in the form of the Hugging Face Hub, made here: in memory and as parquet files, read by its own library."""
import string, sys
import numpy as np, pytest, torch
from PIL import Image
from fedlit.data import Task, load
from fedlit.methods import FedAvg
from fedlit.models import build
from fedlit.partition import by_flower, by_owner, dirichlet, heterogeneity
from fedlit.local import Local
from fedlit.run import federate

DIGITS = load('digits')

def hub(): return pytest.importorskip('datasets', reason="datasets is not installed: pip install 'fedlit[hub]'")

def pictures(n, mode='L', size=(9, 7), seed=0):
    "PIL images of (width, height), and what they hold, (N, C, H, W)."
    rng, channels = np.random.default_rng(seed), dict(L=1, RGB=3)[mode]
    a = rng.integers(0, 256, (n, size[1], size[0], channels), dtype=np.uint8)
    return [Image.fromarray(v[..., 0] if mode == 'L' else v) for v in a], torch.from_numpy(a).permute(0, 3, 1, 2)

def made(n=20, mode='L', **columns):
    "A split with an image and a label, and the images as a tensor."
    datasets = hub()
    images, x = pictures(n, mode)
    names = ['cat', 'dog']
    features = datasets.Features({'image': datasets.Image(), 'label': datasets.ClassLabel(names=names),
                                  **{k: datasets.Value('string' if isinstance(v[0], str) else 'int64')
                                     for k, v in columns.items()}})
    return datasets.Dataset.from_dict({'image': images, 'label': [k % 2 for k in range(n)], **columns}, features), x

def both(**kw):
    (train, x), (test, z) = made(20, **kw), made(8, **kw)
    return hub().DatasetDict(train=train, test=test), x, z

@pytest.mark.parametrize('mode', ['L', 'RGB'])
def test_images_and_labels(mode):
    data, x, z = both(mode=mode)
    task = Task.from_hub(data)
    assert torch.equal(task.x_train, x) and torch.equal(task.x_test, z) and task.x_train.dtype == torch.uint8
    assert task.y_train.tolist() == [0, 1]*10 and task.labels == ('cat', 'dog') and task.classes == 2
    seen = task.normalise(task.x_train)
    assert seen.mean((0, 2, 3)).abs().max() < 1e-5 and (seen.std((0, 2, 3)) - 1).abs().max() < 1e-2

def test_parquet_files_as_the_hub_has_them(tmp_path):
    data, x, z = both()
    for k in data: data[k].to_parquet(tmp_path/f'{k}.parquet')
    files = {k: str(tmp_path/f'{k}.parquet') for k in data}
    task = Task.from_hub('parquet', data_files=files, cache_dir=str(tmp_path/'cache'))
    assert torch.equal(task.x_train, x) and torch.equal(task.x_test, z) and task.name == 'parquet'
    assert task.labels == ('cat', 'dog')

def test_a_selection_and_a_format_are_kept():
    data, x, z = both()
    data['train'] = data['train'].select([4, 3, 7]).with_format('torch')
    task = Task.from_hub(data)
    assert torch.equal(task.x_train, x[[4, 3, 7]]) and task.y_train.tolist() == [0, 1, 1]

def test_pictures_of_several_sizes_and_modes():
    datasets = hub()
    few = [pictures(1, mode, size)[0][0] for mode, size in (('L', (9, 7)), ('RGB', (5, 5)), ('L', (8, 8)))]
    few[2] = few[2].convert('P')
    one = datasets.Dataset.from_dict(dict(image=few, label=[0, 1, 2]),
                                     datasets.Features(image=datasets.Image(), label=datasets.Value('int64')))
    data = datasets.DatasetDict(train=one, test=one)
    with pytest.raises(ValueError, match=r'pictures of 3 sizes, such as .*size=\(height, width\)'): Task.from_hub(data)
    task = Task.from_hub(data, size=(6, 4))
    assert task.x_train.shape == (3, 3, 6, 4)
    assert torch.equal(task.x_train[0, 0], task.x_train[0, 2]) # grey in colours
    assert torch.equal(task.x_train[0, 0], torch.from_numpy(np.array(few[0].resize((4, 6)))))

def test_a_test_set_is_cut_from_the_training_set():
    data, x = made(20)
    task = Task.from_hub(data, test=.2)
    assert len(task.y_test) == 4 and task.y_test.bincount().tolist() == [2, 2] and len(task.y_train) == 16
    rows = lambda v: {tuple(r) for r in v.flatten(1).tolist()}
    assert rows(task.x_train) | rows(task.x_test) == rows(x) and not rows(task.x_train) & rows(task.x_test)
    assert torch.equal(Task.from_hub(data, test=.2).x_test, task.x_test)

@pytest.mark.parametrize('ask,message', [
    (dict(), "no split 'test'; there are train.*test=0.2"), (dict(test='dev'), "no split 'dev'; there are train"),
    (dict(test=1.5), 'test=1.5'), (dict(train='all', test=.2), "no split 'all'"),
    (dict(test=.2, x='picture'), r"no column 'picture'; there are image \(Image\), label \(ClassLabel\)"),
    (dict(test=.2, owner='writer'), "no column 'writer'")], ids=str)
def test_what_is_not_there_is_named(ask, message):
    with pytest.raises(ValueError, match=message): Task.from_hub(made()[0], **ask)

def test_columns_that_could_be_meant():
    datasets = hub()
    kinds = datasets.Features(fine=datasets.ClassLabel(names=['a', 'b']), coarse=datasets.ClassLabel(names=['c']),
                              text=datasets.Value('string'), ids=datasets.Sequence(datasets.Value('int64')),
                              age=datasets.Value('int64'), height=datasets.Value('float32'))
    data = datasets.Dataset.from_dict(dict(fine=[0, 1]*5, coarse=[0]*10, text=['so so']*10, ids=[[1, 2, 3]]*10,
                                           age=range(10), height=[1.5]*10), kinds)
    with pytest.raises(ValueError, match='which column has the samples. x= names it; there are fine .*ids'):
        Task.from_hub(data, test=.2)
    with pytest.raises(ValueError, match='which column has the labels. y= names it'):
        Task.from_hub(data, 'ids', test=.2)
    with pytest.raises(ValueError, match="'text' holds text; .*tokens"): Task.from_hub(data, 'text', 'fine', test=.2)
    tokens = Task.from_hub(data, 'ids', 'fine', test=.2)
    assert tokens.x_train.dtype == torch.int64 and tokens.x_train.shape == (8, 3) and tokens.mean is None
    table = Task.from_hub(data, ['age', 'height'], 'fine', test=.2)
    assert table.x_train.shape == (8, 2) and set(table.x_train[:, 1].tolist()) == {1.5}

def femnist(writers=6, each=30):
    "A split with the columns of flwrlabs/femnist."
    datasets = hub()
    n, rng = writers*each, np.random.default_rng(0)
    names = list(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    kinds = datasets.Features(image=datasets.Image(), writer_id=datasets.Value('string'),
                              hsf_id=datasets.Value('int64'), character=datasets.ClassLabel(names=names))
    order = rng.permutation(n)
    return datasets.Dataset.from_dict(dict(
        image=pictures(n, size=(28, 28))[0], writer_id=[f'f{k % writers:04}_07' for k in order], hsf_id=[0]*n,
        character=rng.integers(0, 5, n).tolist()), kinds), [f'f{k % writers:04}_07' for k in order]

def test_femnist_by_writer(tmp_path):
    data, writers = femnist()
    data.to_parquet(tmp_path/'femnist.parquet')
    task = Task.from_hub('parquet', 'image', 'character', owner='writer_id', test=.1, cache_dir=str(tmp_path/'cache'),
                         data_files=str(tmp_path/'femnist.parquet'))
    assert task.classes == 62 and task.x_train.shape[1:] == (1, 28, 28)
    assert task.domains == tuple(sorted(set(writers))) and len(task.y_train) + len(task.y_test) == len(writers)
    clients = by_owner(task.domain_train)
    assert len(clients) == 6 and sum(map(len, clients)) == len(task.y_train)
    assert task.domain_test.bincount().tolist() == [3]*6 # a tenth of each writer's
    for k, own in enumerate(clients): assert set(task.domain_train[own].tolist()) == {k}
    run = federate(build('mlp', task, seed=0), task, clients, FedAvg(), 1, Local(epochs=1), participation=.5,
                   progress=False)
    assert len(run.history) == 1

def test_without_datasets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r"Task.from_hub needs datasets: pip install 'fedlit\[hub\]'"):
        Task.from_hub('uoft-cs/cifar10')

def test_what_is_no_data_set_is_refused():
    with pytest.raises(TypeError, match='data is a int; it must be the name'): Task.from_hub(3)

# ---- owners ----

def test_owners():
    owner = torch.tensor([7, 7, 2, 7, 2, 9])
    assert [p.tolist() for p in by_owner(owner)] == [[2, 4], [0, 1, 3], [5]]
    assert [p.tolist() for p in by_owner(list('bbabac'))] == [[2, 4], [0, 1, 3], [5]]
    assert [p.tolist() for p in by_owner(owner, least=2)] == [[2, 4], [0, 1, 3]]
    some = by_owner(owner, clients=2, seed=0)
    assert len(some) == 2 and all(any(p.tolist() == q.tolist() for q in by_owner(owner)) for p in some)
    assert [p.tolist() for p in by_owner(owner, clients=2, seed=0)] == [p.tolist() for p in some]
    assert len({tuple(map(len, by_owner(owner, clients=2, seed=s))) for s in range(20)}) > 1
    for bad, message in ((dict(least=4), 'no owner has least=4 samples; the largest has 3'),
                         (dict(clients=4), 'clients=4 .* between 1 and 3'), (dict(clients=0), 'clients=0')):
        with pytest.raises(ValueError, match=message): by_owner(owner, **bad)
    with pytest.raises(ValueError, match='owner has shape'): by_owner(torch.zeros(2, 2))

def test_flowers_partitioners():
    hub()
    split = pytest.importorskip('flwr_datasets.partitioner', reason='flwr-datasets is not installed')
    y = DIGITS.y_train
    parts = by_flower(split.IidPartitioner(num_partitions=7), y)
    assert len(parts) == 7 and torch.cat(parts).sort()[0].tolist() == list(range(len(y)))
    natural = by_flower(split.NaturalIdPartitioner(partition_by='writer'), y, writer=(y % 3).tolist())
    assert {tuple(p.tolist()) for p in natural} == {tuple(p.tolist()) for p in by_owner(y % 3)}

@pytest.mark.slow
@pytest.mark.parametrize('alpha', [.05, .5])
def test_our_dirichlet_beside_flowers(alpha):
    "As uneven as theirs, over seeds: the same rule, drawn by two programs."
    hub()
    split = pytest.importorskip('flwr_datasets.partitioner', reason='flwr-datasets is not installed')
    y = torch.arange(5000) % 10
    kw = dict(num_partitions=10, partition_by='label', alpha=alpha, min_partition_size=0, self_balancing=False)
    theirs = [heterogeneity(by_flower(split.DirichletPartitioner(**kw, seed=s), y), y) for s in range(12)]
    ours = [heterogeneity(dirichlet(y, 10, alpha, seed=s, form='paper'), y) for s in range(12)]
    apart = np.mean(theirs) - np.mean(ours)
    spread = (np.var(theirs, ddof=1)/12 + np.var(ours, ddof=1)/12)**.5
    assert abs(apart) < 4*spread, (np.mean(theirs), np.mean(ours), spread)

def test_quantities_and_several_labels():
    "Coded once for both splits, whatever values each of them has."
    datasets = hub()
    def split(n, low):
        column = lambda f: list(map(f, range(n)))
        return datasets.Dataset.from_dict(dict(
            a=column(float), b=[1.5]*n, days=column(lambda k: low + k/4), grade=column(lambda k: low + k % 2),
            ill=column(lambda k: k % 2), old=[0]*n))
    data = datasets.DatasetDict(train=split(20, 1.), test=split(6, 2.))
    task = Task.from_hub(data, ['a', 'b'], 'days')
    assert task.target == 'numbers' and task.y_test[:, 0].tolist() == data['test']['days'][:]
    task = Task.from_hub(data, ['a'], 'grade') # 1., 2. and 2., 3.: classes of whole numbers
    assert task.labels == ('1', '2', '3') and task.y_test.tolist() == [1, 2]*3 and task.y_train[:2].tolist() == [0, 1]
    task = Task.from_hub(data, ['a'], ['ill', 'old'])
    assert task.target == 'labels' and task.labels == ('ill', 'old') and task.y_train[:2].tolist() == [[0, 0], [1, 0]]
    own = Task.from_hub(data['train'], ['a'], 'days', test=.5)
    assert own.strata('test').bincount(minlength=10).max() <= 2 # tenths in proportion
    with pytest.raises(ValueError, match="'days' lacks a value"):
        holes = datasets.Dataset.from_dict({**{k: [0.]*2 for k in ('a', 'b', 'grade')}, 'days': [1., None],
                                            **{k: [0]*2 for k in ('ill', 'old')}})
        Task.from_hub(datasets.DatasetDict(train=data['train'], test=holes), ['a'], 'days')
