"The contenders: how each is started, with which settings it is tried, and the environments that some of them need."
import hashlib, json, os, shutil, subprocess, sys
from pathlib import Path

HERE = Path(__file__).parent
# the peers that train with torch get the version that fedlit's environment has had while this was written
TORCH = 'torch==2.15.0'

def threads(n):
    return dict(label=f'{n} thread{"s"*(n > 1)}', env=dict(OMP_NUM_THREADS=str(n)), options=dict(threads=n), command=[])
BOTH = [threads(1), threads(2)]
COMPILED = [dict(t, options=dict(t['options'], record='compile')) for t in BOTH]

ONE_XLA = '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
DYNAMO = 'torch._dynamo' # torch.optim brings it in at the first optimizer

# `probe` is imported once before the clock starts, so that nobody pays for reading files that are not in the disk cache
CONTENDERS = dict(
    loop=dict(
        title='plain PyTorch loop', needs=None, probe=DYNAMO, versions=['torch'], tries=BOTH),
    dataloader=dict(
        title='plain loop, DataLoader', needs=None, probe=DYNAMO, versions=['torch'], tries=BOTH),
    fedlit=dict(
        title='fedlit', needs=None, probe='fedlit.run, fedlit.methods', versions=['torch', 'numpy'], tries=BOTH),
    compiled=dict(
        title='fedlit, compiled steps', needs=None, probe='fedlit.run, fedlit.methods', versions=['torch', 'numpy'],
        module='fedlit', tries=COMPILED),
    pfl=dict(
        title='pfl-research', needs=['pfl[pytorch]==0.6.0', TORCH],
        probe=f'pfl.model.pytorch, pfl.aggregate.simulate, {DYNAMO}', versions=['pfl', 'torch'],
        tries=[*BOTH, dict(threads(1), label='2 processes',
                           command=['-m', 'torch.distributed.run', '--nproc_per_node', '2'])]),
    flwr=dict(
        title='Flower', needs=['flwr[simulation]==1.41.0', TORCH],
        probe=f'flwr.simulation, flwr.serverapp, ray, {DYNAMO}', versions=['flwr', 'ray', 'torch'],
        tries=[dict(threads(1), label='2 clients at a time', options=dict(cpus=1)),
               dict(threads(2), label='1 client at a time', options=dict(cpus=2))]),
    fedjax=dict(
        title='fedjax', needs=['fedjax==0.0.17', 'jax==0.4.23', 'jaxlib==0.4.23', 'dm-haiku==0.0.11', 'optax==0.1.9',
                               'numpy<2', 'scipy<1.13'],
        probe='fedjax', versions=['fedjax', 'jax', 'jaxlib'],
        tries=[dict(threads(2), label="XLA's threads"),
               dict(threads(1), label='1 thread', env=dict(OMP_NUM_THREADS='1', XLA_FLAGS=ONE_XLA))]),
    blazefl=dict(
        title='BlazeFL', needs=['blazefl==3.0.0', TORCH, 'numpy', 'tqdm'], pythons=['3.14t', '3.14'],
        probe=f'blazefl.contrib, {DYNAMO}', versions=['blazefl', 'torch'],
        tries=[dict(t, label=label, options=dict(t['options'], pool=pool)) for t, label, pool in (
            (threads(1), '1 thread', None), (threads(2), '2 threads', None),
            (threads(1), 'pool of 2 threads', 'threads'), (threads(1), 'pool of 2 processes', 'processes'))]))

class Missing(Exception): "A peer that cannot be installed or imported here; the text says why."

def uv():
    "The installer: beside this Python, on the path, or as a module."
    beside = Path(sys.executable).with_name('uv')
    path = str(beside) if beside.exists() else shutil.which('uv')
    return [path] if path else [sys.executable, '-m', 'uv']

def _call(command, what):
    try: result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    except (OSError, subprocess.TimeoutExpired) as e: raise Missing(f'{what}: {e}') from e
    if result.returncode: raise Missing(f'{what}: ' + ' '.join((result.stderr or result.stdout).split())[-600:])
    return result.stdout

def _venv(pythons, home, name):
    "An empty environment with the first of these versions of Python that uv finds."
    for version in pythons:
        try: return _call([*uv(), 'venv', '-q', '--python', version, str(home)], f'no environment for {name}')
        except Missing as e: last = e
    raise last

def environment(name, folder=HERE/'.envs'):
    "The Python that has this contender; made with uv from PyPI where it is missing. Raises `Missing` with the reason."
    needs = CONTENDERS[name]['needs']
    if needs is None: return sys.executable
    home, stamp = Path(folder)/name, hashlib.sha256(json.dumps(needs).encode()).hexdigest()[:12]
    python, mark = home/'bin'/'python', home/f'.complete-{stamp}'
    if not mark.exists():
        shutil.rmtree(home, ignore_errors=True)
        _venv(CONTENDERS[name].get('pythons') or [f'{sys.version_info.major}.{sys.version_info.minor}'], home, name)
        _call([*uv(), 'pip', 'install', '-q', '--compile-bytecode', '--python', str(python), *needs],
              f'{name} does not install')
        mark.touch()
    return str(python)

def probe(name, python):
    "Import the contender once, and say which versions it has."
    c = CONTENDERS[name]
    code = (f"import {c['probe']}, json; from importlib.metadata import version; "
            f"print(json.dumps({{k: version(k) for k in {c['versions']!r}}}))")
    env = dict(os.environ, PYTHONPATH=str(HERE.parent))
    try: result = subprocess.run([python, '-c', code], capture_output=True, text=True, env=env, timeout=300)
    except subprocess.TimeoutExpired as e: raise Missing(f'{name} takes more than five minutes to import') from e
    if result.returncode: raise Missing(f'{name} does not import: ' + ' '.join(result.stderr.split())[-600:])
    return json.loads(result.stdout.splitlines()[-1])
