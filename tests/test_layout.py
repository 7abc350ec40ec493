"What docs/lint.py knows of imports is right; a short name is the same module."
import ast, re, sys
from importlib import import_module
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
import imports, lint

def test_a_short_name_is_the_same_module():
    pytest.importorskip('flwr')
    assert import_module('fedlit.flower') is import_module('fedlit.scale.flower')

@pytest.fixture
def graph_of(tmp_path):
    "Who imports whom in a package of these files."
    def graph(files):
        for name, source in files.items():
            f = tmp_path/'p'/name
            f.parent.mkdir(parents=True, exist_ok=True)
            f.write_text(source, encoding='utf-8')
        return imports.imports(tmp_path/'p')
    return graph

def test_imports_are_found_in_every_form(graph_of):
    graph = graph_of({'a.py': 'from . import b\nfrom .wing import c', 'b.py': 'import os, p.wing.c',
                      'd.py': 'def f():\n    from p.wing import e as g', 'wing/__init__.py': '',
                      'wing/c.py': 'from ..d import x', 'wing/e.py': 'import os'})
    assert graph == {'a': {'b', 'wing.c'}, 'b': {'wing.c'}, 'd': {'wing.e'},
                     'wing': set(), 'wing.c': {'d'}, 'wing.e': set()}
    assert imports.circles(graph) == []

def test_a_circle_is_found_also_through_a_function(graph_of):
    graph = graph_of({'a.py': 'from .b import x', 'b.py': 'from p import c', 'c.py': 'def f():\n    import p.a',
                      'd.py': 'import p.a'})
    assert imports.circles(graph) == [('a', 'b', 'c')] and imports.reached(graph, 'd') == {'a', 'b', 'c'}

def test_lint_sees_an_import_of_a_later_page_and_a_circle(monkeypatch):
    graph = imports.imports()
    monkeypatch.setattr(lint, 'imports', lambda: {**graph, 'data': {'run'}, 'ground.tree': {'run'}})
    found = [*lint.arrows_run_down()]
    assert found[0].startswith('fedlit.data, page 1, needs fedlit.')
    assert found[-1] == 'fedlit.ground.tree needs fedlit.run, but the ground stands on itself'
    circle, = lint.no_circle_of_imports()
    assert {'run', 'data', 'ground.tree'} <= set(re.findall(r'[\w.]+', circle))

def test_lint_sees_a_cell_that_is_too_long(monkeypatch):
    def found(*cells): # (page, body), with two more lines that do not count
        monkeypatch.setattr(lint, 'cells_of_code', lambda: [(p, 0, f'#| export\n{s}\n', True) for p, s in cells])
        return [said.split('[')[0] for said in lint.no_exported_cell_is_too_long()]
    code, imports, table = 'f(1)\n'*25, 'import re\n'*26, 'a = [\n' + '1,\n'*24 + ']\n'
    assert found(('a', code), ('b', code + 'f(1)'), ('c', imports), ('d', table), ('e', imports + 'f(1)')) == ['b', 'e']
    assert found(('a', table.replace('a = ', 'a = f(') + ')')) == ['a']
    signature = 'def f(\n' + '    a,\n'*30 + '):\n    "All of these."\n    return g(**locals())\n'
    assert found(('a', signature), ('b', signature + 'f(1)\n'), ('c', 2*signature)) == ['b', 'c']
    hooks = 'class Method(Summand):\n' + '    def loss(self): return 0.   # a term\n'*25
    assert found(('a', hooks), ('b', hooks.replace('Method(', 'Other(')), ('c', hooks + code)) == ['b', 'c']

def test_lint_sees_a_citation_of_no_paper(monkeypatch):
    cell = dict(cell_type='markdown', source='[@mcmahan2017; @nobody2020, table 1]')
    monkeypatch.setattr(lint.pages, 'notebooks', lambda: ['a'])
    monkeypatch.setattr(lint.pages, 'read', lambda p: dict(cells=[cell]))
    assert [*lint.every_citation_has_a_paper()] == ['a[0]: nbs/references.bib has no nobody2020']

def test_lint_sees_a_cell_that_quarto_runs_without_what_it_needs():
    right = ['#| export\nimport os', 'a = 1', 'import re\nf = lambda b: a + b', 'import re\nx = [os.name for k in "a"]']
    assert not [*lint.unbound(right)]
    assert [*lint.unbound([*right, 'import re\ndef f(): return a\nf(a)'])] == [(4, 'a')]
    assert not [*lint.unbound(['a = 1', '#| eval: false\nimport re\na + 1', 'a + 2'])]

def test_a_class_that_is_changed_elsewhere_is_seen():
    def wrong(source): return [name for _, _, name, right in lint.patches(ast.parse(source)) if not right]
    own = 'class C:\n    def a(self): pass\n@patch\ndef b(self:C): pass\n'
    assert not wrong(own)
    assert wrong(own + '@patch\ndef a(self:C): pass\n@patch\ndef b(self:C): pass') == ['a', 'b']
    assert wrong('@patch\ndef c(self:Far): pass\nFar.d = 1\n@patch(as_prop=True)\ndef e(self:Far): pass') == [*'cde']

def test_only_one_mode_is_torchs_own():
    "Any other would make torch import its compiler, see `Dispatch`."
    own = [m for m, file in imports.modules(ROOT/'fedlit').items()
           if '(TorchDispatchMode)' in file.read_text(encoding='utf-8')]
    assert own == ['ground.draws']
