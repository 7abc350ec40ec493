"BlazeFL: its FedAvg, one client after another, in a pool of threads, or in a pool of processes."
import functools, sys, tempfile, time
from pathlib import Path
import torch
from blazefl.contrib import (FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer,
                             FedAvgThreadPoolClientTrainer)
from torch.utils.data import DataLoader, TensorDataset
from .child import Clock, main
from .nets import arrays, build

class Selector:
    "BlazeFL asks for its network by a name; there is one here."
    def __init__(self, work, start): self.net, self.start = work['net'], start
    def select_model(self, name): return build(self.net, self.start)

class Parts:
    "What BlazeFL calls a partitioned data set: a loader for each client over its samples."
    def __init__(self, x, y, parts): self.sets = [TensorDataset(x[p], y[p]) for p in parts]
    def get_dataset(self, type_, cid): return self.sets[cid]
    def set_dataset(self, type_, cid, dataset): self.sets[cid] = dataset
    def get_dataloader(self, type_, cid, batch_size=None, generator=None):
        return DataLoader(self.sets[cid], batch_size, shuffle=True, generator=generator)

def trainer(pool, work, common, folder):
    "The client side: `pool` is 'threads', 'processes' or None."
    same = dict(common, epochs=work['epochs'], lr=work['lr'])
    if pool == 'threads': return FedAvgThreadPoolClientTrainer(**same, num_parallels=2)
    if pool is None: return FedAvgBaseClientTrainer(**same)
    torch.multiprocessing.set_start_method('fork') # a pool a round: others would import torch in each
    return FedAvgProcessPoolClientTrainer(**same, num_parallels=2, state_dir=Path(folder))

def run(work, data, options):
    torch.set_num_threads(options['threads'])
    # its FedAvg trains without momentum; all else is its own
    torch.optim.SGD = functools.partial(torch.optim.SGD, momentum=work['momentum'])
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    common = dict(model_selector=Selector(work, data.start), model_name=work['net'], dataset=Parts(x, y, data.parts),
                  device='cpu', num_clients=work['clients'], batch_size=work['batch'], seed=work['seed'])
    server, clock = FedAvgBaseServerHandler(**common, global_round=work['rounds'],
                                            sample_ratio=work['sampled']/work['clients']), Clock()
    with tempfile.TemporaryDirectory() as folder:
        clients = trainer(options['pool'], work, common, folder)
        while not server.is_stopped():
            who = server.sample_clients()
            clients.local_process(server.downlink_package(), who)
            for package in clients.uplink_package(): server.load(package)
            clock.lap()
        end = time.time()
    return dict(seconds=clock.seconds, ended=end, weights=arrays(server.model), threads=torch.get_num_threads(),
                samples=sum(len(data.parts[k]) for k in who)*work['epochs'],
                gil=getattr(sys, '_is_gil_enabled', lambda: True)())

if __name__ == '__main__': main(run)
