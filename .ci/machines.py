"""The notebooks and the quick tests as other machines would run them: python .ci/machines.py BIN MACHINE ...
Tests that no machine changes are left out of this: tests/conftest.py marks them `same`.

A machine is a name of MACHINES, or environment variables such as OMP_NUM_THREADS=2,MKL_CBWR=COMPATIBLE.
A processor with fewer instructions adds the same numbers in another order; what passes on one and fails on another
tests the machine. Logs lie in runs/machines."""
""
import os, re, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = {
    'default':   dict(ATEN_CPU_CAPABILITY='default'), # torch's own loops without AVX
    'avx2':      dict(ATEN_CPU_CAPABILITY='avx2'),
    'avx512':    dict(ATEN_CPU_CAPABILITY='avx512'),
    'sse41':     dict(DNNL_MAX_CPU_ISA='SSE41'),      # oneDNN: convolutions
    'dnnl-avx2': dict(DNNL_MAX_CPU_ISA='AVX2'),
    'mkl':       dict(MKL_CBWR='COMPATIBLE'),         # MKL: products of matrices
    'threads':   dict(OMP_NUM_THREADS='2'),
    'oldest':    dict(ATEN_CPU_CAPABILITY='default', DNNL_MAX_CPU_ISA='SSE41', MKL_CBWR='COMPATIBLE')}

def variables(machine):
    "What `machine` sets in the environment."
    if machine in MACHINES: return MACHINES[machine]
    said = [v.split('=', 1) for v in machine.split(',')]
    if any(len(v) < 2 for v in said): sys.exit(f"no machine {machine!r}; there are {', '.join(MACHINES)}")
    return dict(said)

def possible(env):
    "Torch takes ATEN_CPU_CAPABILITY at its word, and dies of instructions that the processor does not have."
    has = Path('/proc/cpuinfo').read_text().split() if Path('/proc/cpuinfo').exists() else ['avx2']
    return {'avx2': 'avx2', 'avx512': 'avx512f'}.get(env.get('ATEN_CPU_CAPABILITY'), has[0]) in has

def run(command, log, env):
    "What the command printed; it is in `log` as well."
    with open(log, 'w', encoding='utf-8') as f:
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=f, stderr=f).returncode
    return code, log.read_text(encoding='utf-8', errors='replace')

def notebooks(bin, log, env):
    "How many passed, of how many; the names of those that failed."
    there = [p for p in (ROOT/'nbs').rglob('*.ipynb') if not any(part[0] in '._' for part in p.relative_to(ROOT).parts)]
    code, said = run([bin/'nbdev_test', '--n_workers', '2'], log, env)
    failed = re.findall(r'^\t(.+)$', said.rpartition('Failed On The Following Notebooks:')[2], re.M) if code else []
    if code and not failed: failed = [f'nbdev_test ended with {code}']
    return f'{len(there) - len(failed)} of {len(there)}', failed

QUICK = '-m', 'pytest', '-n', '2', '--dist', 'worksteal', '-m', 'not slow and not same', '-rfE'

def tests(bin, log, env):
    code, said = run([bin/'python', *QUICK], log, env)
    seen = {what: int(n) for n, what in re.findall(r'(\d+) (passed|failed|error)', said.strip().splitlines()[-1])}
    failed = re.findall(r'^(?:FAILED|ERROR) (\S+)', said, re.M)
    if code and not failed: failed = [f'pytest ended with {code}']
    return f"{seen.get('passed', 0)} of {sum(seen.values())}", failed

def main(bin, *machines):
    bin, logs = Path(bin).resolve(), ROOT/'runs'/'machines'
    rows, broken = [('machine', 'notebooks', 'tests', 'seconds')], []
    logs.mkdir(parents=True, exist_ok=True)
    for machine in machines:
        env, name, began = variables(machine), machine.replace('=', '-').replace(',', '_'), time.monotonic()
        print(f"{machine}: {', '.join(f'{k}={v}' for k, v in env.items())}", flush=True)
        if not possible(env):
            rows.append((machine, 'this processor cannot', '', ''))
            continue
        pages, bad = notebooks(bin, logs/f'{name}.notebooks.log', env)
        laws, worse = tests(bin, logs/f'{name}.tests.log', env)
        rows.append((machine, pages, laws, f'{time.monotonic() - began:.0f}'))
        broken += [f'{machine}: {what}' for what in (*bad, *worse)]
    width = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows: print('  '.join(cell.ljust(w) for cell, w in zip(row, width)).rstrip())
    if broken: sys.exit('\n'.join(['failed; runs/machines has the logs:', *broken]))

if __name__ == '__main__': main(*sys.argv[1:])
