"What every contender's process does around its rounds: read the task, report what was measured. NumPy only."
import json, os, platform, resource, sys, time
import numpy as np
from .work import Data

def main(run):
    "`run(work, data, options) -> dict(seconds, ended, samples, weights, ...)` on what the driver wrote; into a file."
    with open(sys.argv[1]) as f: spec = json.load(f)
    out = run(spec['work'], Data(spec['data']) if 'data' in spec else None, spec['options'])
    if out is None: return # a worker; the first process reports
    if 'weights' in out: np.savez(spec['weights'], **out.pop('weights'))
    out.update(total=out.pop('ended') - spec['started'], python=platform.python_version(),
               pid=os.getpid(), peak_self_mb=peak_mb())
    with open(spec['out'], 'w') as f: json.dump(out, f)

def peak_mb():
    "The most memory that this process has ever held, by the system's own count."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/(2**20 if sys.platform == 'darwin' else 2**10)

def cohort(work, round):
    "The clients of a round, the same for the contenders that let one choose."
    if work['sampled'] == work['clients']: return list(range(work['clients']))
    return sorted(np.random.default_rng((work['seed'], 2, round))
                  .choice(work['clients'], work['sampled'], replace=False).tolist())

class Clock:
    "Seconds between the ends of rounds."
    def __init__(self): self.seconds, self.last = [], time.perf_counter()
    def lap(self):
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
