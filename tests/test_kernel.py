"Pages in a real Jupyter kernel, where a cell that draws must show a picture; nbdev_test has no display."
import json, re, sys
from pathlib import Path
import pytest
from conftest import SELDOM, in_third
nbformat, nbclient = pytest.importorskip('nbformat'), pytest.importorskip('nbclient')

NBS = Path(__file__).parents[1]/'nbs'
READER = "import matplotlib.pyplot as plt\nplt.plot([1, 2])"   # what a reader might draw below the page

def ran(cells, folder):
    "The cells after a kernel has run them."
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return nbclient.NotebookClient(nb, timeout=900, startup_timeout=900, kernel_name='python3',
                                   resources={'metadata': {'path': str(folder)}}).execute().cells

def pictures(cell): return sum(bool({'image/png', 'image/svg+xml'} & o.get('data', {}).keys()) for o in cell.outputs)

def code(page):
    "The sources of a page's code cells, but for those that are not to be run."
    sources = [''.join(c['source']) for c in json.loads(page.read_text(encoding='utf-8'))['cells']
               if c['cell_type'] == 'code']
    return [s for s in sources if not re.search(r'^#\|\s*eval:\s*false', s, re.M)]

@pytest.mark.skipif(sys.platform == 'win32', reason='a kernel needs an event loop that Windows does not give it here')
def test_the_first_figure_may_be_ours():
    if not pictures(ran([READER], '.')[0]): pytest.skip("matplotlib 3.8 in a newer kernel: nobody's first figure shows")
    ours = "from fedlit.figure import spectra\n_ = spectra({'a': [3., 2., 1.]})"
    assert [pictures(c) for c in ran([ours, READER, ours, READER], '.')] == [1, 1, 1, 1]

told = {p: code(p) for p in sorted(NBS.rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts}
def has(page, directive): return any(re.search(rf'^#\|\s*{directive}\b', s, re.M) for s in told[page])
def name(page): return page.relative_to(NBS).with_suffix('').as_posix()

# a page for every way of drawing, of which a landing has a third; the others, which draw in the same ways, are for
# `make test-long`
USUAL = set("""14_figure 19_run guides/seven_pictures index papers/drawings papers/moon_figures portrait
    theory/proposition1""".split())
draw = [pytest.param(p, marks=SELDOM[:1 if name(p) in USUAL and in_third(f'kernel {name(p)}') else 2], id=name(p))
        for p in told if has(p, 'fig-alt')]
whole = [pytest.param(p, marks=SELDOM, id=name(p)) for p in told if has(p, 'slow')]

def test_the_usual_pages_are_there(): assert USUAL <= {p.id for p in draw} and whole

def shows(page, sources):
    "Run in a kernel, every cell that draws shows a picture, and so does a plot of the reader below."
    cells = ran([*sources, READER], page.parent)
    dark = [c.source for c in cells if '#| fig-alt' in c.source and not pictures(c)]
    assert not dark, f'{len(dark)} cells show no picture; the first is\n{dark[0]}'
    assert pictures(cells[-1]), 'after this page a plot of the reader is not shown'

@pytest.mark.parametrize('page', draw)
def test_every_cell_that_draws_shows_a_picture(page):
    shows(page, [s for s in told[page] if not re.search(r'^#\|\s*slow\b', s, re.M)])

@pytest.mark.parametrize('page', whole)
def test_a_page_runs_whole(page): shows(page, told[page])
