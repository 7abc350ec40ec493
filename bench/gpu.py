"""`python -m bench.gpu --out FOLDER`: W3, MobileNetV2 on CIFAR-10's shapes, and pfl's published job, on a GPU.

A piece takes minutes at most, and is written when it has ended; a second call measures those that are missing."""
import argparse, io, json, os, statistics, time, warnings
import numpy as np, torch, torch.nn.functional as F
from collections import OrderedDict
from pathlib import Path
from fedlit.data import Task, load as load_data, recipe
from fedlit.ground.files import write_file
from fedlit.methods import FedAvg
from fedlit.models import build, count, macs, wrap
from fedlit.partition import dirichlet, iid
from fedlit.local import Local
from fedlit.run import federate, federating
from torch import nn
from .drive import case, load, machine
from .overheads import turns
from .report import markdown

FULL = dict(net='mobilenetv2', images=50_000, clients=10, alpha=.5, epochs=1, batch=64,
            lr=.01, momentum=.9, weight_decay=1e-5, rounds=4, warmup=1, turns=10, seed=0)
TINY = dict(FULL, images=48, clients=2, batch=8, rounds=2, turns=5)
# pfl-research's benchmark on CIFAR-10 (`cifar10_iid`): 1,000 users, of whom 50 train in a round
PFL = dict(images=50_000, tests=10_000, users=50, each=50, batch=10, lr=.1, rounds=1_500, evaluate_every=10, seed=0)
PFL_TINY = dict(PFL, images=40, tests=20, users=2, each=10, rounds=4, evaluate_every=2)
PART = 'cifar10-part.npz' # what `--part` writes: some training images of CIFAR-10, small enough to be sent

# Assumed, not measured, by the name that torch gives the device. Vendor: NVIDIA's data sheets. Without tensor cores
# (fp32) and with them (tf32, bf16), dense: half of what is printed where that counts on sparsity.
def _peak(fp32, tf32, bandwidth, sheet):
    return dict(fp32=fp32*1e12, tf32=tf32*1e12, bf16=2*tf32*1e12, bytes=bandwidth*1e12,
                source=f'vendor (NVIDIA {sheet} data sheet, dense)')
PEAKS = {'NVIDIA H200': _peak(67, 494.5, 4.8, 'H200 SXM'),
         'NVIDIA H100 80GB HBM3': _peak(67, 494.5, 3.35, 'H100 SXM'),
         'NVIDIA H100 PCIe': _peak(51, 378, 2., 'H100 PCIe'),
         'NVIDIA A100-SXM4-40GB': _peak(19.5, 156, 1.555, 'A100 40GB'),
         'NVIDIA A100-PCIE-40GB': _peak(19.5, 156, 1.555, 'A100 40GB'),
         'NVIDIA A100-SXM4-80GB': _peak(19.5, 156, 2.039, 'A100 80GB SXM'),
         'NVIDIA A100 80GB PCIe': _peak(19.5, 156, 1.935, 'A100 80GB PCIe')}
GOALS = dict(float32=14_000, bfloat16=30_000) # images a second of W3, on one H100
GOAL_SECONDS = 60                             # for pfl's job, on one H100

def images(root, n, seed, tests=1, augmented=True):
    "CIFAR-10, or the part of it in `root`, or random images of its shape; and which of them it is."
    root = Path(root or os.environ.get('FEDLIT_DATA', 'data'))
    try: task, source = load_data('cifar10', root), 'CIFAR-10'
    except (FileNotFoundError, ValueError):
        if (root/PART).exists():
            with np.load(root/PART) as f:
                x, y, source = torch.from_numpy(f['x']), torch.from_numpy(f['y']), f'a part of CIFAR-10 ({PART})'
        else:
            gen, source = torch.Generator().manual_seed(seed), "random images of CIFAR-10's shape"
            x, y = (torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=gen),
                    torch.randint(10, (n,), generator=gen))
        task = Task('cifar10', x, y, x[:tests], y[:tests], classes=10)
        if tests > 1: source += ', tested on the first of them'
    task = Task('cifar10', task.x_train[:n], task.y_train[:n], task.x_test[:tests], task.y_test[:tests], classes=10)
    return recipe(task, 'feddecorr') if augmented else task, source

def write_part(root, n=20_000):
    "The first `n` training images, which lie in random order, as one file of less than 64 MiB."
    task = load_data('cifar10', root)
    path = Path(root or os.environ.get('FEDLIT_DATA', 'data'))/PART
    np.savez(whole := io.BytesIO(), x=task.x_train[:n].numpy(), y=task.y_train[:n].numpy())
    return write_file(path, whole.getvalue())

def traffic(model, shape, batch):
    "Operations and bytes that training one image takes: three forward passes, and its share of the step."
    sizes, heavy, hooks = [], [], []
    leaf = lambda m: not list(m.children()) and not isinstance(m, nn.Identity)
    def add(m, inputs, output):
        sizes.append(inputs[0].numel() + output.numel())
        if isinstance(m, (nn.Conv2d, nn.Linear)): heavy.append(sizes[-1])
    for m in filter(leaf, model.modules()): hooks.append(m.register_forward_hook(add))
    with torch.no_grad(): model.eval()(torch.zeros(1, *shape))
    for h in hooks: h.remove()
    forward = macs(model, shape)
    # a step reads the weights twice, writes and reads gradients, reads and writes velocity and weights:
    # eight times their number
    return dict(parameters=count(model), forward_macs=forward, flops=3*2*forward,
                activation_bytes=3*4*sum(sizes), fused_bytes=3*4*sum(heavy), step_bytes=8*4*count(model)/batch)

def roofline(counts, rate, device, precision='float32'):
    "The share of the roofline that `rate` images a second reach, by the device's assumed peaks."
    if (peak := PEAKS.get(device)) is None: return dict(peaks=None)
    kinds, share = dict(float32=(('fp32', 'tf32'), 1), bfloat16=(('bf16',), 1/2))[precision]
    most = lambda p, what: 1/max(counts['flops']/peak[p], (share*counts[what] + counts['step_bytes'])/peak['bytes'])
    best = {p: most(p, 'activation_bytes') for p in kinds} | {f'{kinds[-1]} fused': most(kinds[-1], 'fused_bytes')}
    return dict(peaks=peak, most_images_a_second=best, fraction={p: rate/b for p, b in best.items()})

def sync(device):
    if device.type == 'cuda': torch.cuda.synchronize()

def peak_reset(device):
    if device.type == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

def peak_device_mb(device): return torch.cuda.max_memory_allocated()/2**20 if device.type == 'cuda' else None

def peak_of(run, device):
    "As `peak_device_mb`, of a run: fedlit starts counting anew in every round."
    return float(run.history['peak_mb'].max())*1e6/2**20 if device.type == 'cuda' else None

class Pictures(torch.utils.data.Dataset):
    "A client's images through torchvision's transforms, as tutorials train on CIFAR-10."
    def __init__(self, task, rows):
        from torchvision import transforms as T
        self.x, self.y = task.x_train[rows].permute(0, 2, 3, 1).numpy(), task.y_train[rows].tolist()
        self.change = T.Compose([T.ToPILImage(), T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(),
                                 T.ToTensor(), T.Normalize(task.mean, task.std)])
    def __len__(self): return len(self.y)
    def __getitem__(self, i): return self.change(self.x[i]), self.y[i]

def plain(work, task, parts, device, workers):
    "FedAvg by a plain loop: DataLoaders with workers and pinned memory, torch.optim.SGD, cudnn choosing its kernels."
    pin = device.type == 'cuda'
    how = dict(batch_size=work['batch'], shuffle=True, num_workers=workers,
               pin_memory=pin, persistent_workers=workers > 0)
    loaders = [torch.utils.data.DataLoader(Pictures(task, p), **how) for p in parts]
    model, before = build(work['net'], task, seed=0).to(device).train(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark, seconds = True, []
    try:
        for _ in range(work['rounds']):
            began, sent, total = time.perf_counter(), {k: v.clone() for k, v in model.state_dict().items()}, None
            for part, loader in zip(parts, loaders):
                model.load_state_dict(sent)
                optimiser = torch.optim.SGD(model.parameters(), lr=work['lr'], momentum=work['momentum'],
                                            weight_decay=work['weight_decay'])
                for x, y in (batch for _ in range(work['epochs']) for batch in loader):
                    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                    if len(y) < 2: continue # BatchNorm needs two
                    optimiser.zero_grad()
                    F.cross_entropy(model(x)[1], y).backward()
                    optimiser.step()
                share = {k: v*(len(part)/len(task.y_train)) for k, v in model.state_dict().items()}
                total = share if total is None else {k: total[k] + v for k, v in share.items()}
            model.load_state_dict(total)
            sync(device)
            seconds.append(time.perf_counter() - began)
    finally: torch.backends.cudnn.benchmark = before
    finite(torch.stack([v.isfinite().all() for v in total.values()]).all())
    return dict(seconds=seconds, workers=workers, peak_device_mb=peak_device_mb(device))

def finite(good):
    if not good: raise ArithmeticError('what was trained is not finite')

def ours(work, task, parts, device, rounds, method=None, executor='auto', **how):
    "A `Run` of fedlit, round by round."
    local = Local(epochs=work['epochs'], batch_size=work['batch'],
                  lr=work['lr'], momentum=work['momentum'], weight_decay=work['weight_decay'])
    return federating(build(work['net'], task, seed=0), task, parts, method or FedAvg(), rounds, local,
                      seed=work['seed'], executor=executor, device=device.type, evaluate_every=rounds, progress=False,
                      **how)

def fedlit(work, task, parts, device, **how):
    *_, run = ours(work, task, parts, device, work['rounds'], **how)
    finite(np.isfinite(run.history['train_loss']).all())
    return dict(seconds=run.history['seconds'].tolist(), executor=run.settings['executor'],
                precision=run.settings['precision'], train_loss=run.last['train_loss'],
                peak_device_mb=peak_of(run, device))

def add_rates(work, parts, piece):
    "A piece with its median and images a second."
    median = statistics.median(piece['seconds'][work['warmup']:])
    return dict(piece, median=median, images_a_second=sum(map(len, parts))*work['epochs']/median)

def pfl_net(seed):
    """pfl's `simple_cnn`: 1,626,442 parameters; its dropout is left out, since compiled steps draw no numbers.

    Training it on an image takes 99.5 million operations, and the job's 3.75 million images 373 TFLOP."""
    torch.manual_seed(seed)
    net = nn.Sequential(OrderedDict(
        one=nn.Conv2d(3, 32, 3), relu1=nn.ReLU(), two=nn.Conv2d(32, 64, 3), relu2=nn.ReLU(), pool=nn.MaxPool2d(2),
        flat=nn.Flatten(), three=nn.Linear(64*14*14, 128), relu3=nn.ReLU(), head=nn.Linear(128, 10)))
    for m in net.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)): nn.init.xavier_uniform_(m.weight)
    return wrap(net, 'head')

def pfl_counts(net, job):
    "As `traffic`, without the gradient of the first convolution's input, which nobody needs."
    counts = traffic(net, (3, 32, 32), job['batch'])
    return dict(counts, flops=counts['flops'] - 2*macs(net.body.one, (3, 32, 32)))

def pfl(job, task, users, device, **how):
    """pfl's published job by fedlit: every round's seconds, and those of the whole.

    Outside of the rounds lies what the call does before the first one, and between them."""
    began = time.perf_counter()
    run = federate(pfl_net(job['seed']), task, users, FedAvg(), job['rounds'],
                   Local(epochs=1, batch_size=job['batch'], lr=job['lr'], momentum=0.),
                   participation=job['users']/len(users), seed=job['seed'], device=device.type,
                   evaluate_every=job['evaluate_every'], progress=False, **how)
    whole, seconds, last = time.perf_counter() - began, run.history['seconds'].tolist(), run.last
    finite(np.isfinite([last['train_loss'], last['loss']]).all())
    return dict(seconds=seconds, whole=whole, outside=whole - sum(seconds), median=statistics.median(seconds),
                executor=run.settings['executor'], precision=run.settings['precision'],
                accuracy=last['accuracy'], loss=last['loss'],
                images_a_second=job['users']*job['each']*len(seconds)/whole, peak_device_mb=peak_of(run, device))

def pieces(work, job, cores):
    "Name -> (what is measured, `work` or `job`; how), the most wanted first."
    out = {'fedlit-auto': (work, {}), 'pfl': (job, {})}
    out |= {'fedlit-bfloat16': (work, dict(precision='bfloat16')), 'fedlit-compile': (work, dict(record='compile')),
            'fedlit-compile-bfloat16': (work, dict(precision='bfloat16', record='compile'))}
    out |= {f'loop-{w}-workers': (work, dict(workers=w)) for w in sorted({min(4, cores), min(8, cores)})}
    out |= {'overheads': (work, {})} | {f'fedlit-{e}': (work, dict(executor=e)) for e in ('vmap', 'loop')}
    return out | {'pfl-compile': (job, dict(record='compile'))}

def measure(name, work, how, task, parts, device):
    "What a piece comes to."
    peak_reset(device)
    if name.startswith('pfl'): return pfl(work, task, parts, device, **how)
    if name == 'overheads':
        in_use = lambda: torch.cuda.memory_allocated()/1e6 if device.type == 'cuda' else None
        return turns(dict(work, rounds=work['turns'], warmup=3),
                     lambda m, rounds: ours(work, task, parts, device, rounds, m), in_use)
    return add_rates(work, parts, (plain if name.startswith('loop') else fedlit)(work, task, parts, device, **how))

def _shares(r):
    share = r['roofline'].get('fraction')
    return ', '.join(f'{k} {v:.3f}' for k, v in share.items()) if share else 'no peaks known for this device'

def _piece_row(k, r, warm, base):
    some = r['seconds'][warm:]
    return [k + (f" = {r['executor']}" if 'executor' in r else ''),
            f"{r['median']:.3f} ({min(some):.3f} to {max(some):.3f})",
            f"{r['images_a_second']:.0f}",
            f"{r['median']/base:.2f}" if base else '',
            _mb(r['peak_device_mb']),
            _shares(r)]

def _pfl_row(k, r):
    rate, peak = r['images_a_second']*r['settings']['counts']['flops'], r['roofline']['peaks']
    return [f"{k} = {r['executor']}", f"{r['whole']:.1f}", f"{r['outside']:.1f}",
            f"{r['median']:.4f} ({min(r['seconds']):.4f} to {max(r['seconds']):.4f})", f'{rate/1e12:.3g}',
            ', '.join(f'{p} {rate/peak[p]:.3f}' for p in ('fp32', 'tf32')) if peak else '',
            _shares(r), _mb(r['peak_device_mb']), f"{r['accuracy']:.3f}"]

def _mb(v): return 'not counted' if v is None else f'{v:.0f}'

def _turn_rows(r):
    for m, v in r['ratios'].items():
        yield [m, r['executors'][m], f'{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})',
               _mb(r['added_mb'][m])]

def goals(results):
    "Rows: what for, the goal, the best that was measured of the whole work, met or missed."
    whole = {k: r for k, r in results.items() if r['settings']['work'] in (FULL, PFL)}
    for precision, goal in GOALS.items():
        rates = {k: r['images_a_second'] for k, r in whole.items()
                 if k.startswith('fedlit') and r['precision'] == precision}
        yield _goal(f'W3, {precision}', f'at least {goal} images/s', rates, max, '.0f', lambda v, goal=goal: v >= goal)
    yield _goal("pfl's job", f'under {GOAL_SECONDS} s', {k: r['whole'] for k, r in whole.items() if 'whole' in r},
                min, '.1f', lambda v: v < GOAL_SECONDS)

def _goal(what, goal, values, choose, form, reaches):
    if not values: return [what, goal, '', 'not measured']
    k = choose(values, key=values.get)
    return [what, goal, f'{values[k]:{form}} ({k})', 'met' if reaches(values[k]) else 'missed']

def _notes(out):
    "Lines on what failed, and what was warned of, such as steps that cannot be compiled."
    for p in sorted(Path(out).glob('*.json')):
        try: r = json.loads(p.read_text())
        except (OSError, ValueError): continue
        if 'error' in r: yield f"{p.stem} did not run: {r['error']}"
        for note in r.get('warned', []): yield f'{p.stem} warned: {note}'

def _line(v): return ' '.join(str(v).split())[:300]

def _where(s):
    m = s['machine']
    return f"{s['device']}, torch {s['torch']}, {m['cores']} cores of {m['cpu']}. Data: {s['data']}."

def table(out):
    "Markdown of the pieces in `out`."
    results = {p.stem: r for p in sorted(Path(out).glob('*.json')) if (r := load(p))}
    rest = [line for l in _notes(out) for line in (l, '')]
    if not results: return '\n'.join(['# On a GPU', '', 'Nothing measured yet.', '', *rest])
    devices = sorted({r['settings']['device'] for r in results.values()})
    lines = ['# On a GPU', '', '## Goals', '', f"Set for one H100; measured on {', '.join(devices)}.", '',
             *markdown(['work', 'goal', 'measured', ''], goals(results)), *rest]
    jobs = {k: r for k, r in results.items() if 'whole' in r}
    lines += _w3({k: r for k, r in results.items() if k not in jobs}) + _pfl(jobs)
    if peak := next((p for r in results.values() if (p := r.get('roofline', {}).get('peaks'))), None):
        lines += [f"Peaks, assumed: {peak['fp32']/1e12:g} TFLOP/s fp32, {peak['tf32']/1e12:g} TFLOP/s tf32, "
                  f"{peak['bf16']/1e12:g} TFLOP/s bf16, {peak['bytes']/1e12:g} TB/s: {peak['source']}.", '']
    return '\n'.join(lines)

def _w3(results):
    if not results: return []
    s, base = next(iter(results.values()))['settings'], results.get('fedlit-auto', {}).get('median')
    w, c = s['work'], s['counts']
    name = 'MobileNetV2' if w['net'] == 'mobilenetv2' else w['net']
    lines = [f'## W3: {name}', '',
             f"{_where(s)} {s['visits']} images a round, {w['clients']} clients, Dirichlet {w['alpha']}, "
             f"batch {w['batch']}, {w['epochs']} local epoch(s), augmented; "
             f"{w['warmup']} of {w['rounds']} rounds warm up.", '']
    head = ['contender', 'seconds a round: median (min to max)', 'images a second',
            'times fedlit auto', 'peak device MB', 'of the roofline']
    lines += markdown(head, [_piece_row(k, r, w['warmup'], base) for k, r in results.items() if 'median' in r])
    if r := results.get('overheads'):
        lines += [f"Overheads, {len(r['seconds']['FedAvg'])} timed rounds a method, in turn:", '',
                  *markdown(['method', 'executor', 'median ratio to FedAvg of the same turn (min to max)',
                             'MB that a round adds on the device'], _turn_rows(r))]
    return lines + [
        f"Counted for one trained image: {c['flops']/1e6:.0f} million operations (three times the forward pass), "
        f"{c['activation_bytes']/1e6:.2f} MB of activations in float32 (three times the forward pass, in which "
        "every layer reads its input and writes its output once, nothing fused; residual additions are left out), "
        f"{c['fused_bytes']/1e6:.2f} MB where only convolutions and linear layers move them (fused); "
        f"half of either in bfloat16; {c['step_bytes']/1e6:.2f} MB for the step's weights.", '']

def _pfl(results):
    if not results: return []
    s = next(iter(results.values()))['settings']
    w, c = s['work'], s['counts']
    images = w['rounds']*w['users']*w['each']
    head = ['contender', 'seconds, the whole job', 'of these outside of rounds', 'seconds a round: median (min to max)',
            'TFLOP/s', 'of the peak', 'of the roofline', 'peak device MB',
            'accuracy']
    return ["## pfl's published job", '',
            f"{_where(s)} {w['rounds']} rounds of {w['users']} users with {w['each']} images each, batch {w['batch']}, "
            f"evaluated every {w['evaluate_every']} rounds on {w['tests']} images; {c['parameters']} parameters, "
            f"{c['flops']/1e6:.1f} million operations for an image (no gradient of the first input), "
            f"{images*c['flops']/1e12:.3g} TFLOP in all, evaluation left out.", '',
            *markdown(head, [_pfl_row(k, r) for k, r in results.items()])]

def attempt(what, settings):
    "What a piece comes to, beside the roofline, with its warnings; an error is written down."
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter('always', UserWarning)
        try: result = what()
        except Exception as e: result = dict(error=f'{type(e).__name__}: {_line(e)}')
    if 'images_a_second' in result:
        result['roofline'] = roofline(settings['counts'], result['images_a_second'], settings['device'],
                                      result.get('precision', 'float32'))
    notes = dict.fromkeys(_line(w.message) for w in records if issubclass(w.category, UserWarning))
    return dict(result, warned=list(notes))

def main(args=None):
    p = argparse.ArgumentParser(prog='python -m bench.gpu', description=__doc__)
    p.add_argument('--out', type=Path, help='folder of the pieces')
    p.add_argument('--root', help='folder of CIFAR-10 or of a part of it; $FEDLIT_DATA, or ./data')
    p.add_argument('--device', default='cuda')
    p.add_argument('--only', help='comma-separated pieces')
    p.add_argument('--again', action='store_true', help='measure anew what is there')
    p.add_argument('--tiny', action='store_true', help='a small try')
    p.add_argument('--part', action='store_true', help=f'write {PART} from a complete CIFAR-10 and stop')
    a = p.parse_args(args)
    if a.part: return print(write_part(a.root))
    if a.out is None: p.error('--out is needed')
    if a.device == 'cuda' and not torch.cuda.is_available():
        p.error('there is no GPU here; --device cpu --tiny tries the code')
    work, job, device, here = TINY if a.tiny else FULL, PFL_TINY if a.tiny else PFL, torch.device(a.device), machine()
    todo = pieces(work, job, here['cores'])
    only = a.only.split(',') if a.only else list(todo)
    if odd := [k for k in only if k not in todo]: p.error(f"{odd[0]} is none of {', '.join(todo)}")
    data = Prepared(a.root, device)
    for k, (request, how) in ((k, todo[k]) for k in todo if k in only):
        task, parts, settings = data.of(request, dict(how, machine=here))
        what = lambda k=k, request=request, how=how: measure(k, request, how, task, parts, device)
        result, new = case(a.out/f'{k}.json', settings, lambda: attempt(what, settings), a.again)
        text = result.get('error') or (f"{result['median']:.3f} s a round, {result['images_a_second']:.0f} images/s"
                                       if 'median' in result else '')
        state = 'failed' if 'error' in result else 'measured' if new else 'kept'
        print(f"{k}: {state}{text and ', '}{text}", flush=True)
        write_file(a.out/'table.md', table(a.out).encode())

class Prepared:
    "Data and settings of both works, made when they are first asked for."
    def __init__(self, root, device): self.root, self.device, self.cache = root, device, {}
    def of(self, work, more):
        key = 'users' in work
        if key not in self.cache: self.cache[key] = (self._pfl if key else self._w3)(work)
        task, parts, data, counts = self.cache[key]
        name = torch.cuda.get_device_name() if self.device.type == 'cuda' else 'cpu'
        return task, parts, dict(work=work, data=data, counts=counts, device=name, torch=torch.__version__,
                                 cuda=torch.version.cuda, visits=sum(map(len, parts))*work.get('epochs', 1), **more)
    def _w3(self, work):
        task, source = images(self.root, work['images'], work['seed'])
        parts = dirichlet(task.y_train, work['clients'], work['alpha'], seed=work['seed'])
        return task, parts, source, traffic(build(work['net'], task, seed=0), (3, 32, 32), work['batch'])
    def _pfl(self, job):
        task, source = images(self.root, job['images'], job['seed'], job['tests'], augmented=False)
        users = iid(task.y_train, len(task.y_train)//job['each'], job['seed'])
        return task, users, source, pfl_counts(pfl_net(job['seed']), job)

if __name__ == '__main__': main()
