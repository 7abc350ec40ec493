"The plain loop with a torch DataLoader per client, as tutorials have it."
import torch
from torch.utils.data import DataLoader, TensorDataset
from .child import main
from .run_loop import fedavg

def run(work, data, options):
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    loaders = [DataLoader(TensorDataset(x[i], y[i]), batch_size=work['batch'], shuffle=True, num_workers=0)
               for i in map(torch.from_numpy, data.parts)]
    return fedavg(work, data, lambda r, k: (batch for _ in range(work['epochs']) for batch in loaders[k]))

if __name__ == '__main__': main(run)
