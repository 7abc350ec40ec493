"The check of numbers typed into prose finds each kind, leaves settings and code alone, and passes on this repository."
import ast, json, re, sys
from html import unescape
from pathlib import Path
import pytest
sys.path.insert(0, str(Path(__file__).parents[1]/'docs'))
import typed

PLANTED = {
    'spread': ['Left to run, it was at 0.78 ± 0.04.', r'FedAvg ends at $64.85\pm2.01$.'],
    'unit': ['ahead by six points', 'it took twelve seconds', 'a round of 37.6 s', '40 % slower',
             'fourteen and twenty points', 'ten times faster', 'rises by some forty MiB',
             'seven per cent', 'two and 2.5 percent', 'two and a half minutes'],
    'part': ['this took half a minute', 'a fifth of a second', 'a quarter better', 'wrong by a fifth or more',
             'keep two thirds more', 'about two fifths of the claims hold', 'ahead of all of them by nearly four'],
    'share': ['nine of ten test images are recognised', 'one in fourteen', '36 of the 360'],
    'decimal': ['printed the accuracies 0.3203 and 0.8078', 'better (.96 against the rest)', 'FedAvg reaches $0.83$.'],
}
CLEAN = ['`FedProx(mu=0.001)` after `12 s`', '```\nround 1: accuracy 0.3315, 94.4 s\n```', '    accuracy 0.3315',
         r'with $\eta=0.05$ and $\alpha > 0.026$', 'torch 2.6 and Python 3.10',
         'alpha 0.05 and a learning rate of .01', 'Table 3.4 and Fig. 4.10', '[page](x_0.25.ipynb)',
         'three seeds, ten clients, version 1.40', 'the small ones are left', 'a factor of $5/3$',
         'momentum 0.99, batches of 64']

@pytest.mark.parametrize('kind, text', [(k, t) for k, ts in PLANTED.items() for t in ts])
def test_finds(kind, text): assert kind in [k for k, *_ in typed.found(text)]

@pytest.mark.parametrize('text', CLEAN)
def test_leaves_alone(text): assert list(typed.found(text)) == []

def page(folder, *cells):
    (folder/'methods').mkdir(exist_ok=True)
    cells = [dict(cell_type=kind, source=[text]) for kind, text in cells]
    (folder/'methods'/'x.ipynb').write_text(json.dumps(dict(cells=cells)), encoding='utf-8')

def test_names_page_cell_and_words(tmp_path):
    page(tmp_path, ('code', 'print("0.78 ± 0.04")'), ('markdown', '# Title'), ('markdown', 'Ahead by six points.'),
         ('code', '#| fig-alt: "falls to 0.25"'))
    first, second = typed.check(tmp_path, {})
    assert first == 'methods/x[2]: Ahead by »six points«. (unit)' and second.startswith('methods/x[3]: falls to »0.25«')

def test_allows_by_line_and_by_page(tmp_path):
    page(tmp_path, ('markdown', 'The paper prints 0.71, 0.73 and 0.76. Ours is 0.71.'))
    line = typed.allowed('# why\nmethods/x | prints 0.71 ... 0.76 | published\n')
    assert typed.check(tmp_path, line) == ['methods/x[0]: Ours is »0.71«. (decimal)']
    elsewhere = typed.check(tmp_path, typed.allowed('methods/y | prints 0.71 ... 0.76 | published'))
    assert len(elsewhere) == 5 and elsewhere[-1] == 'typed.txt: nothing needs methods/y | prints 0.71 ... 0.76'

def test_a_number_that_the_code_of_the_page_sets_needs_no_line(tmp_path):
    said = ('markdown', 'The bar is at 0.25 and 1,500 MB; it reached 0.71.')
    page(tmp_path, ('code', 'bar, size = .25, 1_500 # 0.71\nprint("0.71")'), said)
    assert typed.check(tmp_path, {}) == ['methods/x[1]: bar is at 0.25 and 1,500 MB; it reached »0.71«. (decimal)']

def test_a_line_has_a_reason():
    with pytest.raises(ValueError, match='one of setting, definition'):
        typed.allowed('methods/x | six points | because')

def test_this_repository(): assert typed.check() == []

# -- what pages store of committed results, which others may have added to since

ROOT = Path(__file__).parents[1]
VERDICTS = 'holds|does not hold|undecided|not evaluated'

def told(words):
    "Verdict and number of seeds of `holds, +10.90 values (30 seeds)`."
    found = re.fullmatch(rf'({VERDICTS})(?:, .*\((\d+) seeds\))?', words.strip())
    return (found[1], int(found[2] or 0)) if found else None

def rows_of(output):
    "The rows of a stored table, in Markdown or HTML, as lists of texts."
    data = {k: ''.join(v) for k, v in output.get('data', {}).items()}
    if 'text/html' in data:
        return [[unescape(re.sub('<.*?>', '', cell)) for cell in re.findall('<t[hd].*?>(.*?)</t[hd]>', row, re.S)]
                for row in re.findall('<tr.*?>(.*?)</tr>', data['text/html'], re.S)]
    return [[cell.strip() for cell in line.strip('|').split(' | ')]
            for line in data.get('text/markdown', '').splitlines() if line.startswith('|')]

def stored(nb):
    "Claim -> what a page stores of it, a (verdict, seeds) for each set of runs, from its last table of that kind."
    rows = [r for c in nb['cells'] for o in c.get('outputs', ()) for r in rows_of(o)]
    return {claim: heard for claim, *words in rows if (heard := [told(w) for w in words]) and None not in heard}

def test_reads_both_kinds_of_tables():
    html = ('<table><tr><th></th><th>on digits</th></tr><tr><th>a &gt; b</th>'
            '<td>does not hold, -3.82 points (30 seeds)</td></tr></table>')
    text = '| claim | x | y |\n|---|---|---|\n| c | holds, +1 s (7 seeds) | not evaluated |'
    nb = dict(cells=[dict(outputs=[dict(data={'text/html': [html]}), dict(data={'text/markdown': text})]), {}])
    assert stored(nb) == {'a > b': [('does not hold', 30)], 'c': [('holds', 7), ('not evaluated', 0)]}

def test_the_page_says_what_the_committed_results_say(page='nbs/papers/collapse.ipynb', least=17):
    from fedlit.papers.collapse import committed_verdicts, verdicts_beside
    now = verdicts_beside({'on digits': committed_verdicts(), 'on CIFAR-10': committed_verdicts('short')})
    on_page = stored(json.loads((ROOT/page).read_text(encoding='utf-8')))
    assert len(on_page) >= least
    old = [f'{claim}: {there} on the page, now {[told(w) for w in now.loc[claim]]}' for claim, there in on_page.items()
           if claim in now.index and there != [told(w) for w in now.loc[claim]]]
    gone = sorted(set(on_page) - set(now.index))
    assert not old + gone, '\n'.join([f'{page} is older than results/, so: python docs/fill.py {page}', *old, *gone])

def test_the_index_says_what_the_committed_results_say():
    import fedlit.papers.depth  # noqa: F401 (it enters what it is about)
    from fedlit.papers.claims import verdict_view
    from fedlit.papers.collapse import committed_verdicts
    from fedlit.papers.entries import CATALOGUE, judge_entries
    cells = json.loads((ROOT/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    [cell] = [c for c in cells if 'opened =' in ''.join(c['source'])]
    names = dict(committed_verdicts=committed_verdicts, real=committed_verdicts('short'), Markdown=str,
                 judge_entries=judge_entries, verdict_view=verdict_view, CATALOGUE=CATALOGUE)
    *lines, last = ast.parse(''.join(cell['source'])).body
    exec(compile(ast.Module(lines, []), 'index', 'exec'), names)
    said = eval(compile(ast.Expression(last.value), 'index', 'eval'), names)
    shown = ''.join(cell['outputs'][0]['data']['text/markdown'])
    assert shown == said, 'python docs/fill.py nbs/index.ipynb && python docs/readme.py'
