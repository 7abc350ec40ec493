"Run cases one after another, each in a fresh process, and keep one JSON a case."
import json, os, platform, resource, signal, statistics, subprocess, tempfile, time
import numpy as np
from pathlib import Path
from fedlit.ground.files import write_file
from . import peers
from .work import Data, score, write

HERE = Path(__file__).parent
ROOT, RESULTS = HERE.parent, HERE.parent/'results'/'bench'/'cpu'
FORMAT = 1 # changes when old results must not be kept

def machine():
    "What the numbers belong to."
    lines = Path('/proc/cpuinfo').read_text().splitlines() if Path('/proc/cpuinfo').exists() else []
    name = next((l.split(':', 1)[1].strip() for l in lines if l.startswith('model name')),
                platform.processor() or platform.machine())
    return dict(cpu=name, cores=os.cpu_count(), system=f'{platform.system()} {platform.release()}')

def save(path, value): write_file(path, json.dumps(value, indent=1).encode())

def load(path, like=None):
    "A result, or None: absent, cut off, of another format, an error, or measured with other settings than `like`."
    try: result = json.loads(Path(path).read_text())
    except (OSError, ValueError): return None
    good = (isinstance(result, dict) and result.get('format') == FORMAT and 'error' not in result
            and (like is None or result.get('settings') == like))
    return result if good else None

def _tree(pid):
    "A process and all that descend from it, from /proc."
    parent = {}
    for d in Path('/proc').glob('[0-9]*'):
        try: parent[int(d.name)] = int((d/'stat').read_text().rsplit(')', 1)[1].split()[1])
        except (OSError, ValueError): pass
    pids = {pid}
    while more := {p for p, q in parent.items() if q in pids} - pids: pids |= more
    return pids

def resident_mb(pid):
    "Resident memory of a process and its descendants together; pages that they share count once in each."
    total = 0
    for p in _tree(pid):
        try: total += int(Path(f'/proc/{p}/statm').read_text().split()[1])
        except (OSError, ValueError): pass
    return total*resource.getpagesize()/2**20

def watch(command, env, log, limit=3600):
    "Run a command to its end; its exit status, and the most memory its tree of processes held, seen twice a second."
    peak, began = 0., time.time()
    with open(log, 'w') as f:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=f, stderr=f, start_new_session=True)
    try:
        while time.time() < began + limit:
            peak = max(peak, resident_mb(child.pid))
            try: return child.wait(.5), peak # looking more often would be felt on two cores
            except subprocess.TimeoutExpired: pass
        raise TimeoutError(f'stopped after {limit} s')
    finally:
        if child.poll() is None: _stop(child)

def _stop(child):
    for p in _tree(child.pid):
        try: os.kill(p, signal.SIGKILL)
        except OSError: pass
    child.wait()

def start(python, module, spec, env=None, command=(), limit=3600):
    "One fresh process of `python -m module`: what it reported, with its weights; or a dictionary with `error`."
    with tempfile.TemporaryDirectory() as folder:
        task, out, weights, log = (Path(folder)/n for n in ('task.json', 'out.json', 'weights.npz', 'log'))
        env = {**os.environ, 'PYTHONPATH': str(ROOT),
               'FLWR_TELEMETRY_ENABLED': '0', 'OMP_NUM_THREADS': '1', **(env or {})}
        load_before = os.getloadavg()
        task.write_text(json.dumps(dict(spec, out=str(out), weights=str(weights), started=time.time())))
        fail = lambda why: (dict(error=why, load_before=load_before), None)
        try: code, peak = watch([python, *command, '-m', module, str(task)], env, log, limit)
        except TimeoutError as e: return fail(str(e))
        if code or not out.exists():
            return fail(f'exit status {code}: ' + ' '.join(log.read_text(errors='replace').split())[-800:])
        result = dict(json.loads(out.read_text()), peak_tree_mb=peak, load_before=load_before)
        return result, dict(np.load(weights)) if weights.exists() else None

def contend(name, contender, work, folder):
    "All tries of a contender on a workload."
    data = write(work, folder)
    try:
        python = peers.environment(contender)
        versions = peers.probe(contender, python)
    except peers.Missing as e: return dict(error=str(e))
    tries, its = [], peers.CONTENDERS[contender]
    for t in its['tries']:
        task = dict(work=work, data=str(data), options=dict(t['options'], data=str(data)))
        trial, weights = start(python, f"bench.run_{its.get('module', contender)}", task, t['env'], t['command'])
        if weights is not None:
            trial['median'] = statistics.median(trial['seconds'][work['warmup']:])
            trial['finite'] = all(bool(np.isfinite(v).all()) for v in weights.values())
            if work['net'] == 'mlp': trial.update(score(weights, Data(data)))
        tries.append(dict(label=t['label'], env=t['env'], **trial))
        print(f"  {name} {contender} ({t['label']}): "
              + (trial.get('error') or f"{trial['median']:.4f} s a round, {trial['total']:.1f} s in all"), flush=True)
    if (best := _best(tries)) is None:
        return dict(error='no try came to its end; ' + tries[0]['error'], tries=tries, versions=versions)
    return dict(tries=tries, best=best, versions=versions)

def case(path, settings, work, again=False):
    "The result at `path`, measured now by `work()` unless it is there with the same settings."
    before = load(path, json.loads(json.dumps(settings)))
    if before and not again: return before, False
    now = {**dict(format=FORMAT, settings=settings, machine=machine(), when=time.strftime('%Y-%m-%d %H:%M')), **work()}
    save(path, joined(before, now))
    return load(path) or json.loads(json.dumps(now)), True

def joined(before, new):
    "A measurement with earlier tries of the same machine and versions: neighbours only slow a try, so the best counts."
    same = (before and 'tries' in before and 'best' in new
            and all(before.get(k) == new.get(k) for k in ('machine', 'versions')))
    if not same: return new
    tries = before['tries'] + new['tries']
    return dict(new, tries=tries, best=_best(tries))

def _best(tries):
    return min((i for i, t in enumerate(tries) if 'error' not in t), key=lambda i: tries[i]['median'], default=None)

