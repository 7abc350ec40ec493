"The workloads: what is trained, on which arrays, from which weights. NumPy only, which every contender can import."
import json
import numpy as np
from pathlib import Path

SGD = dict(batch=32, lr=.05, momentum=.9)
WORKLOADS = dict(
    W1=dict(data='digits', net='mlp', clients=10, sampled=10, epochs=5,
            rounds=20, warmup=2, seed=0, **SGD),
    W1u=dict(data='digits', alpha=.05, net='mlp', clients=10, sampled=10, epochs=10,
             rounds=6, warmup=0, seed=0, **SGD), # uneven, and cold: what people run
    W2=dict(data='noise', images=60_000, net='cnn', clients=100, sampled=10, epochs=2,
            rounds=4, warmup=1, seed=0, **SGD),
    tiny=dict(data='digits', train=200, net='mlp', clients=4, sampled=4, epochs=2,
              rounds=3, warmup=1, seed=0, **SGD)) # for tests
HEARD = 'W1', 'W1u', 'W2' # what `python -m bench` runs

# what fedlit's methods cost over FedAvg, on CPU analogues of W3:
# all clients in every round, methods taking turns by the round
OVERHEADS = dict(
    cnn=dict(net='cnn', shape=[1, 28, 28], clients=10, each=96, epochs=2, batch=32,
             rounds=43, warmup=3, threads=2, seed=0),
    mobilenetv2=dict(net='mobilenetv2', shape=[3, 32, 32], clients=4, each=128, epochs=1, batch=64,
                     rounds=13, warmup=3, threads=2, seed=0),
    tiny=dict(net='cnn', shape=[1, 28, 28], clients=2, each=16, epochs=1, batch=8,
              rounds=4, warmup=2, threads=1, seed=0))

# fedlit's seconds and memory against how many clients exist
GROWTH = dict(
    full=dict(net='mlp', counts=[100, 1_000, 10_000, 100_000], sampled=100, each=32, pool=2_000, epochs=5, batch=32,
              rounds=22, warmup=2, seed=0),
    tiny=dict(net='mlp', counts=[10, 20], sampled=10, each=32, pool=200, epochs=1, batch=32,
              rounds=3, warmup=1, seed=0))
# what a round is beside a plain product of matrices with so many rows
PRODUCTS = dict(W1=dict(size=2048, precisions=['float32'], threads=2),
                W2=dict(size=2048, precisions=['float32', 'bfloat16'], threads=2),
                tiny=dict(size=64, precisions=['float32'], threads=1))
# how often the host waits for a device, and how many operations a stack takes
COUNTS = dict(full=dict(nets=['mlp'], shape=[1, 8, 8], clients=4, each=32, batch=16, rounds=3, seed=0),
              tiny=dict(nets=['mlp'], shape=[1, 8, 8], clients=2, each=8, batch=8, rounds=3, seed=0))
# sub-models beside the small network alone, on W2's network with W2's clients; ragged clients beside even ones
SUBMODELS = dict(
    cnn=dict(net='cnn', shape=[1, 28, 28], clients=10, each=600, public=1024, rate=1/16, epochs=2, batch=32,
             rounds=9, warmup=3, threads=1, seed=0),
    tiny=dict(net='cnn', shape=[1, 28, 28], clients=2, each=16, public=8, rate=1/16, epochs=1, batch=8,
              rounds=4, warmup=2, threads=1, seed=0))
RAGGED = dict(
    mlp=dict(net='mlp', shape=[1, 8, 8], even=[145]*10, ragged=[131, 134, 137, 140, 143, 147, 150, 153, 156, 159],
             epochs=5, batch=32, rounds=34, warmup=4, threads=1, seed=0),
    tiny=dict(net='mlp', shape=[1, 8, 8], even=[12]*2, ragged=[11, 13], epochs=1, batch=8,
              rounds=4, warmup=2, threads=1, seed=0))
GROWN = dict(fedavg='FedAvg()', moon='MOON()')

# name -> (shape of the weight, inputs of one output); a bias has the first of the shape. Both torch's way round.
NETS = dict(
    mlp=dict(one=((128, 64), 64), two=((64, 128), 128), head=((10, 64), 64)),
    cnn=dict(one=((32, 1, 5, 5), 25), two=((64, 32, 5, 5), 800), three=((512, 3136), 3136), head=((10, 512), 512)))

def weights(net, seed):
    "Initial weights as torch draws them by default: uniform within one over the root of the number of inputs."
    rng, out = np.random.default_rng((seed, 1)), {}
    for name, (shape, fan) in NETS[net].items():
        for kind, size in (('weight', shape), ('bias', shape[:1])):
            out[f'{name}.{kind}'] = rng.uniform(-fan**-.5, fan**-.5, size).astype(np.float32)
    return out

def dirichlet(y, clients, alpha, rng, least=10):
    "Shares of every class from a Dirichlet distribution, until all have `least` samples: an index array per client."
    while True:
        parts = [[] for _ in range(clients)]
        for c in np.unique(y):
            rows = rng.permutation(np.flatnonzero(y == c))
            cuts = (np.cumsum(rng.dirichlet([alpha]*clients))[:-1]*len(rows)).astype(int)
            for part, some in zip(parts, np.split(rows, cuts)): part.append(some)
        parts = [np.sort(np.concatenate(p)) for p in parts]
        if min(map(len, parts)) >= least: return parts

def make(work):
    "Arrays of a workload: x, y, x_test, y_test, the clients' indices end to end, their sizes, and the initial weights."
    rng = np.random.default_rng(work['seed'])
    if work['data'] == 'digits':
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        x, y = load_digits(return_X_y=True)
        x = (x*255/16).round().astype(np.uint8).reshape(-1, 1, 8, 8)
        x, x_test, y, y_test = train_test_split(x, y, test_size=360, stratify=y, random_state=work['seed'])
        x, y = x[:work.get('train')], y[:work.get('train')]
        parts = dirichlet(y, work['clients'], work.get('alpha', .5), rng)
    else: # pixels and labels mean nothing: time does not depend on them
        x, y = rng.integers(0, 256, (work['images'], 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, work['images'])
        x_test, y_test, parts = x[:100], y[:100], np.array_split(rng.permutation(len(y)), work['clients'])
    return dict(x=x, y=y.astype(np.int64), x_test=x_test, y_test=y_test.astype(np.int64),
                index=np.concatenate(parts), sizes=np.array([len(p) for p in parts]),
                **{f'start/{k}': v for k, v in weights(work['net'], work['seed']).items()})

def write(work, folder):
    "The file that holds the workload's arrays, made if it is not there."
    import hashlib, io
    from fedlit.ground.files import write_file
    name = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(folder)/f'{name}.npz'
    if not path.exists():
        np.savez(whole := io.BytesIO(), **make(work))
        write_file(path, whole.getvalue())
    return path

class Data:
    "A contender's arrays: float32 images in [0, 1], one index array per client, initial weights by name."
    def __init__(self, path):
        with np.load(path) as f: raw = {k: f[k] for k in f.files}
        self.x, self.x_test = (raw[k].astype(np.float32)/255 for k in ('x', 'x_test'))
        self.y, self.y_test = raw['y'], raw['y_test']
        self.parts = np.split(raw['index'], np.cumsum(raw['sizes'])[:-1])
        self.start = {k[6:]: v for k, v in raw.items() if k.startswith('start/')}

def score(weights, data):
    "Training loss and test accuracy of an `mlp`, by NumPy: the same arithmetic for every contender."
    def logits(x):
        x = x.reshape(len(x), -1).astype(np.float64)
        for name in ('one', 'two', 'head'):
            x = x @ weights[f'{name}.weight'].T + weights[f'{name}.bias']
            if name != 'head': x = np.maximum(x, 0)
        return x
    z = logits(data.x)
    z = z - z.max(1, keepdims=True)
    loss = (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), data.y]).mean()
    return dict(train_loss=float(loss), test_accuracy=float((logits(data.x_test).argmax(1) == data.y_test).mean()))
