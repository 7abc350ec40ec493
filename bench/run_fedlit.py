"fedlit: `federate`, executor auto. The test set is a single image, because `federate` always evaluates the last round."
import time
import torch
from fedlit.data import Task
from fedlit.methods import FedAvg
from fedlit.models import wrap
from fedlit.batches import plan
from fedlit.local import Local
from fedlit.ground.memory import hold_memory
from fedlit.run import federate
from .child import main
from .nets import arrays, build

def task(data):
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    return Task('bench', x, y, x[:1], y[:1], classes=10)

def local(work): return Local(epochs=work['epochs'], batch_size=work['batch'], lr=work['lr'], momentum=work['momentum'])

def run(work, data, options):
    hold_memory()
    clients, how, before = [torch.as_tensor(p) for p in data.parts], local(work), time.perf_counter()
    result = federate(wrap(build(work['net'], data.start), 'head'), task(data), clients, FedAvg(), work['rounds'], how,
                      participation=work['sampled']/work['clients'], seed=work['seed'],
                      executor=options.get('executor', 'auto'), record=options.get('record', True), device='cpu',
                      precision=options.get('precision', 'float32'),
                      evaluate_every=work['rounds'], progress=False)
    end, wall, seconds = time.time(), time.perf_counter() - before, result.history['seconds'].tolist()
    # all clients, or as many equal ones as take part
    samples = int(plan(clients, list(range(work['sampled'])), how, work['seed'])[1].sum())
    whole = build(work['net'])
    whole.load_state_dict({k.removeprefix('body.'): v for k, v in result.model.state_dict().items()})
    return dict(seconds=seconds, ended=end, samples=samples, weights=arrays(whole), threads=torch.get_num_threads(),
                executor=result.settings['executor'], outside_rounds=wall - sum(seconds))

if __name__ == '__main__': main(run)
