"How often the host waits for its device in a round, and how many operations a stack takes beside one client: counted."
import sys, time
from pathlib import Path
from fedlit.methods import FedAvg, FedDecorr, FedProx, HeteroFL, MOON, SCAFFOLD
from fedlit.models import build
from fedlit.local import Local
from fedlit.run import federate
from .child import main
from .overheads import noise

METHODS = {'FedAvg': FedAvg(), 'FedProx': FedProx(), 'SCAFFOLD': SCAFFOLD(), 'MOON + FedDecorr': MOON() + FedDecorr(),
           'HeteroFL': HeteroFL(rates=(1., .5)), 'HeteroFL, cut out': HeteroFL(rates=(1., .5))}
EXECUTORS = {'HeteroFL, cut out': 'extract'} # others are stacked

def count(work, net, method, clients, executor):
    "Reads and operations of a round, once every step is played: what two more rounds cost, halved."
    import accelerator
    task, parts = noise(work, [work['each']]*work['clients'])
    def cost(rounds):
        with accelerator.counted() as counts:
            federate(build(net, task, seed=0), task, parts[:clients], method, rounds,
                     Local(epochs=1, batch_size=work['batch']), executor=executor, device='dev', progress=False)
        kinds = ('SYNC', 'TO CPU', 'FROM CPU', 'reads', 'places')
        return counts['reads'], sum(v for k, v in counts.items() if k not in kinds)
    (r0, n0), (r1, n1) = cost(work['rounds']), cost(work['rounds'] + 2)
    return dict(reads=(r1 - r0)/2, operations=(n1 - n0)/2)

def run(work, data, options):
    sys.path.insert(0, str(Path(__file__).parents[1]/'tests')) # the stand-in device that counts
    import accelerator
    if accelerator.UNABLE: raise RuntimeError(accelerator.UNABLE)
    rows = [dict(net=net, method=name, stacked=count(work, net, m, work['clients'], EXECUTORS.get(name, 'vmap')),
                 alone=count(work, net, m, 1, 'loop'), one_by_one=count(work, net, m, work['clients'], 'loop'))
            for net in work['nets'] for name, m in METHODS.items()]
    return dict(rows=rows, ended=time.time())

if __name__ == '__main__': main(run)
