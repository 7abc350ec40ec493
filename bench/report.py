"The table, from the files alone."
import statistics
from pathlib import Path
from fedlit.ground.files import write_file
from .drive import load
from .peers import CONTENDERS

TOLD = .03 # test accuracies further than this from the plain loop's are pointed out

def markdown(head, rows):
    "A markdown table."
    return ['| ' + ' | '.join(head) + ' |', '|' + '---|'*len(head),
            *('| ' + ' | '.join(map(str, r)) + ' |' for r in rows), '']

def _read(folder):
    "name -> content, of all result files that are whole; those that say an error too."
    import json
    out = {}
    for p in sorted(Path(folder).glob('*.json')):
        try: result = json.loads(p.read_text())
        except ValueError: continue
        if load(p) or isinstance(result, dict) and 'error' in result: out[p.stem] = result
    return out

def _short(text, n=160): return text if len(text) <= n else text[:n] + '…'
def _peak(t): return max(t['peak_tree_mb'], t['peak_self_mb'])
def _spread(t, warm): return f"{t['median']:.4g} ({min(t['seconds'][warm:]):.4g} to {max(t['seconds'][warm:]):.4g})"
def _in_order(results, w): return {c: results[f'{w}-{c}'] for c in CONTENDERS if f'{w}-{c}' in results}
def _best(r): return r['tries'][r['best']]

def _contest(w, results):
    "One workload: the best try of each contender beside fedlit, then all tries."
    entries = _in_order(results, w)
    work, ours = next(iter(entries.values()))['settings']['work'], entries.get('fedlit', {})
    base, mlp = None if 'best' not in ours else _best(ours)['median'], work['net'] == 'mlp'
    head = ['contender', 'best setting', 'seconds a round: median (min to max)', 'times fedlit',
            f"total of {work['rounds']} rounds, s", 'peak MB', 'samples a round',
            *(['train loss', 'test accuracy'] if mlp else ['finite'])]
    rows, every, notes = [], [], []
    reference = _best(entries['loop']) if 'best' in entries.get('loop', {}) else None
    for c, r in entries.items():
        title = f"{CONTENDERS[c]['title']} " + ', '.join(f'{k} {v}' for k, v in r.get('versions', {}).items())
        if 'best' not in r:
            rows.append([title, 'did not run: ' + _short(r['error']).replace('|', '/'), *['']*(len(head)-2)])
            continue
        t, warm = _best(r), work['warmup']
        rows.append([title, t['label'], _spread(t, warm), f"{t['median']/base:.2f}" if base else '',
                     f"{t['total']:.1f}", f'{_peak(t):.0f}', t['samples'],
                     *([f"{t['train_loss']:.3f}", f"{t['test_accuracy']:.3f}"] if mlp
                       else ['yes' if t['finite'] else '**no**'])])
        if mlp and reference and abs(t['test_accuracy'] - reference['test_accuracy']) > TOLD:
            off = t['test_accuracy'] - reference['test_accuracy']
            notes.append(f"**{title} ends {off:+.3f} in test accuracy from the plain loop: "
                         "it did not do the same work, or not as well.**")
        if 'outside_rounds' in t:
            notes.append(f"{title}: executor {t['executor']}; {t['outside_rounds']:.2f} s of `federate` "
                         "lie outside the rounds that it times, all together.")
        for u in r['tries']:
            every.append([CONTENDERS[c]['title'], u['label'], u['env'].get('OMP_NUM_THREADS', ''),
                          f"{u['load_before'][0]:.2f}",
                          *([_short(u['error']).replace('|', '/'), ''] if 'error' in u
                            else [_spread(u, warm), f"{u['total']:.1f}"])])
    return [f'## {w}: {_describe(work)}', '', *markdown(head, rows),
            *(n + '\n' for n in notes), f'All tries of {w}:', '',
            *markdown(['contender', 'setting', 'OMP_NUM_THREADS', 'load average before', 'seconds a round', 'total, s'],
                      every)]

def _describe(work):
    "A workload's settings as words."
    return (f"{work['data']}, {work['net']}, {work['sampled']} of {work['clients']} clients a round, "
            f"{work['epochs']} local epochs, batch {work['batch']}, lr {work['lr']}, momentum {work['momentum']}; "
            f"{work['warmup']} of {work['rounds']} rounds warm up")

def _overheads(name, r):
    if 'error' in r: return [f'## {name}', '', r['error'], '']
    s, fifth = r['settings'], lambda v: statistics.quantiles(v, n=5)
    ratio = lambda m: f"{r['medians'][m]:.3f} ({fifth(r['ratios'][m])[0]:.3f} to {fifth(r['ratios'][m])[-1]:.3f})"
    rows = [[m, r['executors'][m], f"{statistics.median(v):.4g}", f"{min(v)/min(r['seconds']['FedAvg']):.3f}", ratio(m)]
            for m, v in r['seconds'].items()]
    text = (f"{s['net']}, {s['clients']} clients of {s['each']} images {'x'.join(map(str, s['shape']))}, "
            f"{s['epochs']} epochs, batch {s['batch']}; {s['rounds'] - s['warmup']} timed rounds a method "
            f"after {s['warmup']} for warming up, in turn.")
    return [f'## Overheads over FedAvg ({s["net"]})', '',
            text + f" Load average before: {r['load_before'][0]:.2f}.", '',
            *markdown(['method', 'executor', 'median seconds a round', 'ratio of the shortest rounds',
                       'median ratio to FedAvg of the same turn (the middle three fifths)'], rows)]

PAIRS = dict(submodels=('Sub-models beside the small network alone', 'every axis cut to the share {rate}'),
             ragged=('Ragged clients beside even ones', 'clients of {ragged} samples beside as many of {even[0]}'))

def _pairs(name, r):
    title, form = PAIRS[name.split('-')[0]]
    if 'error' in r: return [f'## {title}', '', r['error'], '']
    s = r['settings']
    rows = [[v['name'], v['executor'], f"{statistics.median(v['seconds']):.4g}", f"{v['choosing']:.3g}",
             f"{v['without']:.3f}", f"{v['ratio']:.3f}"] for v in r['rows']]
    return [f'## {title}', '', f"{s['net']}, {form.format(**s)}, {s['epochs']} epochs, batch {s['batch']}, "
            f"{s['threads']} thread; {s['rounds'] - s['warmup']} timed rounds each, in turn. Load average before: "
            f"{r['load_before'][0]:.2f}. Medians; ratios are taken within a turn.", '',
            *markdown(['run', 'executor', 'seconds a round', 'of them choosing what to train',
                       'ratio without choosing', 'ratio'], rows)]

def _products(results):
    "All workloads: the rate of a round beside that of a plain product."
    rows = []
    for r in results:
        s = r['settings']
        for row in r.get('rows', []):
            rows.append([f"{s['work']['data']}, {s['work']['net']}", r['machine']['cpu'], row['precision'],
                         f"{statistics.median(row['seconds']):.4g}", f"{row['rate']/1e9:.0f}",
                         f"{row['product']/1e9:.0f}", f"{row['fraction']:.2f}"])
        if 'error' in r: rows.append([s['work']['net'], _short(r['error']).replace('|', '/'), *['']*5])
    s = results[0]['settings']
    return ['## Rounds beside a plain product of matrices', '',
            f"fedlit, OMP_NUM_THREADS={s['threads']}. Two operations for each multiplication of the layers, three "
            f"times those of a forward pass. The product has {s['size']} by {s['size']} numbers, in the same process.",
            '', *markdown(['work', 'processor', 'precision', 'median seconds a round', 'GFLOP/s of a round',
                           'GFLOP/s of the product', 'fraction'], rows)]

def _counts(r):
    if 'error' in r: return ['## Counts', '', r['error'], '']
    s, n = r['settings'], lambda v: f'{v:.0f}'
    rows = [[row['net'], row['method'], n(row['stacked']['reads']), n(row['stacked']['operations']),
             n(row['alone']['operations']), f"{row['stacked']['operations']/row['alone']['operations']:.2f}",
             n(row['one_by_one']['operations'])] for row in r['rows']]
    return ['## Counts on a device', '',
            f"A round of {s['clients']} clients with {s['each']} images, batch {s['batch']}, evaluation included, when "
            "all steps are played; on the stand-in device of tests/accelerator.py, which counts and says nothing "
            'about time.', '',
            *markdown(['network', 'method', 'host reads', 'operations, stacked', 'operations of one client alone',
                       'ratio', 'operations, one by one'], rows)]

def _growth(results):
    "All methods: seconds and memory against the number of clients."
    def cells(row):
        if 'error' in row: return [_short(row['error']).replace('|', '/'), '', '', '', '']
        return [f"{row['median']:.4g}", f"{row['partition']:.2f}", f"{row['outside_rounds']:.2f}",
                f"{row['before_mb']:.0f}", f"{row['federate_mb']:.0f}"]
    rows = [[r['settings']['method'], row['clients'], *cells(row)] for r in results for row in r.get('rows', [])]
    return ['## Growth with the number of clients', '',
            'A hundred clients of 32 samples a round, however many exist; one process for each row.', '',
            *markdown(['method', 'clients', 'median seconds a round', 'seconds to partition',
                       'seconds of federate outside its rounds',
                       'MB before federate', 'MB that federate adds at its peak'], rows)]

def table(folder):
    "The markdown of everything measured in `folder`."
    results = _read(folder)
    if not results: return '# Benchmark\n\nNothing measured yet: run `python -m bench`.\n'
    alone = 'product-', 'counts-' # their ratios are of one file
    machines = {(m['cpu'], m['cores'], m['system']) for k, r in results.items()
                if (m := r.get('machine')) and not k.startswith(alone)}
    days = sorted(r['when'] for r in results.values() if 'when' in r)
    out = ['# Benchmark on a CPU', '',
           'Made by `python -m bench` from the JSON files beside it; how it is measured: bench/README.md.', '',
           *(f'{c}, {n} cores, {s}.' for c, n, s in sorted(machines)), f'Measured from {days[0]} to {days[-1]}.', '']
    if len(machines) > 1:
        out += ['**The files come from different machines; ratios across them mean nothing. Run with --again.**', '']
    for w in dict.fromkeys(k.rsplit('-', 1)[0] for k in results if k.rsplit('-', 1)[1] in CONTENDERS):
        out += _contest(w, results)
    for k, r in results.items():
        if k.startswith('overheads-'): out += _overheads(k, r)
    for k, r in results.items():
        if k.split('-')[0] in PAIRS: out += _pairs(k, r)
    if products := [r for k, r in results.items() if k.startswith('product-')]: out += _products(products)
    for k, r in results.items():
        if k.startswith('counts-'): out += _counts(r)
    if growths := [r for k, r in results.items() if k.startswith('growth-')]: out += _growth(growths)
    return '\n'.join(out).rstrip() + '\n'

def write(folder):
    "Write table.md; its path."
    return write_file(Path(folder)/'table.md', table(folder).encode())
