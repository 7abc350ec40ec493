"The two networks in torch, the same module for every contender that uses torch."
import torch
from collections import OrderedDict
from torch import nn

def _pool(n): return [(f'relu{n}', nn.ReLU()), (f'pool{n}', nn.MaxPool2d(2))]

def build(net, start=None):
    "A network that maps images to logits, with the weights `start` (name -> array)."
    if net == 'mlp':
        layers = [('flat', nn.Flatten()), ('one', nn.Linear(64, 128)), ('relu1', nn.ReLU()),
                  ('two', nn.Linear(128, 64)), ('relu2', nn.ReLU())]
        model = nn.Sequential(OrderedDict([*layers, ('head', nn.Linear(64, 10))]))
    else:
        layers = [('one', nn.Conv2d(1, 32, 5, padding=2)), *_pool(1),
                  ('two', nn.Conv2d(32, 64, 5, padding=2)), *_pool(2)]
        layers += [('flat', nn.Flatten()), ('three', nn.Linear(3136, 512)), ('relu3', nn.ReLU())]
        model = nn.Sequential(OrderedDict([*layers, ('head', nn.Linear(512, 10))]))
    if start: model.load_state_dict({k: torch.as_tensor(v) for k, v in start.items()})
    return model

def arrays(model): return {k: v.detach().numpy() for k, v in model.state_dict().items()}
