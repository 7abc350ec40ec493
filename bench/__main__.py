"`python -m bench`: every case on this CPU, then the table."
import argparse, signal, statistics, sys
from pathlib import Path
from . import peers, report
from .drive import HERE, RESULTS, case, contend, start
from .work import COUNTS, GROWN, GROWTH, HEARD, OVERHEADS, PRODUCTS, RAGGED, SUBMODELS, WORKLOADS, write

def versions(): return peers.probe('fedlit', sys.executable)

def alone(module, work, threads=1, **spec):
    "What a module says of fedlit alone, in a process of its own."
    result, _ = start(sys.executable, f'bench.{module}', dict(spec, work=work), dict(OMP_NUM_THREADS=str(threads)))
    return result if 'error' in result else dict(result, versions=versions())

def grow(work, method):
    "One fresh process for each number of clients."
    rows = []
    for n in work['counts']:
        entry, _ = start(sys.executable, 'bench.growth', dict(work=work, options=dict(clients=n, method=method)))
        if 'error' not in entry: entry['median'] = statistics.median(entry['seconds'][work['warmup']:])
        rows.append(dict(clients=n, **entry))
        print(f"  growth {method} {n} clients: "
              + (entry.get('error') or f"{entry['median']:.4f} s a round, {entry['federate_mb']:.0f} MB"), flush=True)
    return dict(rows=rows, versions=versions()) if any('error' not in r for r in rows) else dict(error=rows[0]['error'])

ALONE = dict(overheads=('overheads', OVERHEADS), submodels=('pairs', SUBMODELS), ragged=('pairs', RAGGED),
             counts=('counts', COUNTS)) # part -> module, its works

def cases(names, contenders, nets, tiny, folder):
    "(file name, settings, what measures it) of all cases."
    for w in names:
        for c in contenders:
            labels = [t['label'] for t in peers.CONTENDERS[c]['tries']]
            settings = dict(work=WORKLOADS[w], contender=c, needs=peers.CONTENDERS[c]['needs'], tries=labels)
            yield f'{w}-{c}', settings, lambda w=w, c=c: contend(w, c, WORKLOADS[w], folder)
    for part, (module, works) in ALONE.items():
        for n in nets.get(part, ()):
            yield f'{part}-{n}', works[n], lambda m=module, w=works[n], part=part: alone(
                m, w, w.get('threads', 1), options=dict(what=part))
    for w in nets.get('product', ()):
        how, work = PRODUCTS[w], WORKLOADS[w]
        yield f'product-{w}', dict(how, work=work), lambda how=how, work=work: alone(
            'product', work, how['threads'], options=how, data=str(write(work, folder)))
    for m in nets.get('growth', ()):
        settings = GROWTH['tiny' if tiny else 'full']
        yield f'growth-{m}', dict(settings, method=GROWN[m]), lambda m=m, s=settings: grow(s, GROWN[m])

def chosen(only, tiny, net):
    "What `--only` leaves: workloads, contenders, and the parts that concern fedlit alone."
    workloads, parts = (('tiny',) if tiny else HEARD), dict(
        overheads=['tiny' if tiny else net], product=['tiny'] if tiny else [w for w in HEARD if w in PRODUCTS],
        submodels=['tiny' if tiny else 'cnn'], ragged=['tiny' if tiny else 'mlp'],
        counts=['tiny' if tiny else 'full'], growth=list(GROWN))
    if not only: return workloads, list(peers.CONTENDERS), parts
    words = only.split(',')
    names = {**{w.lower(): w for w in workloads}, **{k: k for k in (*peers.CONTENDERS, *parts)}}
    if bad := [a for a in words if a.lower() not in names]:
        sys.exit(f"--only: no {', '.join(bad)}; there are {', '.join(names)}")
    words = [names[a.lower()] for a in words]
    w, c = [a for a in words if a in workloads], [a for a in words if a in peers.CONTENDERS]
    return (((w or workloads) if w or c else ()), c or list(peers.CONTENDERS),
            {k: v for k, v in parts.items() if k in words})

def main(args=None):
    p = argparse.ArgumentParser(prog='python -m bench', description=__doc__)
    p.add_argument('--only', help='comma-separated workloads, contenders, overheads, submodels, ragged, product, '
                                  'counts, growth: W1,flwr')
    p.add_argument('--again', action='store_true', help='measure anew what is there')
    p.add_argument('--net', default='cnn', choices=['cnn', 'mobilenetv2'], help='network of the overheads')
    p.add_argument('--tiny', action='store_true', help='a minute-long try of everything; give it an --out of its own')
    p.add_argument('--out', default=RESULTS, type=Path, help='folder of the results')
    a = p.parse_args(args)
    if a.tiny and a.out == RESULTS: p.error('--tiny needs --out, so that its numbers do not stand beside real ones')
    # the case in progress is ended with us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('stopped; what was finished is kept'))
    for name, settings, work in cases(*chosen(a.only, a.tiny, a.net), a.tiny, HERE/'.data'):
        result, new = case(a.out/f'{name}.json', settings, work, a.again)
        print(f"{name}: {'kept' if not new else result['error'] if 'error' in result else 'measured'}", flush=True)
    print(report.write(a.out))

if __name__ == '__main__': main()
