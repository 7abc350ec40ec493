"What one training step costs clients of several capacities: `python -m bench.costs --out results/costs`."
import argparse, os, platform, time
import torch
from pathlib import Path
from types import SimpleNamespace
import fedlit
from fedlit.batches import Batches
from fedlit.cohort import Broadcast
from fedlit.ground.files import result, write_json
from fedlit.local import Local
from fedlit.methods.heterofl import HeteroFL
from fedlit.models import build
from fedlit.round import local_phase
from fedlit.scale.costs import RATES, costs, shrink, take_turns
from fedlit.state import start
from .drive import machine

NETWORKS = { # name of the file -> network of fedlit.models, shape of a sample, classes
    'conv':         ('cnn4', (1, 28, 28), 10),
    'resnet18':     ('feddse_resnet18', (3, 32, 32), 10),
    'resnet18_100': ('feddse_resnet18', (3, 32, 32), 100),
    'resnet34':     ('feddse_resnet34', (3, 32, 32), 200),
    'depthfl':      ('exits_resnet18', (3, 32, 32), 100)}
INSIDE = 'conv', 'resnet18' # of these the local phase of a round is timed as well

def this_machine():
    "What a measurement writes down about the machine it was made on."
    return dict(cpu=machine()['cpu'],
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                cores=os.cpu_count(), load=os.getloadavg() if hasattr(os, 'getloadavg') else None,
                torch=torch.__version__, python=platform.python_version(), fedlit=fedlit.__version__,
                date=time.strftime('%Y-%m-%d %H:%M'))

def measure_once(path, settings, make): # function of no arguments -> what the file holds besides the settings
    "Write what `make()` returns, unless the file holds a result with these settings."
    there = (result(path) or {}).get('settings') == settings
    if not there: write_json(path, dict(settings=settings, **make()))
    print(path, 'was there' if there else 'written', flush=True)

def parser(name, text, networks):
    "The options of both commands."
    p = argparse.ArgumentParser(f'python -m bench.{name}', description=text)
    p.add_argument('--out', default=f'reproduced/{name}', help=f'folder of the results (default: reproduced/{name})')
    p.add_argument('--networks', nargs='+', default=list(networks), choices=networks, metavar='NAME',
                   help=f"of {', '.join(networks)} (default: all)")
    p.add_argument('--repeats', type=int, default=5, help='how often each is timed (default: 5)')
    return p

def phase(
    model,    # the whole network
    r,        # capacity of the client
    x, y,     # one batch, used for every step
    executor, # "loop" or "extract"
    steps=4,  # in the local phase
):            # function of nothing that runs the local phase
    "The local phase of one HeteroFL client, as `fedlit.run.federate` runs it."
    method = HeteroFL(rates=(r,))
    state, many = start(method, model, 1), lambda v: v.expand(1, steps, *v.shape)
    local = Local(epochs=1, batch_size=len(y), lr=.01)
    return lambda: local_phase(Broadcast(method, model, state, local), [0], Batches(many(x), many(y)), executor)

def _executors(model, shape, batch_size, device, steps=4):
    "Seconds a step inside a round: `extract` for every capacity, and the masked network, which costs the same for all."
    model, x, y = (model.to(device), torch.randn(batch_size, *shape, device=device),
                   torch.zeros(batch_size, dtype=torch.long, device=device))
    jobs = ({('extract', r): phase(model, r, x, y, 'extract', steps) for r in RATES}
            | {('loop', RATES[-1]): phase(model, RATES[-1], x, y, 'loop', steps)})
    return dict(steps=steps, rows=[
        dict(executor=e, capacity=r, **dict(zip(('step', 'processor'), t.min(0)/steps)))
        for (e, r), t in take_turns(jobs, 2, device).items()])

def _settings(name, batch_size, repeats, device):
    network, shape, classes = NETWORKS[name]
    return dict(network=network, shape=list(shape), classes=classes, batch_size=batch_size, repeats=repeats,
                device=device, threads=torch.get_num_threads())

def measure(
    name,          # one of NETWORKS
    batch_size=32, # samples a step
    repeats=5,     # how often a step is timed
    device='cpu',
) -> dict:         # as JSON holds it
    "Everything that the command measures of one network."
    where, began = this_machine(), time.perf_counter()
    network, shape, classes = NETWORKS[name]
    model = build(network, SimpleNamespace(classes=classes, x_train=torch.empty(0, *shape)), seed=0)
    rows = costs(shrink(model), shape, batch_size, repeats, device)
    inside = _executors(model, shape, batch_size, device) if name in INSIDE else None
    label = 'depth' if hasattr(model, 'first') else 'capacity'
    return dict(rows=rows.rename_axis(label).reset_index().to_dict('records'),
                executors=inside, machine=where, seconds=time.perf_counter() - began)

def main(args=None):
    p = parser('costs', 'What one training step costs clients of several capacities.', NETWORKS)
    p.add_argument('--batch-size', type=int, default=32)
    p.add_argument('--device', default='cpu')
    p.add_argument('--threads', type=int, default=1, help='of torch on the CPU (default: 1)')
    a = p.parse_args(args)
    torch.set_num_threads(a.threads)
    for name in a.networks:
        request = name, a.batch_size, a.repeats, a.device
        measure_once(Path(a.out)/f'{name}.json', _settings(*request), lambda request=request: measure(*request))

if __name__ == '__main__': main()
