"Flower: its simulation engine on ray, FedAvg of its message API, one virtual node per client."
import os, time
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from .child import Clock, main
from .nets import arrays, build
from .run_loop import shuffle, train
from .work import Data

_cache = {}
def load(path):
    "The data and the network of this process, read once: a ray actor serves many rounds."
    if path not in _cache:
        data = Data(path)
        _cache[path] = data, torch.from_numpy(data.x), torch.from_numpy(data.y)
    return _cache[path]

def client_app(work, path, threads):
    app = ClientApp()
    @app.train()
    def _(message: Message, context: Context):
        torch.set_num_threads(threads)
        (data, x, y), k = load(path), int(context.node_config['partition-id'])
        model = build(work['net'])
        model.load_state_dict(message.content['arrays'].to_torch_state_dict())
        count = train(model, work, ((x[i], y[i]) for i in shuffle(work, data, 0, k)))
        metrics = MetricRecord({'num-examples': len(data.parts[k]), 'visited': count})
        return Message(content=RecordDict({'arrays': ArrayRecord(model.state_dict()), 'metrics': metrics}),
                       reply_to=message)
    return app

class Timed(FedAvg):
    "FedAvg that notes when each round has ended; the first begins when its messages are made."
    clock, visits = None, 0
    def configure_train(self, server_round, arrays, config, grid):
        self.clock = self.clock or Clock()
        return super().configure_train(server_round, arrays, config, grid)
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if bad := [m.error.reason for m in replies if m.has_error()]:
            raise RuntimeError(f'a Flower client failed: {bad[0]}')
        out = super().aggregate_train(server_round, replies)
        self.clock.lap()
        self.visits = sum(int(m.content['metrics']['visited']) for m in replies)
        return out

def run(work, data, options):
    threads, out = options['cpus'], {}
    server = ServerApp()
    @server.main()
    def _(grid: Grid, context: Context):
        strategy = Timed(fraction_train=work['sampled']/work['clients'], fraction_evaluate=0.,
                         min_train_nodes=work['sampled'], min_available_nodes=work['clients'])
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(build(work['net'], data.start).state_dict()),
                                num_rounds=work['rounds'])
        out.update(strategy=strategy, ended=time.time(), state=result.arrays.to_torch_state_dict())
    run_simulation(server, client_app(work, options['data'], threads), num_supernodes=work['clients'],
                   backend_config=dict(client_resources=dict(num_cpus=threads, num_gpus=0.),
                                       init_args=dict(num_cpus=os.cpu_count())))
    if 'strategy' not in out: raise RuntimeError('the Flower server stopped before the last round; its log says why')
    model = build(work['net'], {k: v.numpy() for k, v in out['state'].items()})
    strategy = out['strategy']
    return dict(seconds=strategy.clock.seconds, ended=out['ended'], samples=strategy.visits,
                weights=arrays(model), threads=threads)

if __name__ == '__main__': main(run)
