"How much of what this machine can multiply does a round use? The rounds beside a plain matrix product, in one process."
import statistics, time
import torch
from .child import main
from .run_fedlit import run as fedlit
from .work import NETS

PLACES = dict(mlp=dict(), cnn=dict(one=28*28, two=14*14)) # how often an image uses a weight

def multiplications(net):
    "Of one image's forward pass."
    return sum(shape[0]*fan*PLACES[net].get(name, 1) for name, (shape, fan) in NETS[net].items())

def product(dtype, n, tries=12):
    "Operations a second of a product of two matrices (n, n): the most of several tries."
    a, b, took = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype), []
    for _ in range(tries):
        began = time.perf_counter()
        a @ b
        took.append(time.perf_counter() - began)
    return 2*n**3/min(took)

def run(work, data, options):
    "The product is tried before and after the rounds; what it did best counts."
    rows = []
    for precision in options['precisions']:
        kind = getattr(torch, precision)
        before, result = product(kind, options['size']), fedlit(work, data, dict(precision=precision))
        rate, seconds = max(before, product(kind, options['size'])), result['seconds'][work['warmup']:]
        flops = 2*3*multiplications(work['net'])*result['samples'] # forward, to the inputs, to the weights
        rows.append(dict(precision=precision, seconds=seconds, product=rate, rate=flops/statistics.median(seconds),
                         fraction=flops/statistics.median(seconds)/rate))
    return dict(rows=rows, threads=torch.get_num_threads(), ended=time.time())

if __name__ == '__main__': main(run)
