"pfl-research: its FederatedAveraging on its SimulatedBackend; one process, or several under torchrun, as documented."
import os, time
import torch, torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from .child import Clock, main
from .nets import arrays, build

class Shuffled(PyTorchTensorDataset):
    "A user's tensors in a new order every epoch; pfl's own datasets keep one order."
    visits = 0
    def iter(self, batch_size):
        x, y = self.raw_data
        for i in torch.randperm(len(y)).split(batch_size or len(y)):
            Shuffled.visits += len(i)
            yield x[i], y[i]

def with_losses(model):
    "What pfl asks of a network: `loss` and `metrics`."
    model.loss = lambda x, y: F.cross_entropy(model.train()(x), y)
    model.metrics = lambda x, y: dict(loss=Weighted(F.cross_entropy(model(x), y, reduction='sum').item(), len(y)))
    return model

class Laps(TrainingProcessCallback):
    def __init__(self): self.clock, self.visits = Clock(), []
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.clock.lap()
        self.visits.append(Shuffled.visits)
        return False, Metrics()

def run(work, data, options):
    torch.manual_seed(work['seed'])
    net = with_losses(build(work['net'], data.start))
    model = PyTorchModel(net, lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=work['momentum']),
                         torch.optim.SGD(net.parameters(), lr=1.))
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    users = {k: [x[p], y[p]] for k, p in enumerate(data.parts)}
    dataset = FederatedDataset(lambda k: Shuffled(users[k], user_id=k), get_user_sampler('minimize_reuse', list(users)))
    backend, laps = (SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]),
                     Laps())
    FederatedAveraging().run(
        NNAlgorithmParams(central_num_iterations=work['rounds'], evaluation_frequency=work['rounds'] + 1,
                          train_cohort_size=work['sampled'], val_cohort_size=0),
        backend, model,
        NNTrainHyperParams(local_batch_size=work['batch'], local_num_epochs=work['epochs'],
                           local_learning_rate=work['lr']),
        callbacks=[laps])
    end, samples = time.time(), torch.tensor(laps.visits[-1] - laps.visits[-2])
    if torch.distributed.is_initialized(): torch.distributed.all_reduce(samples)
    if os.environ.get('RANK', '0') != '0': return None
    return dict(seconds=laps.clock.seconds, ended=end, samples=samples.item(), weights=arrays(net),
                threads=torch.get_num_threads())

if __name__ == '__main__': main(run)
