"`python tests/soak.py ROUNDS CHECKPOINT OUT`: 10 of 100 clients in each round; memory and open files after every one."
import os, sys, time
from pathlib import Path
import torch
import fedlit.run
from fedlit.data import load
from fedlit.ground.files import write_json
from fedlit.methods import FedAvgM, MOON
from fedlit.models import build
from fedlit.partition import iid
from fedlit.local import Local

METHOD = FedAvgM() + MOON() # the server remembers, and every client does
ASKED = dict(local=Local(epochs=1, batch_size=8), participation=.1, evaluate_every=10, progress=False)

def resident(): return int(Path('/proc/self/statm').read_text('utf-8').split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20
def handles(): return len(os.listdir('/proc/self/fd'))

def soak(rounds, checkpoint):
    "The run, and what was noted after its rounds: MiB of memory, open files, seconds."
    torch.set_num_threads(1)
    task, seen, before = load('digits'), [], fedlit.run.peak_mb
    def note(device):
        seen.append((resident(), handles(), time.perf_counter()))
        return before(device)
    fedlit.run.peak_mb = note # federate asks for the peak once a round
    try:
        run = fedlit.run.federate(build('mlp', task, seed=0), task, iid(task.y_train, 100, seed=0), METHOD, rounds,
                                  checkpoint=checkpoint, **ASKED)
    finally: fedlit.run.peak_mb = before
    return run, seen

if __name__ == '__main__':
    rounds, checkpoint, out = int(sys.argv[1]), *sys.argv[2:]
    run, seen = soak(rounds, checkpoint)
    mib, files, when = zip(*seen)
    write_json(out, dict(
        method=repr(METHOD), settings=run.settings, rounds=len(run.history),
        accuracy=run.history['accuracy'].iloc[-1], mib=[round(v, 1) for v in mib], files=list(files),
        seconds=[round(v, 3) for v in (b-a for a, b in zip(when, when[1:]))],
        checkpoint_kib=round(Path(checkpoint).stat().st_size/1024)))
