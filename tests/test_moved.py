"""Old names of modules and old addresses of pages lead to the new ones, and nothing in fedlit uses them.
What docs/lint.py knows of imports is right."""
import importlib.util, os, re, shutil, subprocess, sys, warnings
from importlib import import_module
from pathlib import Path
import pytest, yaml
import fedlit
from fedlit._moved import GOES, Several, moved

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
import imports, pages
import moved as sited # docs/moved.py
from convert import page_of

MODULES = {
    'axes': ('engine.axes',),
    'tape': ('engine.tape',),
    'table': ('engine.table',),
    'guard': ('engine.guard',),
    'files': ('engine.files',),
    'distributed': ('scale.torchrun',),
    'costs': ('scale.costs',),
    'capacity': ('scale.capacity',),
    'experiment': ('papers.settings', 'papers.measures'),
    'catalogue': ('papers.catalogue', 'papers.entries', 'papers.claims', 'papers.drawings', 'papers.feddecorr',
                  'papers.moon', 'papers.feddecomp', 'papers.feddse', 'papers.fedgse'),
    'reproduce': ('papers.catalogue', 'papers.collapse', 'papers.settings', 'papers.claims'),
    'theory': ('papers.theory',),
}
FACES = {'flower': 'scale.flower'}
STAY = 'methods', 'run', 'round', 'data', 'models', 'partition', 'measure', 'parse', *FACES

def fresh(name, monkeypatch):
    "As if `fedlit.name` had not been imported yet."
    monkeypatch.delitem(sys.modules, f'fedlit.{name}', raising=False)
    monkeypatch.delattr(fedlit, name, raising=False)

def imported(line, file='mine.py'):
    "The name `m` after a user's line of code, which stands in line 3, and the warnings of ours."
    names = {'__name__': 'mine'}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        exec(compile(f'\n\n{line}\n', file, 'exec'), names)
    return names['m'], [w for w in seen if 'is now' in str(w.message)]

def here(name):
    "`fedlit.name`; a test of what is not installed is skipped."
    try: return import_module(f'fedlit.{name}')
    except ImportError as e: pytest.skip(str(e))

# -- modules

@pytest.mark.parametrize('line', ['import fedlit.{0} as m', 'from fedlit import {0} as m',
                                  'import importlib\nm = importlib.import_module("fedlit.{0}")'])
@pytest.mark.parametrize('old', MODULES)
def test_an_old_name_warns_once_at_the_line_that_uses_it(old, line, monkeypatch):
    fresh(old, monkeypatch)
    _, said = imported(line.format(old))
    assert [(w.category, w.filename) for w in said] == [(DeprecationWarning, 'mine.py')]
    assert said[0].lineno == 3 + line.count('\n')
    for part in (f'fedlit.{old} is now', *(f'fedlit.{new}' for new in MODULES[old]), GOES):
        assert part in str(said[0].message)
    assert imported(line.format(old))[1] == []

@pytest.mark.parametrize('old', MODULES)
def test_old_and_new_are_the_same(old, monkeypatch):
    fresh(old, monkeypatch)
    m, _ = imported(f'import fedlit.{old} as m')
    homes = [import_module(f'fedlit.{new}') for new in MODULES[old]]
    if len(homes) == 1: assert m is homes[0]
    for home in homes:
        for n in vars(home):
            if not n.startswith('__'): assert any(getattr(m, n) is vars(h).get(n) for h in homes), n

@pytest.mark.parametrize('name', STAY)
def test_a_name_that_stays_does_not_warn(name, monkeypatch):
    here(name)
    if name in FACES: fresh(name, monkeypatch)
    m, said = imported(f'import fedlit.{name} as m')
    assert said == [] and m is import_module(f'fedlit.{FACES.get(name, name)}')

def test_a_module_that_went_to_several_reads_and_writes_through(tmp_path, monkeypatch):
    (tmp_path/'left_of.py').write_text('a, _b, both = 1, 2, 3\ndef f(): return a\n')
    (tmp_path/'right_of.py').write_text('c, both = 4, 3\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, 'whole', None)
    with pytest.warns(DeprecationWarning, match='whole is now left_of, right_of'):
        moved('whole', 'whole', 'left_of', 'right_of')
    import left_of, right_of, whole
    assert isinstance(whole, Several) and (whole.a, whole._b, whole.c, whole.f) == (1, 2, 4, left_of.f)
    with monkeypatch.context() as m:
        m.setattr(whole, 'a', 10)
        m.setattr(whole, 'both', 30)
        assert whole.f() == 10 and left_of.both == right_of.both == 30
    assert whole.f() == 1 and left_of.both == right_of.both == 3
    whole.new = 5 # as in any module
    del whole.new
    with pytest.raises(AttributeError, match="module 'whole' has no attribute 'd'"): _ = whole.d
    for m in ('left_of', 'right_of'): monkeypatch.delitem(sys.modules, m)

@pytest.mark.parametrize('old', [m for m, new in MODULES.items() if "if __name__ == '__main__'" in
                                 (ROOT/'fedlit'/(new[0].replace('.', '/') + '.py')).read_text(encoding='utf-8')])
def test_an_old_command_goes_on(old):
    done = subprocess.run([sys.executable, '-m', f'fedlit.{old}', '--help'], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f'usage: python -m fedlit.{MODULES[old][0]}' in done.stdout
    assert done.stderr.count(f'fedlit.{old} is now fedlit.{MODULES[old][0]}') == 1

def test_nothing_in_fedlit_uses_an_old_name():
    every = [f'fedlit.{m}' for m in imports.modules(ROOT/'fedlit') if m not in ('__main__', *MODULES)]
    old = [f'fedlit.{m}' for m in MODULES]
    code = ('import importlib, sys\n'
            f'for m in {every}:\n'
            '    try: importlib.import_module(m)\n'
            '    except ImportError as e:\n'
            "        if 'flwr' not in str(e): raise\n"
            f'print(*[m for m in {old} if m in sys.modules])')
    done = subprocess.run([sys.executable, '-W', 'error:fedlit.:DeprecationWarning', '-c', code],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.split() == [], done.stdout + done.stderr
    graph = imports.imports(ROOT/'fedlit') # imports inside of functions too
    assert {m: sorted(o & MODULES.keys()) for m, o in graph.items() if o & MODULES.keys()} == {}

def test_the_old_names_are_gone_when_they_should_be():
    number = lambda version: tuple(map(int, re.findall(r'\d+', version)))
    assert number(fedlit.__version__) < number(GOES), 'delete fedlit/_moved.py and the modules that call it'

def test_centralised_is_found_among_the_methods_and_lives_beside_compare():
    from fedlit.methods import centralised
    from fedlit.run import compare
    assert centralised.__module__ == compare.__module__ and centralised.__name__ == 'centralised'
    import fedlit.methods
    with pytest.raises(AttributeError, match="module 'fedlit.methods' has no attribute 'central'"):
        _ = fedlit.methods.central

# -- the layout, as docs/lint.py looks at it

@pytest.fixture
def graph_of(tmp_path):
    "Who imports whom in a package of these files."
    def graph(files):
        for name, source in files.items():
            f = tmp_path/'p'/name
            f.parent.mkdir(parents=True, exist_ok=True)
            f.write_text(source)
        return imports.imports(tmp_path/'p')
    return graph

def test_imports_are_found_in_every_form(graph_of):
    graph = graph_of({'a.py': 'from . import b\nfrom .wing import c', 'b.py': 'import os, p.wing.c',
                      'd.py': 'def f():\n    from p.wing import e as g', 'wing/__init__.py': '',
                      'wing/c.py': 'from ..d import x', 'wing/e.py': 'def __getattr__(name):\n    from .. import a'})
    assert graph == {'a': {'b', 'wing.c'}, 'b': {'wing.c'}, 'd': {'wing.e'},
                     'wing': set(), 'wing.c': {'d'}, 'wing.e': set()}
    assert imports.circles(graph) == []

def test_a_circle_is_found_also_through_a_function(graph_of):
    graph = graph_of({'a.py': 'from .b import x', 'b.py': 'from p import c', 'c.py': 'def f():\n    import p.a',
                      'd.py': 'import p.a'})
    assert imports.circles(graph) == [('a', 'b', 'c')] and imports.reached(graph, 'd') == {'a', 'b', 'c'}

def test_lint_sees_an_import_of_a_later_page_and_a_circle(monkeypatch):
    import lint
    graph = imports.imports()
    monkeypatch.setattr(lint, 'imports', lambda: {**graph, 'tree': {'run'}})
    assert next(lint.arrows_run_down()).startswith('fedlit.tree, page 0, needs fedlit.')
    circle, = lint.no_circle_of_imports()
    assert {'run', 'tree'} <= set(re.findall(r'[\w.]+', circle))

def test_lint_sees_a_cell_that_quarto_runs_without_what_it_needs():
    import lint
    right = ['#| export\nimport os', 'a = 1', 'import re\nf = lambda b: a + b', 'import re\nx = [os.name for k in "a"]']
    assert not [*lint.unbound(right)]
    assert [*lint.unbound([*right, 'import re\ndef f(): return a\nf(a)'])] == [(4, 'a')]
    assert not [*lint.unbound(['a = 1', '#| eval: false\nimport re\na + 1', 'a + 2'])]

# -- pages

def test_old_addresses_are_no_pages_and_new_ones_are():
    there = {page_of(p) for _, p in pages.sidebar()}
    assert sited.MOVED and not sited.MOVED.keys() & there and set(sited.MOVED.values()) <= there

def leads(text): return re.search(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', text)[1]

def test_every_old_address_leads_to_the_new_page(tmp_path):
    sited.write(tmp_path)
    assert {f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob('*.html')} == {f'{p}.html' for p in sited.MOVED}
    for old, new in sited.MOVED.items():
        page = tmp_path/f'{old}.html'
        text = page.read_text(encoding='utf-8')
        assert Path(os.path.normpath(page.parent/leads(text))) == tmp_path/f'{new}.html'
        assert f'<a href="{leads(text)}">' in text and f'/{new}.html">' in text.split('rel="canonical"')[1]

def test_quarto_gets_the_same(tmp_path):
    sited.quarto(tmp_path)
    for old in sited.MOVED:
        front = yaml.safe_load((tmp_path/f'{old}.qmd').read_text(encoding='utf-8').split('---')[1])
        assert leads(front['include-in-header'][0]['text']) == sited.target(old)

SITE = Path(os.environ.get('FEDLIT_DOCS', ROOT/'_docs'))
built = pytest.mark.skipif(not (SITE/'index.html').exists(), reason=f'{SITE} is not built: make docs')
CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)

@built
def test_the_site_has_both():
    for old, new in sited.MOVED.items():
        assert leads((SITE/f'{old}.html').read_text(encoding='utf-8')) == sited.target(old)
        assert (SITE/f'{new}.html').stat().st_size > 5000

@built
@pytest.mark.skipif(not CHROMIUM or not importlib.util.find_spec('playwright'), reason='needs Chromium and playwright')
def test_a_browser_ends_at_the_same_heading_of_the_new_page():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        tab = browser.new_context(offline=True).new_page()
        for old, new in sited.MOVED.items():
            tab.goto((SITE/f'{old}.html').as_uri() + '#why')
            tab.wait_for_url((SITE/f'{new}.html').as_uri() + '#why', wait_until='domcontentloaded')
        browser.close()
