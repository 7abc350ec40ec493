"Properties over at least a thousand generated cases each: masks, aggregation, text, files; partitions are in theirs."
import math, random, sys, tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from unittest import mock
import pandas as pd, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.func import functional_call
from fedlit.ground.axes import apply_mask, cut, extract, find_axes, masks, paste
from fedlit.method import FedAvg, total
from fedlit.methods import FederatedDropout, FedRolex, HeteroFL
from fedlit.models import Net
from fedlit.parse import ParseError, methods_by_name, method as parse
from fedlit.local import Local
from fedlit.cohort import Broadcast
from fedlit.server import aggregate
from fedlit.state import State, start
from fedlit.result import Run
from fedlit.ground.table import Store, Table
from fedlit.ground.tree import flatten

pytestmark = pytest.mark.slow
thousand, hundreds = (settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))
                      for n in (1000, 250))

# ---- masks ----

def chain():
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
    return Net(body, nn.Linear(3, 2))

class Residual(nn.Module):
    "A sum, a depthwise convolution, a flattened image."
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.d = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1),
                                          nn.Conv2d(4, 4, 3, padding=1, groups=4))
        self.fc, self.head = nn.Linear(4*4, 3), nn.Linear(3, 2)
    def forward(self, x):
        x = self.n(self.a(x)).relu()
        z = self.fc((x + self.d(self.b(x))).flatten(1)).relu()
        return z, self.head(z)

class Joined(nn.Module):
    "Two branches side by side."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc, self.head = (nn.Conv2d(1, 3, 1), nn.Conv2d(1, 2, 3, padding=1),
                                              nn.Linear(5, 4), nn.Linear(4, 2))
    def forward(self, x):
        z = self.fc(torch.cat([self.a(x).relu(), self.b(x).relu()], 1).mean((2, 3)))
        return z, self.head(z)

@cache
def network(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = kind().double().eval()
        for v in net.buffers():
            if v.is_floating_point(): v.uniform_(.5, 2)
        return net, find_axes(net), torch.randn(2, *((3,) if kind is chain else (1, 2, 2))).double()

networks = st.sampled_from([chain, chain, Joined, Joined, Residual])
def choice(axes, bits):
    "For every axis a 0/1 vector with at least one 1, from the bits of a number."
    out = {}
    for a, n in axes.size.items():
        out[a], bits = torch.tensor([bits >> i & 1 for i in range(n)]), bits >> n
        if not out[a].any(): out[a][0] = 1
    return out
def tensors(net): return {**dict(net.named_parameters()), **dict(net.named_buffers())}

@thousand
@given(networks, st.integers(0, 2**16 - 1))
def test_the_masked_network_is_the_extracted_one(kind, bits):
    net, axes, x = network(kind)
    chosen = choice(axes, bits)
    with torch.no_grad():
        features, logits = functional_call(
            net, apply_mask({k: v for k, v in tensors(net).items()}, masks(axes, chosen)), (x,))
        small_features, small_logits = extract(net, axes, chosen)(x)
    assert torch.allclose(logits, small_logits, atol=1e-12)
    kept = torch.cat([chosen[a].repeat_interleave(r) if a in chosen else torch.ones(n*r) for a, n, r in axes.features])
    assert torch.allclose(features[:, kept.bool()], small_features, atol=1e-12)

@thousand
@given(networks, st.integers(0, 2**16 - 1), st.booleans())
def test_cut_and_paste_are_inverse(kind, bits, stacked):
    net, axes, _ = network(kind)
    chosen, lead = choice(axes, bits), int(stacked)
    big = {k: v.detach().expand(2, *v.shape) if stacked else v.detach() for k, v in net.named_parameters()}
    small, mask = cut(axes, big, chosen, lead), masks(axes, chosen)
    assert all(torch.equal(v, big[k]) for k, v in paste(axes, big, small, chosen, lead).items())
    new = {k: v + 1 for k, v in small.items()}
    pasted = paste(axes, big, new, chosen, lead)
    assert all(torch.equal(v, new[k]) for k, v in cut(axes, pasted, chosen, lead).items())
    for k, m in ((k, m) for k, m in mask.items() if k in big):
        inside = m.reshape(m.shape + (1,)*(big[k].dim()-lead-m.dim())).expand(big[k].shape[lead:]).bool()
        assert (torch.equal(pasted[k] != big[k], inside.expand_as(big[k]))
                and inside.sum().item()*(2 if stacked else 1) == small[k].numel())

@hundreds
@given(networks, st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_masks_are_nested_as_their_choices_are(kind, one, two):
    net, axes, _ = network(kind)
    wide, narrow = choice(axes, one | two), choice(axes, one)
    big, small = masks(axes, wide), masks(axes, {a: v*wide[a] for a, v in narrow.items()})
    assert set(big) == set(small) == {k for k, dims in axes.of.items()
                                      if any(a in wide for segs in dims for a, _, _ in segs)}
    for k, v in tensors(net).items():
        if k in big:
            assert (((small[k] == 0) | (small[k] == 1)).all() and (small[k] <= big[k]).all()
                    and torch.broadcast_shapes(big[k].shape + (1,)*(v.dim()-big[k].dim()), v.shape) == v.shape)

rates = (st.lists(st.integers(1, 16).map(lambda n: n/16), min_size=1, max_size=4)
         .map(lambda r: tuple(sorted(r, reverse=True))))

@hundreds
@given(st.sampled_from([chain, Joined]), rates, st.sampled_from([HeteroFL, FedRolex, FederatedDropout]),
       st.sampled_from(['fixed', 'dynamic']), st.integers(1, 99), st.integers(0, 40), st.integers(0, 2**31 - 1))
def test_sub_models_have_the_width_of_their_rate(kind, rates, family, assign, clients, round, seed):
    "As wide as the rate says, rounded up; HeteroFL's nested, FedRolex's over all coordinates in a turn; repeatable."
    axes, m, number = (network(kind)[1], family(rates=rates, assign=assign, seed=seed),
                       torch.tensor(seed % clients))
    at = lambda round, number=number: m.mask(axes, number, clients, round)
    chosen, rate = at(round), m.rate(number, clients, round).item()
    assert (rate in rates
            and {a: int(v.sum()) for a, v in chosen.items()}
            == {a: max(1, math.ceil(n*rate - 1e-6)) for a, n in axes.size.items()})
    assert all(torch.equal(v, chosen[a]) for a, v in at(round).items())
    if family is HeteroFL:
        other = at(round, torch.tensor(0))
        assert all((v <= other[a]).all() or (v >= other[a]).all() for a, v in chosen.items())
    if family is FedRolex and assign == 'fixed':
        assert all(torch.stack([c[a] for c in map(at, range(round, round + max(axes.size.values())))]).any(0).all()
                   for a in axes.size)

# ---- aggregation ----

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))
        self.register_buffer('mean', torch.zeros(2))
        self.register_buffer('seen', torch.tensor(0))
    def forward(self, x): return x, x

STATE = start(FedAvg(), Plain(), 9)

def rounds(masked=False):
    return st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([0., 1e-6, 1., 1e6]),
                     st.sampled_from([0., 1., 1e4])).map(lambda case: a_round(masked, *case))

def a_round(masked, seed, K, spread, at):
    "A server and what K clients return: numbers of any size, weights of any size, integer buffers, masks."
    g = torch.Generator().manual_seed(seed)
    some = lambda *shape: at + spread*torch.randn(shape, generator=g, dtype=torch.double)
    old = STATE.__class__(dict(a=some(2, 3), b=some()), dict(mean=some(2), seen=torch.tensor(3)),
                          STATE.server, STATE.client, {}, 9)
    out = dict(params=dict(a=some(K, 2, 3), b=some(K)),
               buffers=dict(mean=some(K, 2), seen=torch.randint(0, 2**20, (K,), generator=g)),
               client={'FedAvg': {}}, uploads={'FedAvg': {}},
               mask={k: torch.randint(0, 2, (K, *v.shape), generator=g).double()
                     for k, v in (('a', torch.empty(2, 1)), ('mean', torch.empty(2))) if masked},
               steps=torch.ones(K), loss=torch.ones(K))
    return old, out, 10**(12*torch.rand(K, generator=g, dtype=torch.double) - 6)

def after(old, out, weights):
    "Parameters and buffers after the round."
    state = aggregate(Broadcast(FedAvg(), None, old, Local()), list(range(len(weights))), out, weights)
    return {**state.params, **state.buffers}
def before(old): return {**old.params, **old.buffers}
def returned(out): return {**out['params'], **out['buffers']}
def largest(*tensors): return max(v.double().abs().max().item() for v in tensors)
SINGLE = 4e-6 # weights are in single precision: how far off a mean may be, in units of its largest number

def agree(a, b, old, out):
    "Equal up to single-precision weights, relative to the largest number that took part; counters up to one."
    return all((a[k].double() - b[k].double()).abs().max()
               <= SINGLE*largest(returned(out)[k], before(old)[k]) + 1e-12 + (k == 'seen') for k in a)

def picked(tree, order):
    "Every stack of a tree with its clients in another order."
    return {k: picked(v, order) if isinstance(v, dict) else v[order] for k, v in tree.items()}

@thousand
@given(rounds())
def test_an_aggregate_lies_in_the_hull_of_its_clients(case):
    old, out, weights = case
    for k, v in after(old, out, weights).items():
        rows, was = returned(out)[k].double(), before(old)[k]
        slack = SINGLE*(largest(rows) + largest(was))
        assert (v >= rows.min(0).values - slack).all() and (v <= rows.max(0).values + slack).all()
        assert v.dtype == was.dtype

@thousand
@given(rounds(masked=True), st.booleans())
def test_masked_entries_are_averaged_over_those_who_trained_them(case, huge):
    "In the hull of the clients that had an entry, or where it was if none had; what is outside a mask does not count."
    old, out, weights = case
    first = after(old, out, weights)
    for k, mask in out['mask'].items():
        rows, was = returned(out)[k], before(old)[k]
        had = (mask if mask.dim() == rows.dim() else mask[..., None]).expand_as(rows).bool()
        slack = SINGLE*(largest(rows) + largest(was))
        low, high = torch.where(had, rows, math.inf).min(0).values, torch.where(had, rows, -math.inf).max(0).values
        assert torch.equal(first[k][~had.any(0)], was[~had.any(0)])
        assert ((first[k] >= low - slack) & (first[k] <= high + slack))[had.any(0)].all()
        out['params' if k in out['params'] else 'buffers'][k] = torch.where(had, rows, rows + (1e5 if huge else 1.))
    assert all(torch.equal(v, first[k]) for k, v in after(old, out, weights).items())

@thousand
@given(rounds(masked=True), st.permutations(range(5)), st.sampled_from([1e-6, .5, 3., 1e6]))
def test_neither_order_nor_unit_of_the_weights_matter(case, order, unit):
    old, out, weights = case
    order, first = [k for k in order if k < len(weights)], after(old, out, weights)
    assert agree(first, after(old, picked(out, order), weights[order]), old, out)
    assert agree(first, after(old, out, weights*unit), old, out)

@thousand
@given(rounds(), st.sampled_from([-2., 0., .5, 4.]), st.integers(0, 4))
def test_the_step_is_linear_and_equal_clients_give_that_client(case, factor, k):
    "Deltas c times as large make a step that is; equal clients give that client, so the weights sum to one."
    old, out, weights = case
    sent, first, k = before(old), after(old, out, weights), k % len(weights)
    def stretched(name, v): return v if name == 'seen' else sent[name] + factor*(v - sent[name]) # not the counter
    scaled = {**out, **{part: {n: stretched(n, v) for n, v in out[part].items()} for part in ('params', 'buffers')}}
    assert agree(after(old, scaled, weights), {n: stretched(n, v) for n, v in first.items()}, old, scaled)
    alike = {**out, **{part: picked(out[part], [k]*len(weights)) for part in ('params', 'buffers')}}
    assert agree(after(old, alike, weights), {n: v[k] for n, v in returned(out).items()}, old, out)

@hundreds
@given(st.lists(st.sampled_from([0., -1., 1., 2., math.nan, math.inf, 1e300]), min_size=0, max_size=4),
       st.integers(0, 4))
def test_weights_that_cannot_be_shares_are_refused(weights, K):
    old = STATE
    out = dict(params={k: torch.ones(K, *v.shape) for k, v in old.params.items()},
               buffers={k: torch.ones(K, *v.shape, dtype=v.dtype) for k, v in old.buffers.items()},
               client={'FedAvg': {}}, uploads={'FedAvg': {}}, mask={}, steps=torch.ones(K), loss=torch.ones(K))
    good = len(weights) == K > 0 and all(0 <= w < 1e300 for w in weights) and sum(weights) > 0
    if good:
        assert all((v == 1).all()
                   for v in aggregate(Broadcast(FedAvg(), None, old, Local()), list(range(K)), out,
                                      weights).params.values())
    else:
        with pytest.raises(ValueError, match='weights='):
            aggregate(Broadcast(FedAvg(), None, old, Local()), list(range(K)), out, weights)

# ---- text ----

WORDS = 'paper released corrected nesterov fixed dynamic covariance correlation forward zero inf contrastive l2'.split()
def value(default):
    "Values of the kind of a hyperparameter's default, possible and impossible ones."
    if isinstance(default, bool): return st.booleans()
    if isinstance(default, int): return st.integers(-1, 100) | st.sampled_from([10**9, 2**70])
    if isinstance(default, float):
        return st.floats(0, 2) | st.integers(0, 9) | st.sampled_from([-1., 1e-320, 1e308, math.inf, math.nan])
    if isinstance(default, tuple): return st.lists(st.floats(0, 1) | st.integers(0, 4), max_size=3).map(tuple)
    return st.sampled_from(WORDS) | st.text(max_size=4)

@st.composite
def made(draw):
    "A method with generated hyperparameters; its default where a ValueError or TypeError, and no other, refuses them."
    cls = draw(st.sampled_from([c for _, c in sorted(methods_by_name().items())]))
    kw = {f.name: draw(value(f.default)) for f in fields(cls) if draw(st.booleans())}
    try: return cls(**kw)
    except (ValueError, TypeError): return cls()

@st.composite
def methods(draw):
    parts = draw(st.lists(made(), min_size=1, max_size=3))
    try: return total(*parts)
    except ValueError: return parts[0]

@thousand
@given(methods())
def test_a_method_is_read_back_from_its_text(m):
    back = parse(repr(m))
    assert back == m and repr(back) == repr(m) and hash(back) == hash(m)

CANARY = Path(tempfile.gettempdir())/'fedlit-canary'
EVENTS, WATCH = [], []
def _audit(event, args):
    if WATCH and event in ('exec', 'os.system', 'subprocess.Popen', 'open', 'os.exec', 'os.posix_spawn', 'import',
                           'socket.connect'):
        EVENTS.append((event, args))
sys.addaudithook(_audit)

def read(text):
    "A method that reads back from its own text, or the parser's own short error; nothing was run, opened or imported."
    EVENTS.clear()
    WATCH.append(1)
    try: m = parse(text)
    except ParseError as e: m = str(e)
    finally: WATCH.clear()
    assert not EVENTS and not CANARY.exists(), EVENTS
    if isinstance(m, str): assert 0 < len(m) < 1500
    else: assert parse(repr(m)) == m and hash(m) == hash(parse(repr(m)))
    return m

TOKENS = [
    *sorted(methods_by_name()), *WORDS,
    *'()[]{}+-*/=,.:;@#%&|~^<>!', '**', ':=', ' ', '\n', '\t', '\0', '\\', "'", '"', '"""',
    'mu', 'beta', 'rates', '0', '1', '.5', '1e999', '9'*40, '1j', '0x', '1_0', '...', 'None', 'True', 'inf', 'nan',
    'lambda: 0', ' for x in ', ' if ', ' else ', 'not ', 'await ', 'yield ', 'f"{1}"', 'b"x"',
    'é', '\u202e', '\ud800', '😀',
    '__class__', f'__import__("os").system("touch {CANARY}")', f'open("{CANARY}", "w")',
    'exec("1")', 'eval("1")', 'print()']

@pytest.mark.filterwarnings('ignore:invalid decimal literal')
@thousand
@given(st.text(max_size=80) | st.binary(max_size=60).map(lambda b: b.decode('latin-1'))
       | st.lists(st.sampled_from(TOKENS), max_size=14).map(''.join))
def test_no_text_breaks_the_parser(text): read(text)

@pytest.mark.filterwarnings('ignore:invalid decimal literal')
@thousand
@given(made(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(TOKENS)),
                        min_size=1, max_size=4))
def test_no_change_of_a_method_breaks_the_parser(m, changes):
    text = repr(m)
    for at, drop, token in changes: text = text[:at % (len(text)+1)] + token + text[at % (len(text)+1) + drop:]
    read(text)

@hundreds
@given(st.sampled_from([
           '(', '[', '{', '-', '~', 'not ', 'FedAvg()+', '(FedAvg()+', 'MOON(', 'MOON(mu=(', 'MOON(mu=-', 'MOON(mu=[',
           'a.', 'a[', '+', '\n', '\0', '9', 'MOON(mu=9', '1+', '"', 'x if x else ', 'lambda:', 'f(']),
       st.integers(0, 3000), st.sampled_from(['', 'FedAvg()', ')', '1', ')'*40]))
def test_neither_length_nor_depth_breaks_the_parser(piece, times, end):
    "Up to 30,000 characters, of which up to 2,000 are read."
    text = piece*times + end
    got = read(text)
    assert isinstance(got, str) or len(text) <= 2000

@pytest.mark.parametrize('harm', [
    '__import__("os").system("touch {}")',
    'MOON(mu=__import__("os").system("touch {}"))',
    'open("{}", "w")',
    'MOON(mu=open("{}", "w"))',
    'MOON(*[open("{}", "w")])',
    '[open("{}", "w") for _ in "a"]',
    'MOON() + exec("open({!r}, chr(119))")',
    '(lambda: open("{}", "w"))()',
    'MOON(mu=(1).__class__.__base__.__subclasses__())',
    'f"{{open(\'{}\', \'w\')}}"'])
def test_text_is_never_run(harm): assert isinstance(read(harm.format(CANARY)), str)

@hundreds
@given(st.none() | st.integers() | st.binary(max_size=4) | st.lists(st.integers(), max_size=2) | st.floats())
def test_what_is_no_text_is_refused(thing):
    with pytest.raises(ParseError, match='must be given as text'): parse(thing)

# ---- files ----

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
NAMES = 'a b head.weight MOON x.y_0 é 1'.split() + ['MOON 2', ' ', '.', 'rows', '__metadata__']

def a_tensor(chance):
    "Any bits, those of NaN and infinity among them; scalars and empty tensors."
    shape, kind = chance.choice([(), (0,), (1,), (3,), (2, 3), (2, 0, 1)]), chance.choice(KINDS)
    n = math.prod(shape)*torch.empty((), dtype=kind).element_size()
    return (torch.tensor([chance.randrange(2 if kind == torch.bool else 256) for _ in range(n)], dtype=torch.uint8)
            .view(kind).reshape(shape))

def a_table(chance):
    row = a_tensor(chance)
    t = Table(row, 5, Store(chance.choice([0, 10**6])))
    for k in chance.sample(range(5), chance.randrange(5)): t[k] = row.flip(0) if row.dim() else row
    return t

def a_run(seed):
    chance = random.Random(seed)
    tree = lambda leaf: {k: leaf(chance) for k in chance.sample(NAMES, chance.randrange(3))}
    state = State(tree(a_tensor), tree(a_tensor), dict(M=tree(a_tensor)), dict(M=tree(a_table)), tree(a_table),
                  5, chance.randrange(9))
    history = pd.DataFrame([dict(round=r+1, loss=chance.choice([chance.random(), 1e-320, 1e308, -0.]))
                            for r in range(chance.randrange(3))])
    return Run(FedAvg(), history, state, dict(model='own', seed=chance.randrange(9),
                                              text=chance.choice(['', 'é😀', '"\\', '\n'])))

def content(run):
    "Everything that a run holds, as bytes."
    bits = lambda v: (str(v.dtype), tuple(v.shape), v.contiguous().reshape(-1).view(torch.uint8).tolist())
    s = run.state
    flat = flatten(dict(params=s.params, buffers=s.buffers, server=s.server, client=s.client, personal=s.personal))
    return ({k: (v.written(), v.clients, bits(v.row), [bits(v[i]) for i in v.written()]) if isinstance(v, Table)
             else bits(v) for k, v in flat.items()},
            list(flat), s.clients, s.round, repr(run.method), run.history.to_dict('records'), run.settings)

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('runs')

@thousand
@given(st.integers(0, 2**64))
def test_a_run_is_read_back_as_it_was_written(folder, seed):
    run = a_run(seed)
    with mock.patch('os.fsync'): path = run.save(folder/'run.safetensors') # waiting for the disk is tested elsewhere
    back = Run.load(path)
    assert content(back) == content(run) and repr(back) == repr(run)
    assert [f.name for f in folder.iterdir()] == ['run.safetensors']

@thousand
@given(st.integers(0, 10**6), st.sampled_from(['flip', 'cut', 'drop', 'add']), st.integers(1, 255))
def test_a_changed_file_is_refused_or_the_same(folder, at, how, by):
    file, harmed = folder/'whole.safetensors', folder/'harmed.safetensors'
    if not file.exists():
        Run(FedAvg(), pd.DataFrame([dict(round=1, loss=.5)]),
            State(dict(a=torch.arange(6.).reshape(2, 3)), {}, {}, dict(M=dict(t=Table(torch.ones(2), 5))), {}, 5, 1),
            dict(model='own')).save(file)
    raw = bytearray(file.read_bytes())
    i = at % len(raw)
    if how == 'flip': raw[i] ^= by
    else: raw = raw[:i] if how == 'cut' else raw[:i] + raw[i+by:] if how == 'drop' else raw[:i] + bytes([by]) + raw[i:]
    harmed.write_bytes(raw)
    try: got = Run.load(harmed)
    except ValueError as e: assert 'harmed.safetensors' in str(e)
    else: assert content(got) == content(Run.load(file))
