"For FedDSE and FedGSE: networks with statistics of their own, the coordinates a client had, the best of a score."
import torch, torch.nn.functional as F
from torch import nn
from federation import Net

class TwoLayers(nn.Module):
    "Two hidden layers, the second without a ReLU."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(4, 3)
    def forward(self, x):
        z = self.b(F.relu(self.a(x)))
        return z, self.head(z)

def network(kind):
    "A network with running statistics that have moved, samples, labels, its parameters and buffers."
    torch.manual_seed(3)
    net = (kind() if kind is TwoLayers else Net(norm=True)).double().eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(.5, 2)
            m.weight.data.uniform_(.5, 2)
            m.bias.data.normal_()
    x = torch.randn(9, *((5,) if kind is TwoLayers else (1, 6, 6))).double()
    return net, x, torch.randint(0, 3, (9,)), dict(net.named_parameters()), dict(net.named_buffers())

def by_batch(v, norm):
    "BatchNorm with the statistics of the batch."
    return F.batch_norm(v, None, None, norm.weight, norm.bias, training=True)

def kept(out, k):
    "Which coordinates of every layer the client at position `k` had."
    return {n: out['mask'][n][k].flatten().bool() for n in ('c1.bias', 'c2.bias', 'fc.bias')}

def highest(scores, n): return set(scores.argsort(descending=True)[:n].tolist())
