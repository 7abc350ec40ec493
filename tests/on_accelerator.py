"""Groups of checks on the stand-in accelerator: `python on_accelerator.py GROUP [ARGUMENTS]` prints one JSON object.

`tests/test_accelerator.py` starts them, since registering a device changes a process for good.
"""
import copy, functools, json, os, re, sys, tempfile, warnings
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import torch
import accelerator
from fedlit import laws, methods as library, models
from fedlit.ground import stacks, tree
from fedlit.after.report import _bytes as traffic_of
from fedlit.data import AutoAugment, Crop, Flip, Rotate, Task
from fedlit.engine.guard import Guard
from fedlit.ground.table import Table
from fedlit.ground.tape import Tapes
from fedlit.method import Method, overrides
from fedlit.methods import (DP, DPSGD, DSFL, DepthFL, Ditto, FedALA, FedAvg, FedBN, FedCAC, FedDBE, FedDecomp,
                            FedDF, FedDecorr, FedGSE, FedMD, FedPara, FedPer, FedProto, FedRep, HeteroFL, IFCA, MOON,
                            SCAFFOLD, Scaler)
from fedlit.methods.depthfl import exits_mlp
from fedlit.models import build
from fedlit.participation import BySize, PowerOfChoice
from fedlit.local import Local
from fedlit.server import network_for
from fedlit.result import Run
from fedlit.run import federate, part_columns
from fedlit.ground.tree import tmap
from conftest import in_third
from federation import METHODS, PRIVATE, SUMS, TRIMMED, small_world

stacks._better = lambda x: False # on the CPU as well the BatchNorm that a device has: then the bits are the same

EXECUTORS = 'loop', 'vmap', 'extract', 'threads'
BOTH = 'cpu', 'dev'

def on(v, device, dtype=torch.float32):
    "A tensor or module there, in single precision as accelerators compute."
    if isinstance(v, torch.nn.Module): return copy.deepcopy(v).to(device, dtype)
    return v.to(device, dtype if v.is_floating_point() else v.dtype)

def world(device, of=None):
    "The small federation of the laws on a device."
    w = of or small_world(True, True)
    data = lambda r: {k: v if k == 'counts' else on(v, device) for k, v in w.data(r).items()}
    proxy = None if w.proxy is None else on(w.proxy, device)
    return laws.World(on(w.model, device), data, w.clients, w.sizes, proxy, local=w.local)

def exits():
    "A federation for DepthFL, whose network has exits."
    def data(r):
        gen = torch.Generator().manual_seed(r)
        return dict(x=torch.randn(4, 3, 6, 5, generator=gen), y=torch.randint(0, 3, (4, 3, 6), generator=gen),
                    counts=torch.full((4, 3), 6))
    torch.manual_seed(0)
    return laws.World(exits_mlp((5,), 3, hidden=6, depth=3), data, 8, torch.ones(4))

def there(state): return {k: v.cpu() for k, v in laws.contents(state).items()}

def apart(a, b):
    "The largest difference of two states, wherever they lie; their names must agree."
    a, b = there(a), there(b)
    assert list(a) == list(b), set(a) ^ set(b)
    far = [(a[k].double() - b[k].double()).abs().nan_to_num(nan=torch.inf).max().item() for k in a if a[k].numel()]
    return max(far, default=0.)

def lost_of(tree): return [k for k, v in tree.items() if v.device.type != 'dev' and v.numel()]
def lost(state): return lost_of(laws.contents(state))

# ---- every method ----

def between(method, state, world):
    "What a method makes between rounds: networks of the server and of two clients, and its columns of the history."
    batch = {k: world.data(0)[k][0, 0] for k in 'xy'}
    nets = {str(k): network_for(method, state, k, tuple(batch.values()), world.model) for k in (None, 0, 1)}
    return tree.flatten({k: dict(zip(('params', 'buffers'), v)) for k, v in nets.items()}), part_columns(method, state)

def one(method, executor, record, rounds, worlds):
    """How far a method on the device is from the CPU after some rounds, and what of its state is not there; how often
    the host reads in the last of these rounds, and what for."""
    tapes = Tapes() if record else None
    a = laws.train(method, worlds['cpu'], executor, rounds, tapes=Tapes() if record else None)
    b = laws.train(method, worlds['dev'], executor, rounds - 1, tapes=tapes)
    with accelerator.counted() as seen: b = laws.train(method, worlds['dev'], executor, rounds, b, tapes=tapes)
    (nets, said), (others, also) = between(method, a, worlds['cpu']), between(method, b, worlds['dev'])
    far = max((nets[k] - v.cpu()).abs().max().item() for k, v in others.items() if v.numel())
    return dict(apart=max(apart(a, b), far), lost=lost(b) + lost_of(others), differ=said != also, reads=seen['reads'],
                tables=any(isinstance(v, Table) for v in laws.contents(b).values()), places=seen['places'],
                parts=executor == 'extract' and overrides(method, 'mask'))

def methods(part='', only=()):
    "A third of all methods, each in one executor, in turn; or, if asked for the 'whole', all forms in all executors."
    whole = part == 'whole'
    usual, deep = {d: world(d) for d in BOTH}, {d: world(d, exits()) for d in BOTH}
    bare = {d: world(d, small_world(False, True)) for d in BOTH}
    alone = [*METHODS, DepthFL(levels=(3, 3, 1, 2)), *PRIVATE]
    firsts = list({type(m): m for m in [*alone, *(p for s in SUMS for p in s.parts)]}.values())
    asked = ([(m, e, r) for m in [*alone, *SUMS] for e in EXECUTORS for r in (False, True)] if whole
             else [(m, EXECUTORS[i % 4], not only and i//4 % 2 == 0) for i, m in enumerate(firsts)
                   if not only or type(m).__name__ in only]) # what is recorded is compared, and may read more
    said = {}
    for m, e, r in asked:
        if part.isdigit() and not in_third(f'methods {m!r}', m, int(part)): continue
        if type(m).__name__ in ('Scaler', 'MaskedCE', 'OwnLabels', 'Clip', 'OldCounts'): # trimmings of sub-models
            m = HeteroFL(rates=(1., .5)) + m
        # a server that distils has Adam, which amplifies in how many parts threads add up a product
        torch.set_num_threads(2 if e == 'threads' and not any(isinstance(p, (DSFL, FedDF)) for p in m.parts) else 1)
        name = f"{m!r}, {e}{', recorded' if r else ''}"
        try: said[name] = one(m, e, r, 3 if whole else 2,
                             deep if isinstance(m, DepthFL) else bare if m in PRIVATE else usual)
        except Exception as error: said[name] = dict(error=f'{type(error).__name__}: {error}'[:300])
    return dict(seen=said, classes=sorted({type(p).__name__ for m, _, _ in asked for p in m.parts}))

# ---- whole runs ----

def task(images=False):
    "Random images, or rows of numbers, with labels that can be learned."
    gen = torch.Generator().manual_seed(0)
    y, x = torch.arange(90) % 3, torch.randn(90, *((1, 8, 8) if images else (6,)), generator=gen)
    x.flatten(1)[torch.arange(90), y] += 2.
    if images: x = (x - x.min())/(x.max() - x.min())
    augment = (Crop(padding=1), Flip()) if images else ()
    return Task('made', x[:60], y[:60], x[60:], y[60:], 3, augment=augment)

def ran(method, device, t=None, rounds=2, norm='batch', net=None, epochs=1, **kw):
    "A whole run of six clients, with personal tests."
    t = t or task()
    net = net or (build('small_cnn', t, seed=0, norm=norm) if t.x_train.dim() == 4
                  else build('mlp', t, seed=0, hidden=(8,), features=6, norm=norm))
    clients = [torch.arange(k, 60, 6)[:10 - k] for k in range(6)]
    tests = [torch.arange(k, 30, 6) for k in range(6)]
    return federate(net, t, clients, method, rounds, Local(epochs=epochs, batch_size=5, lr=.1), progress=False,
                    device=device, **{'tests': tests, **kw})

def columns(run): return run.history.drop(columns=['seconds', 'peak_mb']).to_dict('list')

def same(a, b):
    "Two runs: how far apart their states and their histories are."
    one, two = columns(a), columns(b)
    assert list(one) == list(two), set(one) ^ set(two)
    said = {'bad_clients', 'why'}
    numbers = [abs(x - y) for k in one if k not in said for x, y in zip(one[k], two[k]) if x == x]
    words = [k for k in one if k in said and str(one[k]) != str(two[k])]
    return dict(apart=max(apart(a.state, b.state), *numbers), differ=words)

RUNS = {
    'FedAvg, loop': (FedAvg(), dict(executor='loop')),
    'MOON + FedDecorr, vmap': (MOON() + FedDecorr(), dict(executor='vmap', participation=.5)),
    'SCAFFOLD, threads': (SCAFFOLD(), dict(executor='threads')),
    'HeteroFL + Scaler, extract': (HeteroFL(rates=(1., .5)) + Scaler(), dict(executor='extract')),
    'FedBN, personal': (FedBN(), dict()),
    'FedRep, images': (FedRep(), dict(images=True, rounds=1)),
    'HeteroFL, images, recomputed': (HeteroFL(rates=(1., .5)), dict(images=True, rounds=1, statistics='recomputed')),
    'FedDF, unlabelled': (FedDF(steps=3), dict(proxy='alone')),
    'FedGSE, public labels': (FedGSE(rates=(1., .5), pool=12, similar='SPL'), dict(proxy='pair')),
    'DPSGD, loop': (DPSGD(), dict(norm='none', executor='loop')),
    'PowerOfChoice': (FedAvg(), dict(participation=PowerOfChoice(.4))),
    'BySize, without, uniform': (FedAvg(), dict(participation=BySize(.6), without=(2,), weighting='uniform')),
    'SCAFFOLD, in chunks': (SCAFFOLD(), dict(executor='vmap', chunk=4)),
    'statistics at home': (FedAvg(), dict(statistics='home')), 'static': (FedAvg(), dict(statistics='static')),
    'bfloat16, vmap': (FedAvg(), dict(executor='vmap', precision='bfloat16')),
    'bfloat16, loop': (MOON(), dict(executor='loop', precision='bfloat16')),
    'metrics': (FedPer(), dict(metrics=dict(hits=lambda logits, y: hits_of(logits, y)))),
    'locals and watch': (FedAvg(), dict(keep_locals=True, watch=lambda net, task, state, locals: dict(
        seen=sum(v.square().sum().item() for v in locals['params'].values()))))}

PUBLIC = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3

def run_options(kw):
    "What the caller has lies on the CPU, whatever the device."
    kw = dict(kw)
    if kw.pop('images', False): kw['t'] = task(images=True)
    if 'proxy' in kw: kw['proxy'] = PUBLIC if kw['proxy'] == 'pair' else PUBLIC[0]
    return kw

def runs():
    "Whole runs: state and history, to the last column."
    said = {}
    for name, (method, kw) in RUNS.items():
        try: said[name] = same(*(ran(method, d, **run_options(kw)) for d in BOTH))
        except Exception as error: said[name] = dict(error=f'{type(error).__name__}: {error}'[:300])
    for m in (FedDF(steps=3), FedMD(transfer=1), DSFL(steps=3), FedProto()): # clients with one of two networks
        nets = [build('mlp', task(), seed=k, hidden=(8 - 3*k,), features=6) for k in (0, 1)]*3
        try: pairs = zip(*(ran(m, d, net=nets, proxy=PUBLIC).runs for d in BOTH))
        except Exception as error: pairs, said[f'{m!r}, networks'] = (), dict(error=f'{type(error).__name__}: {error}')
        said.update({f'{m!r}, network {i}': same(*both) for i, both in enumerate(pairs)})
    alone = ran(FedAvg(), 'dev')
    with torch.autocast('dev', torch.bfloat16), torch.no_grad():
        said["inside of the caller's autocast"] = same(alone, ran(FedAvg(), 'dev'))
    return said

def forms(part='whole'):
    "A third of all classes in runs of their own, in each executor in turn; all in all if asked for the 'whole'."
    whole = part == 'whole'
    singles = {type(p): m for m in reversed([*METHODS, *TRIMMED, *PRIVATE, DepthFL(levels=(3, 3, 1, 2, 3, 1))])
               for p in m.parts[-1:]}
    cases = ([(m, e, r) for m in singles.values() for e in EXECUTORS for r in (False, True)] if whole else
             [(m, EXECUTORS[(i + 1) % 4], i//4 % 2 == 1) for i, m in enumerate(singles.values())])
    said, odd = {}, {
        DepthFL: dict(net=exits_mlp((6,), 3, hidden=6, depth=3)), DP: dict(norm='none'), DPSGD: dict(norm='none'),
        FedPara: dict(net=build('mlp', task(), seed=0, hidden=(24,), features=24)), FedDecomp: dict(epochs=2)}
    for m, e, r in cases:
        if not (whole or in_third(f'forms {m!r}', m, int(part))): continue
        kw = dict(executor=e, record=r, proxy=PUBLIC, **next((v for c, v in odd.items() if isinstance(m, c)), {}))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: said[f'{m!r}, {e}, {r}'] = same(*(ran(m, d, rounds=2, **kw) for d in BOTH))
            except Exception as error: said[f'{m!r}, {e}, {r}'] = dict(error=f'{type(error).__name__}: {error}'[:300])
    return dict(seen=said, classes=sorted({type(p).__name__ for m, _, _ in cases for p in m.parts}))

def after():
    "What a run is asked once it is over."
    t, said = task(), {}
    tests = [torch.arange(k, 30, 6) for k in range(6)]
    for d in BOTH:
        run = ran(Ditto(), d)
        with tempfile.TemporaryDirectory() as folder:
            report = run.report(Path(folder)/'report.html').read_text(encoding='utf-8')
            files = [Path(run.save_model(Path(folder)/f'{k}.safetensors', k)).read_bytes().hex() for k in (None, 1)]
        public = ran(FedDF(steps=2), d, proxy=PUBLIC)
        said[d] = dict(bytes=[traffic_of(r, r.origin) for r in (run, public)],
                       per_client=run.per_client(t, tests).to_dict('list'), files=files, report='<html' in report,
                       logits=[run.logits(t.x_test, client=k).tolist() for k in (None, 1)],
                       predict=[run.predict(t.x_test, client=k).tolist() for k in (None, 1)],
                       influence=run.influence([1]).to_dict('list'),
                       without=run.without(client=3).history.to_dict('list'))
    return {k: dict(apart=0., differ=str(v) != str(said['dev'][k])) for k, v in said['cpu'].items()}

def compiled():
    "Steps that were to be compiled: as on the CPU from the tape, and what is said of it."
    plain = ran(FedAvg(), 'cpu', executor='vmap')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        run = ran(FedAvg(), 'dev', executor='vmap', record='compile')
    return dict(same(plain, run), words=[str(w.message) for w in caught])

class Explodes(Method):
    "Client 2 sends infinity."
    def done(self, client, params, number): return client, dict(w=torch.where(number == 2, torch.inf, 1.))

def guard():
    "A bad client: skipped, reported, or the end of the run, with the same words."
    said = {}
    for then in ('skip', 'report', 'stop'):
        words, runs = [], []
        for d in BOTH:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                try: runs.append(ran(Explodes(), d, bad_clients=then))
                except FloatingPointError as e: words.append(str(e))
                words.append([str(w.message) for w in caught])
        said[then] = dict(words=words, **(same(*runs) if runs else {}))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        huge = [ran(FedAvg(), d, bad_clients=Guard('skip', update=.1)) for d in BOTH]
    return dict(said, huge=dict(same(*huge), skipped=columns(huge[0])['bad']))

def kept():
    "Tables past their budget lie on disk; checkpoints go from one device to the other."
    said, m = {}, FedBN() + MOON()
    whole = {d: ran(m, d, rounds=3) for d in BOTH}
    os.environ['FEDLIT_MEMORY'] = '100'
    said['past the budget'] = dict(same(whole['cpu'], spilled := ran(m, 'dev', rounds=3)),
                                   on_disk=next(iter(spilled.state.personal.values())).store.end > 0)
    del os.environ['FEDLIT_MEMORY']
    for begin, end in (BOTH, BOTH[::-1]):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder)/'run'
            ran(m, begin, rounds=2, checkpoint=file)
            said[f'{begin} to {end}'] = same(whole['cpu'], ran(m, end, rounds=3, checkpoint=file))
            read = Run.load(file, device=end)
            said[f'{begin} to {end}, loaded'] = dict(apart=apart(whole['cpu'].state, read.state),
                                                     at=next(read.model.parameters()).device.type)
    for m in (IFCA(), FedDBE()): # the network depends on the server's memory
        with tempfile.TemporaryDirectory() as folder:
            run = ran(m, 'cpu', checkpoint=(file := Path(folder)/'run'))
            said[repr(m)] = dict(apart=apart(run.state, Run.load(file, device='dev').state))
    return said

# ---- how often the host waits ----

READS = {
    'FedAvg, vmap': (FedAvg(), dict(executor='vmap')), 'FedAvg, loop': (FedAvg(), dict(executor='loop')),
    'MOON + FedDecorr, vmap': (MOON() + FedDecorr(), dict(executor='vmap')),
    'FedALA, vmap': (FedALA(), dict(executor='vmap')), 'FedCAC, vmap': (FedCAC(), dict(executor='vmap')),
    'SCAFFOLD, vmap': (SCAFFOLD(), dict(executor='vmap')), 'Ditto, vmap': (Ditto(), dict(executor='vmap')),
    'HeteroFL, extract': (HeteroFL(rates=(1., .5)), dict(executor='extract')),
    'HeteroFL, vmap': (HeteroFL(rates=(1., .5)), dict(executor='vmap')),
    'FedAvg, skipping': (FedAvg(), dict(executor='vmap', bad_clients='skip')),
    'FedAvg, metrics': (FedAvg(), dict(executor='vmap', metrics=dict(hits=lambda logits, y: hits_of(logits, y))))}

def hits_of(logits, y):
    "A metric, which is given tensors on the CPU."
    assert logits.device.type == y.device.type == 'cpu'
    return (logits.argmax(1) == y).float().mean()

def waits():
    "Reads of the host in a round: what two rounds more cost, halved; of a run that tests after every round."
    said = {}
    for name, (method, kw) in READS.items():
        def cost(rounds):
            with accelerator.counted() as seen: ran(method, 'dev', tests=None, rounds=rounds, **kw)
            return seen
        few, many = cost(2), cost(4)
        places = {k: (v - few['places'].get(k, 0))/2 for k, v in many['places'].items()}
        said[name] = dict(reads=(many['reads'] - few['reads'])/2, places={k: v for k, v in places.items() if v})
    return said

# ---- a device without double precision ----

DOUBLE = 'FedNova', 'SCAFFOLD', 'HeteroFL', 'FederatedDropout', 'FjORD' # ask for it where it is

def single(whole=''):
    "Methods and whole runs where float64 is refused, beside the CPU, which has it; if asked for the `whole`, all."
    said, some = {}, ('FedAvg, loop', 'HeteroFL + Scaler, extract', 'FedBN, personal', 'FedRep, images')
    with accelerator.limits(double=False):
        said.update(methods(whole, only=() if whole else DOUBLE)['seen'])
        for name, (method, kw) in RUNS.items():
            if 'watch' in kw or not whole and name not in some: continue
            try: said[name] = same(*(ran(method, d, **run_options(kw)) for d in BOTH))
            except Exception as error: said[name] = dict(error=f'{type(error).__name__}: {error}'[:300])
        finest = str(tree.finest(torch.device('dev')))
    return dict(seen=said, finest=finest)

# ---- the first hour with a GPU ----

PLAN = {'feddecorr/table1': 'cifar10,alpha=0.05', 'feddecorr/fig3': '', 'moon/table1': '', 'feddse/table3.4': ''}

def small_data(name, **kw): # as `load` is called
    "Random images of the form of a data set, a few of every class."
    side, channels, classes = dict(mnist=(28, 1, 10), cifar10=(32, 3, 10), cifar100=(32, 3, 100),
                                   tiny_imagenet=(64, 3, 200))[name]
    gen, n = torch.Generator().manual_seed(0), 20*10
    x = torch.randint(0, 256, (n + 20, channels, side, side), generator=gen, dtype=torch.uint8)
    y = torch.arange(n + 20) % 10
    return Task(name, x[:n], y[:n], x[n:], y[n:], classes)

def shortened(s):
    "A setting of the paper's with its method, clients and measurements, and a network and data that take a second."
    clients = min(s.clients, 10)
    model = s.model if s.model.startswith('exits') else 'small_cnn'
    return replace(s, task=s.task.partition('(')[0], model='exits_cnn' if model != 'small_cnn' else model, options=(),
                   rounds=2, clients=clients, participation=max(s.participation, .5), recipe='',
                   public=re.sub(r'\d+', '40', s.public),
                   partition='iid()', local=replace(s.local, epochs=1, batch_size=8))

def plan(device='dev', *entries):
    "The commands of the first hour, each in slices until nothing is missing: what they said, and what is there."
    import contextlib, io
    warnings.simplefilter('ignore')
    from fedlit import cli
    from fedlit.ground.files import read_json
    from fedlit import setting
    from fedlit.papers import catalogue, settings
    whole, known = catalogue.select, {}
    def part(entry, *given): # one seed of the first data set, and about three of its runs
        grid = whole(entry, *given)
        first = [(l, shortened(s)) for l, s in grid if (l['data'], l['seed']) == (grid[0][0]['data'], 0)]
        return [known.setdefault((entry.id, str(l)), (l, s)) for l, s in first[::-(-len(first)//3)]]
    catalogue.select, setting.load, said = part, small_data, {}
    for id, only in PLAN.items() if not entries else dict.fromkeys(entries, '').items():
        with tempfile.TemporaryDirectory() as out:
            ask = ['reproduce', id, '--scale', 'paper', '--only', only, '--device', device, '--out', out, '--quiet']
            left = []
            for minutes in [*['0.01']*3, *['9']*2]: # a slice stops after a round or two; the last finds nothing to do
                with contextlib.redirect_stdout(io.StringIO()) as told: cli.main([*ask, '--minutes', minutes])
                left.append(told.getvalue().splitlines()[-1])
            files = [read_json(f) for f in Path(out).rglob('*.json') if 'looks' not in f.name]
            done = [f for f in files if 'measured' in f]
            runs = {settings.address(s) for (e, _), (_, s) in known.items() if e == id}
            said[id] = dict(left=left, runs=len(runs), done=len(done),
                            rounds=sorted({len(f['history'].get('round', ())) for f in done}),
                            device=sorted({f.get('device') or f['failed'] for f in done}),
                            measured=sorted({k for f in done for k, v in f['measured'].items() if v}))
    return said

def far(a, b): return ((a - b.cpu()).norm()/a.norm().clamp(min=1e-12)).item()

def networks(*names):
    "Networks, the plan's by default, `all` of them if asked: a step forward and backward beside the CPU's."
    said = {}
    usual = 'mobilenetv2', 'moon_cnn', 'cnn4', 'feddse_resnet18'
    for name in models.models() if names == ('all',) else names or usual:
        task = small_data('tiny_imagenet' if name == 'alexnet_bn' else 'cifar10') # which wants larger images
        net = build(name, task, seed=0).double().train() # else depth makes much of rounding
        made = {}
        for d in BOTH:
            there = copy.deepcopy(net).to(d)
            features, logits = there(task.normalise(task.x_train[:4].to(d)).double())
            (features.square().mean() + logits.square().mean()).backward()
            made[d] = features.detach(), logits.detach(), torch.cat([p.grad.flatten() for p in there.parameters()
                                                                     if p.grad is not None])
        said[name] = dict(apart=max(map(far, made['cpu'], made['dev'])))
    for augment in (Crop(padding=4), Flip(), Rotate(), AutoAugment()):
        drawn = augment.draw((32,), torch.Generator().manual_seed(0))
        x = small_data('cifar10').x_train[:32]
        one, two = augment(x, drawn), augment(x.to('dev'), tmap(lambda v: v.to('dev'), drawn))
        said[repr(augment)] = dict(apart=(one.float() - two.cpu().float()).abs().max().item())
    return said

# ---- planted faults ----

class ThroughTheHost(Method):
    "A hook that goes through the machine's memory in every step."
    def grad(self, grads): return {k: (g.cpu()*1.).to(g.device) for k, g in grads.items()}
class LeftBehind(Method):
    "A hook that leaves its gradients in the machine's memory."
    def grad(self, grads): return {k: g.cpu() for k, g in grads.items()}
class Homeless(Method):
    "A hook that makes a tensor and does not say where."
    def loss(self, features): return (features + torch.zeros(features.shape)).square().mean()

def planted():
    "What becomes of methods that are wrong on an accelerator only."
    said, w = {}, world('dev')
    for m in (FedAvg(), ThroughTheHost(), LeftBehind(), Homeless()):
        laws.train(m, world('cpu'), 'loop', 1) # nothing is wrong with them here
        with accelerator.counted() as seen:
            try: error = laws.train(m, w, 'loop', 1) and ''
            except Exception as e: error = f'{type(e).__name__}: {e}'
        said[m.name] = dict(error=error, reads=seen['reads'], places=seen['places'])
    return said

def _hop(v): return v.cpu().to(v.device)
def _item(v): return v + 0*v.detach().sum().item()

# each in a method that has it in the usual run
PLANTS = {'FedProx.grad': _hop, 'FedAvgM.merge': _hop, 'SCAFFOLD.done': _hop, 'Krum.combine': _hop, 'TopK.send': _hop,
          'FedNova.weigh': _item, 'FedDyn.merge': _item, 'MOON.loss': _item, 'FedCAC.merge': _item}

def hooks():
    "The group `methods` for methods with a read planted into what one of their hooks returns."
    said = {}
    for name, fault in PLANTS.items():
        cls, hook = name.split('.')
        kind = getattr(library, cls)
        was = getattr(kind, hook)
        @functools.wraps(was) # which says what it asks for
        def planted(*args, **kw):
            out = was(*args, **kw)
            spoil = lambda of: tmap(lambda v: fault(v) if isinstance(v, torch.Tensor) else v, of)
            return tuple(map(spoil, out)) if isinstance(out, tuple) else spoil(out)
        setattr(kind, hook, planted)
        try: said[name] = methods(only=(cls,))['seen']
        finally: setattr(kind, hook, was)
    return said

def device():
    "What the stand-in itself promises: memory, views, refusals, counts."
    a = torch.ones(3, 2).to('dev')
    a.t()[1].mul_(5)
    with accelerator.counted() as seen: shape = a[a > 1].shape[0] + int(a.sum()) + len(a.tolist())
    def refused(f):
        try: f()
        except (RuntimeError, TypeError) as e: return f'{type(e).__name__}: {e}'
        return ''
    with accelerator.limits(double=False):
        double = refused(a.double), refused(lambda: torch.ones(2, dtype=torch.double).to('dev'))
    square = torch.tensor([[.1, 1.], [2., 3.]], dtype=torch.double)
    told = tree.to_host(torch.tensor([2**53 + 1]).to('dev'), torch.tensor([True, False, True]).to('dev'),
                        square.to('dev'), torch.zeros(0).to('dev'), torch.tensor(7, dtype=torch.uint8).to('dev'),
                        torch.arange(1., 7).to('dev')[::3])
    return dict(told=[v.tolist() for v in told], values=a.cpu().tolist(), stride=a.t().stride(),
                same=a.t().data_ptr() == a.data_ptr(), shape=shape,
                counts={k: seen.get(k, 0) for k in ('SYNC', 'TO CPU', 'FROM CPU', 'reads')},
                mixed=refused(lambda: a + torch.ones(3, 2)), index=refused(lambda: torch.ones(3)[a[:, 0].long()]),
                generator=refused(lambda: torch.randn(2, device='dev', generator=torch.Generator().manual_seed(0))),
                number=refused(lambda: a*torch.tensor(2.)), indices=refused(lambda: a[torch.tensor([0])]),
                double=double)

GROUPS = {f.__name__: f for f in (device, methods, runs, guard, kept, waits, single, plan, networks, planted, hooks,
                                     after, compiled, forms)}

if __name__ == '__main__':
    torch.set_num_threads(1)
    group, *given = sys.argv[1:]
    print(json.dumps(GROUPS[group](*given)))
