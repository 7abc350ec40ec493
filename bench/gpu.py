"""`python -m bench.gpu --out FOLDER`: W3, MobileNetV2 on CIFAR-10's shapes, on a GPU.

Every piece is written when it is done; a second call goes on where the first one stopped;
it stops by itself before `--limit` seconds."""
import argparse, io, os, signal, statistics, time
import numpy as np, torch, torch.nn.functional as F
from pathlib import Path
from fedlit.data import Task, load as load_data, recipe
from fedlit.engine.files import write_file
from fedlit.methods import FedAvg
from fedlit.models import build, count, macs
from fedlit.partition import dirichlet
from fedlit.round import Local
from fedlit.run import federating
from .drive import case, load, machine
from .overheads import turns
from .report import markdown

FULL = dict(images=50_000, clients=10, alpha=.5, epochs=1, batch=64, lr=.01, momentum=.9, weight_decay=1e-5,
            rounds=4, warmup=1, turns=10, seed=0)
TINY = dict(FULL, images=48, clients=2, batch=8, rounds=2, turns=5)
PART = 'cifar10-part.npz' # what `--part` writes: some training images of CIFAR-10, small enough to be sent

# Assumed, not measured. Vendor: NVIDIA's data sheet of the H200 SXM;
# TF32 is half of the printed 989, which counts on sparsity.
PEAKS = {'H200': dict(fp32=67e12, tf32=494.5e12, bytes=4.8e12, source='vendor (NVIDIA H200 SXM data sheet, dense)')}

class TimeUp(Exception): "The limit is near."

def images(root, n, seed):
    "CIFAR-10, or the part of it in `root`, or random images of its shape; and which of them it is."
    root = Path(root or os.environ.get('FEDLIT_DATA', 'data'))
    try: task, said = load_data('cifar10', root), 'CIFAR-10'
    except (FileNotFoundError, ValueError):
        if (root/PART).exists():
            with np.load(root/PART) as f:
                x, y, said = torch.from_numpy(f['x']), torch.from_numpy(f['y']), f'a part of CIFAR-10 ({PART})'
        else:
            gen, said = torch.Generator().manual_seed(seed), "random images of CIFAR-10's shape"
            x, y = (torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=gen),
                    torch.randint(10, (n,), generator=gen))
        task = Task('cifar10', x, y, x[:1], y[:1], classes=10)
    x, y = task.x_train[:n], task.y_train[:n]
    # one test image: `federate` evaluates its last round
    return recipe(Task('cifar10', x, y, x[:1], y[:1], classes=10), 'feddecorr'), said

def write_part(root, n=20_000):
    "The first `n` training images, which lie in random order, as one file of less than 64 MiB."
    task = load_data('cifar10', root)
    path = Path(root or os.environ.get('FEDLIT_DATA', 'data'))/PART
    np.savez(whole := io.BytesIO(), x=task.x_train[:n].numpy(), y=task.y_train[:n].numpy())
    return write_file(path, whole.getvalue())

def traffic(model, shape, batch):
    "Operations and bytes that training one image takes: three forward passes, and its share of the step."
    moved, hooks = [], []
    leaf = lambda m: not list(m.children()) and not isinstance(m, torch.nn.Identity)
    def add(m, inputs, output): moved.append(inputs[0].numel() + output.numel())
    for m in filter(leaf, model.modules()): hooks.append(m.register_forward_hook(add))
    with torch.no_grad(): model.eval()(torch.zeros(1, *shape))
    for h in hooks: h.remove()
    forward = macs(model, shape)
    # a step reads the weights twice, writes and reads gradients, reads and writes velocity and weights:
    # eight times their number
    return dict(parameters=count(model), forward_macs=forward, flops=3*2*forward,
                activation_bytes=3*4*sum(moved), step_bytes=8*4*count(model)/batch)

def roofline(counts, rate, device):
    "The share of the roofline that `rate` images a second reach, by the device's assumed peaks."
    peak = next((v for k, v in PEAKS.items() if k in device), None)
    if peak is None: return dict(peaks=None)
    moved = counts['activation_bytes'] + counts['step_bytes']
    best = {p: 1/max(counts['flops']/peak[p], moved/peak['bytes']) for p in ('fp32', 'tf32')}
    return dict(peaks=peak, most_images_a_second=best, fraction={p: rate/b for p, b in best.items()})

def sync(device):
    if device.type == 'cuda': torch.cuda.synchronize()

def peak_reset(device):
    if device.type == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

def peak_device_mb(device): return torch.cuda.max_memory_allocated()/2**20 if device.type == 'cuda' else None

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
    pinned = device.type == 'cuda'
    how = dict(batch_size=work['batch'], shuffle=True, num_workers=workers,
               pin_memory=pinned, persistent_workers=workers > 0)
    loaders = [torch.utils.data.DataLoader(Pictures(task, p), **how) for p in parts]
    model, seconds, before = build('mobilenetv2', task, seed=0).to(device).train(), [], torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
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
    return dict(seconds=seconds, workers=workers)

def ours(work, task, parts, device, executor, method=None, rounds=None):
    "A `Run` of fedlit, round by round."
    how = Local(epochs=work['epochs'], batch_size=work['batch'],
                lr=work['lr'], momentum=work['momentum'], weight_decay=work['weight_decay'])
    rounds = rounds or work['rounds']
    return federating(build('mobilenetv2', task, seed=0), task, parts, method or FedAvg(), rounds, how,
                      seed=work['seed'], executor=executor, device=device.type, evaluate_every=rounds, progress=False)

def fedlit_piece(work, task, parts, device, executor):
    began = time.perf_counter()
    *_, run = ours(work, task, parts, device, executor)
    sync(device)
    seconds = run.history['seconds'].tolist()
    return dict(seconds=seconds, executor=run.settings['executor'],
                outside_rounds=time.perf_counter() - began - sum(seconds))

def timed(work, device, what, visits):
    "A piece with its median, images a second and peak memory."
    peak_reset(device)
    seen = what()
    median = statistics.median(seen['seconds'][work['warmup']:])
    return dict(seen, median=median, images_a_second=visits/median, peak_device_mb=peak_device_mb(device))

def pieces(work, task, parts, device, cores):
    "(name, what measures it), the most wanted first."
    visits = sum(map(len, parts))*work['epochs']
    piece = lambda what: (lambda: timed(work, device, what, visits))
    yield 'fedlit-auto', piece(lambda: fedlit_piece(work, task, parts, device, 'auto'))
    for w in sorted({min(4, cores), min(8, cores)}):
        yield f'loop-{w}-workers', piece(lambda w=w: plain(work, task, parts, device, w))
    yield 'overheads', lambda: taking_turns(dict(work, rounds=work['turns'], warmup=3), task, parts, device)
    for e in ('vmap', 'loop'):
        yield f'fedlit-{e}', piece(lambda e=e: fedlit_piece(work, task, parts, device, e))

def taking_turns(work, task, parts, device):
    held = lambda: torch.cuda.memory_allocated()/1e6 if device.type == 'cuda' else None
    return turns(work, lambda m, rounds: ours(work, task, parts, device, 'auto', m, rounds), held)

def _piece_row(k, r, warm, base):
    some, share = r['seconds'][warm:], r['roofline'].get('fraction')
    said = ', '.join(f'{v:.3f}' for v in share.values()) if share else 'no peaks known for this device'
    return [k + (f" = {r['executor']}" if 'executor' in r else ''),
            f"{r['median']:.3f} ({min(some):.3f} to {max(some):.3f})",
            f"{r['images_a_second']:.0f}",
            f"{r['median']/base:.2f}" if base else '',
            _mb(r['peak_device_mb']),
            said]

def _mb(v): return 'not counted' if v is None else f'{v:.0f}'

def _turn_rows(r):
    for m, v in r['ratios'].items():
        yield [m, r['executors'][m], f'{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})',
               _mb(r['added_mb'][m])]

def table(out):
    "Markdown of the pieces in `out`."
    seen = {p.stem: r for p in sorted(Path(out).glob('*.json')) if (r := load(p))}
    if not seen: return '# W3\n\nNothing measured yet.\n'
    s, base = next(iter(seen.values()))['settings'], seen.get('fedlit-auto', {}).get('median')
    w, c, m = s['work'], s['counts'], s['machine']
    lines = ['# W3: MobileNetV2', '',
             f"{s['device']}, torch {s['torch']}, {m['cores']} cores of {m['cpu']}. Data: {s['data']}. "
             f"{s['visits']} images a round, {w['clients']} clients, Dirichlet {w['alpha']}, batch {w['batch']}, "
             f"{w['epochs']} local epoch(s), augmented; {w['warmup']} of {w['rounds']} rounds warm up.", '']
    head = ['contender', 'seconds a round: median (min to max)', 'images a second',
            'times fedlit auto', 'peak device MB', 'of the roofline: fp32, tf32']
    lines += markdown(head, [_piece_row(k, r, w['warmup'], base) for k, r in seen.items() if 'median' in r])
    if r := seen.get('overheads'):
        lines += [f"Overheads, {len(r['seconds']['FedAvg'])} timed rounds a method, in turn:", '',
                  *markdown(['method', 'executor', 'median ratio to FedAvg of the same turn (min to max)',
                             'MB that a round adds on the device'], _turn_rows(r))]
    lines += [f"Counted for one trained image: {c['flops']/1e6:.0f} million operations (three times the forward pass), "
              f"{c['activation_bytes']/1e6:.2f} MB of activations (three times the forward pass, in which "
              "every layer reads its input and writes its output once, nothing fused; "
              "residual additions are left out), "
              f"{c['step_bytes']/1e6:.2f} MB for the step's weights.", '']
    if peak := next((p for r in seen.values() if (p := r.get('roofline', {}).get('peaks'))), None):
        lines += [f"Peaks, assumed: {peak['fp32']/1e12:g} TFLOP/s fp32, {peak['tf32']/1e12:g} TFLOP/s tf32, "
                  f"{peak['bytes']/1e12:g} TB/s: {peak['source']}.", '']
    return '\n'.join(lines)

def main(args=None):
    began = time.time()
    p = argparse.ArgumentParser(prog='python -m bench.gpu', description=__doc__)
    p.add_argument('--out', type=Path, help='folder of the pieces')
    p.add_argument('--limit', type=float, default=540, help='stop before this many seconds')
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
    work, device = TINY if a.tiny else FULL, torch.device(a.device)
    task, said = images(a.root, work['images'], work['seed'])
    parts = dirichlet(task.y_train, work['clients'], work['alpha'], seed=work['seed'])
    counts, name = (traffic(build('mobilenetv2', task, seed=0), (3, 32, 32), work['batch']),
                    torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu')
    here = machine()
    settings = dict(work=work, data=said, visits=sum(map(len, parts))*work['epochs'], device=name,
                    torch=torch.__version__, cuda=torch.version.cuda, machine=here, counts=counts)
    def up(*_): raise TimeUp()
    signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, max(1., a.limit - 10 - (time.time() - began)))
    try:
        for k, what in pieces(work, task, parts, device, here['cores']):
            if a.only and k not in a.only.split(','): continue
            def measured(what=what):
                seen = what()
                return (dict(seen, roofline=roofline(counts, seen['images_a_second'], name))
                        if 'images_a_second' in seen else seen)
            seen, new = case(a.out/f'{k}.json', settings, measured, a.again)
            said = (f", {seen['median']:.3f} s a round, {seen['images_a_second']:.0f} images/s"
                    if 'median' in seen else '')
            print(f"{k}: {'measured' if new else 'kept'}{said}", flush=True)
    except TimeUp: print(f'{a.limit:.0f} s are nearly over; call again to go on')
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if a.out.exists(): write_file(a.out/'table.md', table(a.out).encode())

if __name__ == '__main__': main()
