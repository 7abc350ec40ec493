"Data that are surely not meant: each is refused in a sentence that names it, put right, or warned about."
import warnings
import numpy as np, pandas as pd, pytest, torch
from dataclasses import replace
from PIL import Image
from torch import nn
from fedlit.data import AutoAugment, Flip, Task, load
from fedlit.ground.arrays import in_numbers, overlap
from fedlit.ground.readers import _pictures, folders_in
from fedlit.methods import FedAvg
from fedlit.models import build, wrap
from fedlit.partition import by_domain, by_owner, dirichlet, dirichlet_mixture, iid
from fedlit.local import Local
from fedlit.result import Run
from fedlit.run import federate
from test_hub import hub

DIGITS = load('digits').subset(200, test=50)
QUICK = dict(rounds=1, local=Local(epochs=1), progress=False, device='cpu')

def table(n=60, columns='abcd', seed=0):
    x = np.random.default_rng(seed).normal(size=(n, len(columns))).astype('float32')
    return pd.DataFrame(x, columns=list(columns)), [k % 3 for k in range(n)]

def task(x=DIGITS.x_train, y=DIGITS.y_train, xt=DIGITS.x_test, yt=DIGITS.y_test, classes=10, **kw):
    return Task('mine', x, y, xt, yt, classes=classes, **kw)

def images(*shape, kind=torch.uint8, n=6):
    x = torch.randint(0, 256, (2*n, *shape), generator=torch.Generator().manual_seed(0))
    return x.to(torch.uint8) if kind == torch.uint8 else x/255

def of_images(*shape, **kw):
    x, y = images(*shape, **kw), torch.arange(6) % 2
    return Task('mine', x[:6], y, x[6:], y, classes=2)

# ---- data frames ----

def test_columns_are_found_by_name(tmp_path):
    frame, y = table()
    train, test = frame[:40], frame[40:]
    one = Task('mine', train, y[:40], test, y[40:], 3)
    two = Task('mine', train, y[:40], test[list('dbca')], y[40:], 3)
    assert torch.equal(one.x_test, two.x_test) and one.columns == tuple('abcd') == one.subset(20).columns
    run = federate(build('mlp', one, seed=0), one, iid(one.y_train, 2), FedAvg(), **QUICK)
    assert torch.equal(run.logits(test), run.logits(test[list('dbca')]))
    assert torch.equal(run.logits(test), run.logits(test.to_numpy())) # an array has no names
    run.save(tmp_path/'run.json')
    again = Run.load(tmp_path/'run.json', model=run.model) if hasattr(Run, 'load') else run
    assert torch.equal(again.logits(test[list('dbca')]), run.logits(test))
    for odd, words in ((test.rename(columns=dict(c='job_c')), "'job_c'"), (test.assign(label=1), "'label'"),
                       (test[list('abc')], "'d' missing"), (test[list('abcc')], "'c' twice")):
        with pytest.raises(ValueError, match=words): Task('mine', train, y[:40], odd, y[40:], 3)
        with pytest.raises(ValueError, match=words): run.predict(odd)
    with pytest.raises(ValueError, match="x_train has two columns of the name 'a'"):
        task(frame[list('aab')], y, frame[list('aab')], y, 3)
    assert replace(one, x_train=train[list('cdba')]).x_train.equal(one.x_train)
    with pytest.raises(ValueError, match='columns has 2 names, but there are 4'):
        Task('mine', train.to_numpy(), y[:40], test.to_numpy(), y[40:], 3, columns=('a', 'b'))

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_missing_values_are_told_before_training_and_named_in_it(value):
    frame, y = table()
    frame.loc[[7, 30], 'c'] = value
    made = lambda f: Task('mine', f[:40], y[:40], frame[40:], y[40:], 3)
    with pytest.warns(UserWarning, match='infinity in at least 2 of the training samples.*fill them'):
        bad = made(frame)
    with pytest.raises(FloatingPointError, match=f"sample 7 of x_train is {value} in column 'c', which client 0 holds"):
        federate(build('mlp', bad, seed=0), bad, [range(20), range(20, 40)], FedAvg(), **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        made(frame.assign(c=1.)), bad.to('cpu'), bad.subset(20), task()

# ---- samples ----

@pytest.mark.parametrize('kind', [torch.uint8, torch.float32])
@pytest.mark.parametrize('shape', [(32, 32, 1), (32, 32, 3), (32, 32, 4), (30, 30, 13), (24, 32, 1), (32, 24, 3),
                                   (24, 32, 4), (30, 40, 13), (4, 4, 3)])
def test_channels_that_come_last_are_refused(shape, kind):
    with pytest.raises(ValueError, match=r'channels last.*permute\(0, 3, 1, 2\)'): of_images(*shape, kind=kind)
    assert of_images(shape[2], *shape[:2], kind=kind).x_train.shape[1:] == (shape[2], *shape[:2])

@pytest.mark.parametrize('shape', [(13, 8, 8), (64, 8, 7), (6, 1, 1), (9, 1, 128), (3, 1, 1), (1, 28, 3), (64, 7, 7)])
def test_channels_that_come_first_are_not(shape):
    assert of_images(*shape, kind=torch.float32).x_train.shape[1:] == shape

def sparse():
    from scipy.sparse import csr_matrix
    return csr_matrix(np.eye(6))

ROWS, SIX = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)), [0, 1]*3
MASKED = np.ma.masked_greater(ROWS[:6].numpy(), .5)
@pytest.mark.parametrize('change,words', [
    (dict(x=sparse), r'x_train is sparse, a csr_matrix; give x_train.toarray\(\)'),
    (dict(x=lambda: ROWS[:6].to_sparse()), r'x_train is sparse.*to_dense\(\)'),
    (dict(x=lambda: ROWS[:6].to('meta')), "device 'meta'"),
    (dict(x=lambda: MASKED), 'x_train is an array with masked entries'),
    (dict(y=lambda: np.ma.array([0, 1]*3, mask=[0, 0, 1, 0, 0, 0])), 'y_train is an array with masked entries'),
    (dict(xt=lambda: torch.rand(6, 4)), r'x_train has shape \(3,\), one of x_test \(4,\)'),
    (dict(xt=lambda: torch.ones(6, 3).long()), r'x_train holds float32 and x_test int64'),
    (dict(std=lambda: .1), r'mean=None and std=\(0.1,\) belong together'),
    (dict(std=lambda: (.1,)), r'mean=None and std=\(0.1,\) belong together'),
    (dict(labels=lambda: ('a', 'b', 'c')), 'labels has 3 names, but there are 2'),
    (dict(domain_train=lambda: SIX), 'domain_train and domain_test belong together'),
    (dict(domain_test=lambda: SIX), 'domain_train and domain_test belong together')])
def test_what_is_no_table(change, words):
    good = dict(x=ROWS[:6], y=SIX, xt=ROWS[6:], yt=SIX, classes=2)
    task(**good)
    with pytest.raises(ValueError, match=words): task(**good | {k: v() for k, v in change.items()})

def test_masked_arrays_without_masked_entries_and_gradients_are_no_harm():
    full = task(np.ma.array(ROWS[:6].numpy()), SIX, ROWS[6:].clone().requires_grad_(), SIX, 2)
    assert torch.equal(full.x_train, ROWS[:6]) and not full.x_test.requires_grad

@pytest.mark.parametrize('augment,words', [
    (lambda: __import__('torchvision').transforms.RandomHorizontalFlip(), r'RandomHorizontalFlip.*draw\(shape'),
    (lambda: __import__('torchvision').transforms.ColorJitter(.1), r'ColorJitter.*draw\(shape'),
    (lambda: Flip, 'Flip.*draw'), (lambda: torch.flip, 'draw')])
def test_augmentations_that_do_not_draw(augment, words):
    with pytest.raises(ValueError, match=words): task(augment=(augment(),))

class Own:
    "An augmentation of one's own: what it draws, and what it does."
    def __init__(self, act, draw=lambda shape, g: torch.rand(shape, generator=g)): self.act, self.drawn = act, draw
    def draw(self, shape, generator=None): return dict(d=self.drawn(shape, generator))
    def __call__(self, x, draws): return self.act(x, draws['d'].view(-1, 1, 1, 1))

def trained(augment, x=DIGITS.x_train):
    t = task(x, xt=DIGITS.x_test.to(x.dtype), augment=(augment,))
    return federate(build('mlp', t, seed=0), t, iid(t.y_train, 2), FedAvg(), 1, Local(steps=1), progress=False)

@pytest.mark.parametrize('augment,words', [
    (Own(lambda x, d: .7*x + .3*x.roll(1, 0)), 'Own makes something else of a sample'),
    (Own(lambda x, d: x/x.max()*d.sum()), 'Own makes something else of a sample'),
    (Own(lambda x, d: x + .1*torch.randn_like(x)), 'Own changes the same samples in two ways'),
    (Own(lambda x, d: x*np.random.rand()), 'Own changes the same samples in two ways'),
    (Own(lambda x, d: x*d, lambda shape, g: torch.rand(shape)), 'Own changes the same samples in two ways')])
def test_augmentations_see_a_sample_and_its_draws_only(augment, words):
    with pytest.raises(ValueError, match=words): trained(augment)

@pytest.mark.parametrize('act', [lambda x, d: x*d, lambda x, d: x.mul_(d), lambda x, d: torch.where(d < .5, 1 - x, x)])
def test_a_right_augmentation_is_tried_without_a_trace(act):
    before, same = torch.get_rng_state(), DIGITS.x_train.clone()
    assert len(trained(Own(act)).history) == 1
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(DIGITS.x_train, same)

def test_floats_beyond_one_under_autoaugment():
    assert task(augment=(AutoAugment(),)).augment == (AutoAugment(),)
    with pytest.raises(ValueError, match=r'x_train holds 255, but AutoAugment is for floats from 0 to 1.*x / 255'):
        task(DIGITS.x_train*255, xt=DIGITS.x_test*255, augment=(AutoAugment(),))
    assert task(DIGITS.x_train*255, xt=DIGITS.x_test*255, augment=(Flip(),)).x_train.max() == 255

def levels(x): return (255*x).round()

def test_bytes_and_floats_of_0_to_255_do_not_mix():
    train, test = (levels(x) for x in (DIGITS.x_train, DIGITS.x_test))
    with pytest.raises(ValueError, match='x_train holds bytes, .* divided by 255, but x_test holds floats up to 255'):
        task(train.byte(), xt=test)
    with pytest.raises(ValueError, match=r'x_train holds floats up to 255, but x_test holds bytes, .*x_test.float\(\)'):
        task(train, xt=test.byte())
    task(train, xt=test), task(train.byte(), xt=test.byte()), task(DIGITS.x_train, xt=test.byte())
    task(train.byte(), xt=DIGITS.x_test*1.05) # a picture enlarged by splines exceeds 1 a little
    normal = replace(task(train.byte(), xt=test.byte()), mean=(.3,), std=(.05,)).normalise(train.byte())
    assert normal.max() > 10 and task(normal, xt=test.byte()).mean is None # what a federation makes for itself
    task(train, xt=torch.full_like(test, torch.nan)), task(train.byte(), xt=test[:0], yt=DIGITS.y_test[:0])

def test_data_are_doubted_though_earlier_ones_lay_in_their_place():
    for _ in range(9): # of which one may well have the address of the one before
        with pytest.warns(UserWarning, match='floats up to 255'):
            Task('mine', levels(DIGITS.x_train), DIGITS.y_train, levels(DIGITS.x_test), DIGITS.y_test, classes=10)

@pytest.mark.parametrize('how', [{}, dict(mean=(.5,), std=(.5,))])
def test_floats_of_0_to_255_that_nothing_brings_down_are_doubted(how):
    train, test = (levels(x) for x in (DIGITS.x_train, DIGITS.x_test))
    with pytest.warns(UserWarning, match='x_train holds floats up to 255, .* numbers up to (255|510); .* x / 255'):
        task(train, xt=test, **how)
    with pytest.warns(UserWarning, match='x_test holds floats up to 255, but x_train up to 1;'):
        task(DIGITS.x_train, xt=test)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        task(train, xt=test, mean=(80.,), std=(90.,)), task(train.byte(), xt=test.byte(), **how)
        task(train/255, xt=test/255, **how), task(train - 99, xt=test - 99), task(train.flatten(1), xt=test.flatten(1))

@pytest.mark.parametrize('kept', [False, True])
def test_a_network_is_asked_about_pictures_of_the_scale_it_knows(kept, tmp_path):
    def trained(x, xt):
        t = task(x, xt=xt)
        run = federate(build('mlp', t, seed=0), t, iid(t.y_train, 2), FedAvg(), **{**QUICK, 'local': Local(lr=1e-6)})
        return Run.load(run.save(tmp_path/'run')) if kept else run
    test = levels(DIGITS.x_test)
    of_bytes, of_levels = trained(levels(DIGITS.x_train).byte(), test.byte()), trained(levels(DIGITS.x_train), test)
    with pytest.raises(ValueError, match='the network was trained on bytes.*but x holds floats up to 255'):
        of_bytes.predict(test)
    with pytest.raises(ValueError, match=r'was trained on floats up to 255, but x holds bytes.*give x.float\(\)'):
        of_levels.predict(test.byte())
    assert torch.equal(of_bytes.predict(test.byte()), of_bytes.predict(test/255))
    assert torch.equal(of_levels.predict(test), of_levels.predict(test.double()))
    assert 'most' not in of_bytes.settings['input']

@pytest.mark.parametrize('n', [.5, '9', None])
def test_a_share_is_no_size(n):
    with pytest.raises(ValueError, match='samples of the train set; give a whole number'): DIGITS.subset(n)

def test_hidden_folders_and_files_are_no_data(tmp_path):
    for name in ('amazon', '.ipynb_checkpoints'): (tmp_path/name).mkdir()
    for name in ('a.png', '._a.png'): Image.new('L', (2, 2)).save(tmp_path/'amazon'/name)
    assert [p.name for p in folders_in(tmp_path)] == ['amazon']
    assert [p.name for p in _pictures(tmp_path/'amazon')] == ['a.png']

def test_deep_pictures_in_a_list():
    deep = [Image.fromarray(np.full((4, 4), 4000 + k, 'u2')) for k in range(12)]
    with pytest.raises(ValueError, match=r'mode I;16.*65535') as e: task(deep[:6], SIX, deep[6:], SIX, 2)
    pictures = deep[:6]                                      # as the message says
    x = eval(str(e.value).partition('of them: ')[2])
    assert np.allclose(x[2], 4002/65535) and x.shape == (6, 1, 4, 4) and pictures

# ---- owners ----

@pytest.mark.parametrize('split,name', [(by_owner, 'owner'), (by_domain, 'domain')])
@pytest.mark.parametrize('v', [[1., float('nan'), 1.], ['a', None, 'a'], pd.Series(['a', None, 'a']),
                               torch.tensor([1., float('nan'), 1.]), np.ma.array([1, 2, 1], mask=[0, 1, 0]),
                               pd.Series(['a', np.nan, 'a']), pd.to_datetime(pd.Series(['2020', None, '2021']))])
def test_samples_without_an_owner(split, name, v):
    with pytest.raises(ValueError, match=f'{name} lacks a value for sample 1'): split(v)

@pytest.mark.parametrize('alpha', [[.1, .5], None, '1', np.array([.1, .2])])
def test_alpha_is_one_number(alpha):
    for call in (dirichlet, dirichlet_mixture):
        with pytest.raises(ValueError, match='must be a number above 0'): call(DIGITS.y_train, 4, alpha)

# ---- the Hub ----

def rows(y, n=20, **columns):
    return hub().Dataset.from_pandas(pd.DataFrame(dict(a=np.arange(float(n)), b=1., y=y, **columns)))

def test_grey_pictures_of_16_bits_from_the_hub():
    datasets = hub()
    levels = np.linspace(0, 65535, 20*64).reshape(20, 8, 8).astype('u2')
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(num_classes=2))
    data = datasets.Dataset.from_dict(dict(image=[Image.fromarray(v) for v in levels], label=[0, 1]*10), kinds)
    t = Task.from_hub(datasets.DatasetDict(train=data, test=data))
    assert torch.equal(t.x_train, torch.from_numpy((levels >> 8).astype('u1'))[:, None])
    with pytest.raises(ValueError, match=r'size=8, but it must be \(height, width\)'):
        Task.from_hub(data, test=.2, size=8)

@pytest.mark.parametrize('y,words', [
    ([[0, 1]]*20, r"'y' holds \[0, 1\]"), ([None, 'y']*10, "'y' lacks a value"),
    ([1., np.nan]*10, "'y' lacks a value")])
def test_targets_of_the_hub_that_are_no_classes(y, words):
    with pytest.raises(ValueError, match=words): Task.from_hub(rows(list(y)), x=['a'], y='y', test=.2)

def test_fractions_of_the_hub_are_quantities(): # which were refused before there were such targets
    y = np.linspace(1, 2, 20)
    task = Task.from_hub(rows(list(y)), x=['a'], y='y', test=.2)
    assert task.target == 'numbers'
    assert sorted(torch.cat([task.y_train, task.y_test])[:, 0].tolist()) == pytest.approx(y.tolist())

def test_owners_of_the_hub():
    data = rows(SIX[:2]*10, who=['ann', None, 'bob', 'bob']*5)
    with pytest.raises(ValueError, match="'who' lacks a value"):
        Task.from_hub(data, x=['a', 'b'], y='y', owner='who', test=.2)
    t = Task.from_hub(data, x=['b', 'a'], y='y', test=.2)
    assert t.columns == ('b', 'a')

# ---- warnings ----

def said(f):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        f()
    return [(str(w.message), w.filename) for w in seen]

def test_test_samples_among_the_training_samples():
    leak = lambda: task(xt=torch.cat([DIGITS.x_test, DIGITS.x_train[:5]]),
                        yt=torch.cat([DIGITS.y_test, DIGITS.y_train[:5]]))
    (text, where), = said(leak)
    assert 'at least 9.09 % of the test samples are among the training samples' in text and where == __file__
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        leaky = leak()
    assert not said(lambda: leaky.to('cpu').subset(50)) and not said(task) # once, and not of a right task
    assert not said(lambda: replace(leaky, augment=(Flip(),)))
    few = torch.arange(120)[:, None] % 2 # a table that repeats itself
    assert not said(lambda: task(few[:80].float(), few[:80, 0], few[80:].float(), few[80:, 0], 2))

def split(x): # a fifth of the rows, drawn at random, is for testing
    x = torch.as_tensor(x)[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    return overlap(x[len(x)//5:], x[:len(x)//5])

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(dict(a=RNG.normal(size=200), b=RNG.integers(0, 5, 200), c=RNG.choice(['x', 'y', 'z'], 200)))
PICTURES = RNG.integers(0, 256, (500, 1, 8, 8), dtype=np.uint8)

@pytest.mark.parametrize('times', [2, 3, 5])
@pytest.mark.parametrize('x', [in_numbers(FRAME).to_numpy(), in_numbers(FRAME[['a', 'c']]).to_numpy(), PICTURES,
                               in_numbers(pd.DataFrame(PICTURES[:, 0, 0])).to_numpy()], ids=range(4))
def test_copies_of_every_sample_are_seen(x, times):
    assert split(np.concatenate([x]*times)) > .9*(1 - .2**(times - 1)) and not split(x)

@pytest.mark.parametrize('x', [
    RNG.integers(0, 100, (1000, 1)), RNG.integers(0, [100, 2, 1, 1], (1000, 4)), RNG.integers(0, 5, (1000, 3)),
    np.eye(40)[RNG.integers(0, 40, 1000)], np.eye(3)[RNG.integers(0, 3, 1000)], RNG.random((1000, 30)) < .05,
    np.c_[RNG.integers(20, 90, 1000), np.eye(3)[RNG.integers(0, 3, 1000)]], RNG.integers(0, 2, (1000, 1, 3, 3)),
    np.c_[RNG.integers(0, 2, 1000), RNG.integers(0, 12, 1000)/4], RNG.random((1000, 2)).round(1)], ids=range(10))
def test_a_table_of_few_different_rows_may_repeat_itself(x):
    assert not split(np.asarray(x, 'float32'))

def test_labels_that_are_counted_from_one():
    (text, where), = said(lambda: task(y=DIGITS.y_train + 1, yt=DIGITS.y_test + 1, classes=11))
    assert 'no sample has the label 0' in text and 'give y - 1 and classes=10' in text and where == __file__
    some = DIGITS.y_train != 0
    assert not said(lambda: task(DIGITS.x_train[some], DIGITS.y_train[some])) # the test set has class 0
    assert not said(lambda: task(classes=11))

# ---- networks ----

class Auxiliary(nn.Module):
    "Returns more while it trains."
    def __init__(self, pair=False):
        super().__init__()
        self.body, self.fc, self.aux, self.pair = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 10), pair
    def forward(self, x):
        z = self.body(x.flatten(1)).relu()
        out = (self.fc(z), self.aux(z)) if self.training else self.fc(z)
        return (z, out) if self.pair else out

class More(Auxiliary):
    def forward(self, x):
        z = self.body(x.flatten(1)).relu()
        return (z, self.fc(z), self.aux(z)) if self.training else (z, self.fc(z))

class Wider(Auxiliary):
    def forward(self, x):
        z = self.body(x.flatten(1)).relu()
        return z, torch.cat([self.fc(z)]*(1 + self.training), 1)

def test_auxiliary_outputs():
    net = Auxiliary()
    with pytest.raises(ValueError, match='Auxiliary returns more than logits.*aux_logits=False'):
        wrap(net, 'fc', DIGITS.normalise(DIGITS.x_test[:4]))
    for odd in (wrap(net, 'fc'), Auxiliary(pair=True), More(), Wider()):
        name = type(odd).__name__
        with pytest.raises(ValueError, match=f'{name} returns something else while it trains.*aux_logits=False'):
            federate(odd, DIGITS, iid(DIGITS.y_train, 2), FedAvg(), **QUICK)

@pytest.mark.slow
def test_googlenet():
    models = pytest.importorskip('torchvision.models')
    x = torch.rand(2, 3, 96, 96)
    make = lambda **kw: models.googlenet(weights=None, num_classes=4, init_weights=False, **kw)
    with pytest.raises(ValueError, match='GoogLeNet returns more than logits'): wrap(make(), 'fc', x)
    assert wrap(make(aux_logits=False), 'fc', x)(x)[1].shape == (2, 4)
