"""The site: its converter (always), and its pages in a real browser with the network cut off (where _docs is built and
Chromium is there). `make test-docs` builds and runs all of it."""
import base64, inspect, os, re, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
import numpy as np, pytest, yaml
from pandas import DataFrame, MultiIndex
import conftest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
from convert import Converter, directives, only_imports, page_of, slug, tidy, unfolded
from tables import set_tables
import api, llms, pages
from fedlit.run import federate

SITE = Path(os.environ.get('FEDLIT_DOCS', ROOT/'_docs'))

# -- the converter

PAGES = {'05_method.ipynb': 'method.ipynb', 'methods/12_moon.ipynb': 'methods/moon.ipynb'}
moon = Converter('methods/12_moon.ipynb', PAGES, dict(li2021='Li et al., 2021', shi2023='Shi et al., 2023'),
                 dict(federate=('run', 'federate'), MOON=('methods/moon', 'moon')))

@pytest.mark.parametrize('path, page', [
    ('methods/12_moon.ipynb', 'methods/moon'),
    ('ground/tree.ipynb', 'ground/tree'),
    ('19_run.ipynb', 'run'),
    ('index.ipynb', 'index'),
    ('gallery.qmd', 'gallery'),
    ('papers/moon_figures.ipynb', 'papers/moon_figures')])
def test_page_names_are_those_of_nbdev(path, page): assert page_of(path) == page

@pytest.mark.parametrize('heading, anchor', [
    ('The ten hooks', 'the-ten-hooks'),
    ('Run.save', 'run.save'),
    ('fed_round', 'fed_round'),
    ('1. Round 0?', 'round-0'),
    ('fedlit.methods', 'fedlit.methods'),
    ('$x$', 'x'),
    ('42', 'section')])
def test_anchors_are_those_of_pandoc(heading, anchor): assert slug(heading) == anchor

@pytest.mark.parametrize('text, expected', [
    ('as in [@li2021; @shi2023].',
     'as in ([Li et al., 2021](../citations.md#li2021); [Shi et al., 2023](../citations.md#shi2023)).'),
    ('[@li2021, section 3; @shi2023]',
     '([Li et al., 2021](../citations.md#li2021), section 3; [Shi et al., 2023](../citations.md#shi2023))'),
    ('Li et al. [@li2021, section 3]', 'Li et al. ([2021](../citations.md#li2021), section 3)'),
    (r'$$ x \qquad\text{[@li2021, eq. 2]} $$', r'$$ x \qquad\text{(Li et al., 2021, eq. 2)} $$'),
    ('[how](../05_method.ipynb#the-ten-hooks)', '[how](../method.ipynb#the-ten-hooks)'),
    ('[here](#why)', '[here](#why)'),
    ('[out](https://x.org/04_method.ipynb)', '[out](https://x.org/04_method.ipynb)'),
    ('call `federate(m)`', 'call [`federate(m)`](../run.ipynb#federate)'),
    ('a `federate` state', 'a `federate` state'),
    ('[the `federate` loop](../05_method.ipynb)', '[the `federate` loop](../method.ipynb)'),
    ('its own `MOON`', 'its own `MOON`'),
    ('$`federate`$ and\n\n    `federate` [@li2021]\n', '$`federate`$ and\n\n    `federate` [@li2021]\n'),
    ('# MOON\n> Let it agree', '# MOON\n\n{.lead}\nLet it agree')])
def test_markdown(text, expected): assert moon.markdown(text) == expected

@pytest.mark.parametrize('code, expected', [
    ('from fedlit.run import federate', '[`federate`](../run.ipynb#federate) it'),
    ('x = 1', '`federate` it'),
    ('def federate(): pass\nfederate()', '`federate` it')])
def test_a_plain_word_is_a_link_where_it_is_imported_and_not_defined_anew(code, expected):
    nb = dict(metadata={}, cells=[dict(cell_type='markdown', source='`federate` it'),
                                  dict(cell_type='code', source=code, outputs=[])])
    assert Converter('methods/12_moon.ipynb', PAGES,
                     names=dict(federate=('run', 'federate')))(nb)['cells'][0]['source'] == expected

def test_an_unknown_citation_is_an_error():
    with pytest.raises(KeyError, match='nobody'): moon.markdown('[@nobody]')

def test_a_module_that_begins_with_many_imports_has_them_folded():
    cells = (''.join(c['source']) for p in pages.notebooks() for c in pages.read(p)['cells'])
    exported = [directives(s)[1] for s in cells if s.startswith('#| exports')]
    many = [s for s in exported if len(re.findall(r'^(?:from|import) ', s, re.M)) >= 8]
    assert [s for s in many if not only_imports(s)] == []

def test_directives():
    cell = lambda s, outputs=(): moon.code(dict(cell_type='code', source=s, outputs=list(outputs)))
    for hidden in ('#| hide\nx', '#| export\nx', '#| default_exp a.b'): assert cell(hidden) is None
    assert directives('#| exports\n#| fig-alt: "A: b"\nx') == ({'exports': '', 'fig-alt': 'A: b'}, 'x')
    assert (cell('#| exports\nx = 1')['metadata']['tags'] == ['exported']
            and cell('#| exports\nx = 1')['source'] == 'x = 1')
    assert cell('#| echo: false\nx')['metadata']['tags'] == ['remove-input']
    png = dict(output_type='display_data', data={'image/png': ''}, metadata={})
    assert cell('#| fig-alt: A line\nx', [png])['metadata']['mystnb']['image'] == dict(alt='A line')
    assert cell('#| code-fold: true\nx')['metadata']['tags'] == ['hide-input']
    many = '#| exports\n' + 'import a\n'*8
    assert cell(many)['metadata']['tags'] == ['exported', 'hide-input'] # nobody reads so many imports
    assert cell(many + 'a.b()')['metadata']['tags'] == cell('#| exports\nimport a')['metadata']['tags'] == ['exported']

def test_a_directive_may_go_on_below():
    folded = '#| slow\n#| fig-alt: >-\n#|   With "a" quote and 95\n#|   % of b: c\nx = 1'
    assert directives(folded) == ({'slow': '', 'fig-alt': 'With "a" quote and 95 % of b: c'}, 'x = 1')
    assert unfolded(folded) == '#| slow\n#| fig-alt: "With \\"a\\" quote and 95 % of b: c"\nx = 1'

def drawn(wide, dpi):
    "The beginning of a PNG, as the output of a cell."
    number = lambda n: n.to_bytes(4, 'big')
    png = b'\x89PNG\r\n\x1a\n' + number(13) + b'IHDR' + number(wide) + number(500) + b'pHYs' + number(round(dpi/.0254))
    return dict(output_type='display_data', data={'image/png': base64.b64encode(png).decode()}, metadata={})

@pytest.mark.parametrize('wide, dpi, width', [(1080, 100, None), (1080, 200, '540px'), (1080, 300, '360px'),
                                              (1500, 136, '768px')])
def test_a_figure_of_more_dots_per_inch_is_sharper_and_not_larger(wide, dpi, width):
    "Nor wider than the column."
    [cell] = moon.linked(moon.code(dict(cell_type='code', source='#| fig-alt: A line\nx', outputs=[drawn(wide, dpi)])))
    said = cell['metadata']['mystnb']['image']
    assert said.get('width') == width

def test_names_in_a_figure_lead_to_their_pages():
    figure = drawn(1400, 200)
    figure['metadata'] = dict(links={'../methods/12_moon.ipynb': '100 205 30 40, 5 6 7 8'})
    page = Converter('papers/landscape.ipynb', {})
    cell = page.code(dict(cell_type='code', source='#| fig-alt: A "map" here\nx', outputs=[figure]))
    html = cell['outputs'][0]['data']['text/html']
    assert html.startswith('<div class="linked" style="width:700px"><img alt="A &quot;map&quot; here" src="data:')
    assert re.findall('<a href="(.*?)" title="(.*?)" style="(.*?)"', html) == [
        ('../methods/moon.html', 'MOON', f'left:{a}%;top:{b}%;width:{c}%;height:{d}%')
        for a, b, c, d in (('10', '20.5', '3', '4'), ('0.5', '0.6', '0.7', '0.8'))]

def test_each_figure_of_a_cell_has_its_own_size():
    text = dict(output_type='stream', name='stdout', text='said')
    cells = moon.linked(moon.code(dict(cell_type='code', source='#| fig-alt: Lines\nx',
                                       outputs=[drawn(868, 200), text, drawn(1400, 200), text])))
    assert [c['metadata']['mystnb']['image']['width'] for c in cells] == ['434px', '700px']
    assert [len(c['outputs']) for c in cells] == [2, 2] and [c['source'] for c in cells] == ['x', '']
    assert ['remove-input' in c['metadata']['tags'] for c in cells] == [False, True]

def test_a_cell_that_shows_an_entry_can_be_linked_to():
    code = lambda s: dict(cell_type='code', source=s, outputs=[])
    said = ["show('moon/fig2')", "show('moon/fig2', 'short')", "show('moon/fig2')", 'x = 1']
    cells = Converter('papers/moon.ipynb', {})(dict(metadata={}, cells=[code(s) for s in said]))['cells']
    assert [c['source'] for c in cells] == ['<span id="moon-fig2"></span>', said[0],
                                            '<span id="moon-fig2-short"></span>', *said[1:]]
    here = Converter('papers/results.ipynb', dict.fromkeys(pages.notebooks(), 'x.ipynb'))
    assert here.markdown('[Fig. 2](moon_figures.ipynb#moon-fig2)') == '<a href="moon_figures.html#moon-fig2">Fig. 2</a>'
    assert 'html' not in here.markdown('[Fig. 2](moon_figures.ipynb#the-partition-fig.-5)')

def test_an_svg_that_names_itself_becomes_part_of_the_page():
    def shown(svg):
        out = dict(output_type='execute_result', data={'image/svg+xml': [svg], 'text/plain': 'x'}, metadata={})
        cell = dict(cell_type='code', source='#| fig-alt: A scheme\nx', outputs=[out])
        return moon.code(cell)['outputs'][0]['data']
    assert shown('<svg><title>MOON</title></svg>') == {
        'text/html': '<svg><title class="nohighlight">MOON</title></svg>'}
    assert shown('<svg><path/></svg>')['image/svg+xml'] == ['<svg><path/></svg>']

def test_a_file_of_an_svg_that_names_itself_becomes_part_of_the_page_too():
    shown = moon.markdown('| ![FedPer](../images/methods/FedPer.svg) | `FedPer` |')
    named = '<title class="nohighlight">FedPer as a picture</title><desc class="nohighlight">FedPer: '
    assert re.fullmatch(rf'\| <svg.*{named}.*</svg> \| `FedPer` \|', shown)
    assert '<style' not in shown
    assert moon.markdown('![Logo](../images/logo.svg)') == '![Logo](../images/logo.svg)'
    assert llms.links('a ![FedPer](images/methods/FedPer.svg) b', 'index.ipynb') == 'a  b'

def test_a_figure_is_a_png_or_an_svg(monkeypatch):
    cells = [dict(cell_type='markdown', source='## Here'),
             *(dict(cell_type='code', source=f'#| fig-alt: "{kind}"\nx', outputs=[dict(data={kind: 'aGk='})])
               for kind in ('image/png', 'image/svg+xml', 'text/plain'))]
    monkeypatch.setattr(pages, 'read', lambda path: dict(cells=cells))
    assert pages.figures('x') == [('image/png', 'aGk=', 'Here', ''), ('image/svg+xml', 'aGk=', 'Here', '')]

def test_the_gallery_says_what_a_figure_stands_on(monkeypatch, tmp_path):
    "In the words that the cell made of the settings and kept with the picture."
    picture = lambda **noted: dict(data={'image/png': 'aGk='}, metadata=noted)
    heres = ['cifar10 (16x16 pixels); mlp(dropout=0.5); 2 seeds', '', '<b>; 1 seed']
    outputs = [[picture(here=heres[0]), picture(here=heres[0])], [picture()], [picture(here=heres[2])]]
    cells = [dict(cell_type='code', source='#| fig-alt: "What it shows."\nx', outputs=o) for o in outputs]
    monkeypatch.setattr(pages, 'read', lambda path: dict(cells=cells))
    assert [here for *_, here in pages.figures('x')] == [heres[0], *heres]
    monkeypatch.setattr(pages, 'notebooks', lambda: ['x.ipynb'])
    monkeypatch.setattr(pages, 'front', lambda path: ('A page', 'about it'))
    captions = re.findall('<figcaption>(.*?)</figcaption>', pages.gallery(tmp_path))
    assert captions == [*[f'A page. Here: {heres[0]}.']*2, 'A page', 'A page. Here: &lt;b&gt;; 1 seed.']

def test_the_gallery_knows_the_setting_of_every_figure_of_the_catalogue():
    "Cells that call `show` or `show_with_note` keep it with the picture."
    asked, lacking = 0, set()
    for p in pages.notebooks():
        for c in pages.read(p)['cells']:
            if re.search(r'^(show|show_signed)\(', ''.join(c['source']), re.M) and c['cell_type'] == 'code':
                heres = [here for *_, here in pages.shown_in(c)]
                asked += len(heres)
                if '' in heres: lacking.add(f'nbs/{p}')
    assert asked > 30 and not lacking, f'python docs/fill.py {" ".join(sorted(lacking))}'

@pytest.mark.parametrize('printed, shown', [
    ('(np.float64(0.506217684107042), 0.81)', '(0.506218, 0.81)'),
    ('1.0000000032652117, 2.2213340500343293e-08', '1.0, 2.22133e-08'),
    ('<built-in method sigmoid of type object at 0x7f6d9febc100>', '<built-in method sigmoid of type object>'),
    ('/tmp/tmpjs19fujw/seen.json written', 'seen.json written'),
    ("W1127 23:20:05.339000 31292 torch/utils/cpp_extension.py:183] No CUDA\n1 s", '1 s'),
    ('mean = "(0.30571431675938804,)"', 'mean = "(0.30571431675938804,)"'),
    ('/tmp/ipykernel_1/36.py:4: UserWarning: dead\n  f(x)\n'*2 + 'done\n', 'UserWarning: dead\ndone\n')])
def test_what_is_printed_tells_of_the_page_and_not_of_a_machine(printed, shown): assert tidy(printed) == shown

def test_the_same_warning_stands_once():
    said = dict(output_type='stream', name='stderr', text=['/a.py:1: UserWarning: dead\n', '  f(x)\n'])
    cell = dict(cell_type='code', source='f(x)', outputs=[said]*3)
    assert [o['text'] for o in moon.code(cell)['outputs']] == ['UserWarning: dead\n']

def rows(frame):
    "What a reader sees of a DataFrame, a row of headings or cells each; ! before a number, which stands on the right."
    html = set_tables(frame.to_html(notebook=True))
    assert 'border' not in html and '<style' not in html
    return [[('!' if 'number' in a else '') + c for a, c in re.findall(r'<t[hd]([^>]*)>(.*?)</t[hd]>', row)]
            for row in re.findall(r'<tr>(.*?)</tr>', html)]

def test_a_table_is_set():
    verdicts = DataFrame(dict(claim=['a', 'b'], measured=[1/3, np.nan], interval=['-1.2 to +3', '0.1 ± 2']))
    assert rows(verdicts) == [['claim', '!measured', '!interval'], ['a', '!0.333', '!-1.2 to +3'],
                              ['b', '!–', '!0.1 ± 2']]                      # rows are not numbered
    assert rows(verdicts.set_index('claim'))[0] == ['claim', '!measured', '!interval'] # one row of headings
    wide = verdicts.set_index('claim')[['measured']].rename_axis(columns='alpha')
    assert rows(wide)[:2] == [['', '!alpha'], ['claim', '!measured']]
    rates = DataFrame(dict(n=[1556874, 98922]), index=[1., .0625])
    assert rows(rates) == [['', '!n'], ['1', '!1,556,874'], ['0.0625', '!98,922']]
    assert rows(DataFrame(dict(x=[1.5, 6e10])))[1:] == [['!1.5'], ['!6e+10']]
    assert rows(DataFrame(dict(x=[12.3456, .5])))[1:] == [['!12.3'], ['!0.5']]
    assert rows(DataFrame(dict(x=['0.25', '8e-12', '37'])))[1:] == [['!0.25'], ['!8e-12'], ['!37']] # as it was written
    assert rows(DataFrame(dict(loss=[.1, .2]), index=[2, 4])) == [['', '!loss'], ['2', '!0.1'], ['4', '!0.2']]
    assert rows(DataFrame(dict(client=[3, 1], loss=[.1, .2]), index=[3, 1]))[0] == ['!client', '!loss']
    assert rows(DataFrame(np.eye(2)))[0] == ['', '!0', '!1']               # a matrix keeps both numbers

def test_a_verdict_and_the_numbers_of_a_paper_come_first():
    judged = DataFrame(dict(claim=['a', 'b'], measured=['+1 s', '-1 s'], seeds=[3, 4], verdict=['holds', 'undecided']))
    assert rows(judged)[:2] == [['claim', 'verdict', '!measured', '!seeds'], ['a', 'holds', '!+1 s', '!3']]
    both = DataFrame({'method': ['x'], 'ours': [1.], 'margin': [.5], 'seeds': [3], 'paper, cifar10': [2.]})
    assert rows(both.set_index('method'))[0] == ['method', '!ours', '!margin', '!paper, cifar10', '!seeds']
    assert rows(judged.drop(columns='verdict'))[0] == ['claim', '!measured', '!seeds']
    assert rows(judged.verdict.value_counts().to_frame('claims'))[0] == ['verdict', '!claims'] # a count of verdicts

def test_a_long_word_of_a_table_may_be_broken_after_a_part():
    told = rows(DataFrame(dict(partition=['classes_per_client(classes=2)', 'iid()', 'two words/not_long'])))
    assert told[1:] == [['classes_per_client(<wbr>classes=2)'], ['iid()'], ['two words/not_long']]

def test_what_a_figure_stands_on_is_text_below_it():
    "Once, where the cell has not said it itself."
    figure, text = (dict(output_type='display_data', data={'image/png': ''}, metadata=dict(here='<b>; 1 seed')),
                    lambda s: dict(output_type='display_data', data={'text/markdown': s}, metadata={}))
    told = lambda *outputs: [''.join(o['data'].get('text/html', '')) for o in moon.code(
        dict(cell_type='code', source='#| fig-alt: A line\nx', outputs=[*outputs]))['outputs']]
    assert told(figure, figure) == ['', '', '<p class="here">Drawn from: &lt;b&gt;; 1 seed.</p>']
    assert told(text('*Here:* <b>; 1 seed.'), figure) == ['', '']
    line = '<p class="here">Drawn from: &lt;b&gt;; 1 seed.</p>'
    assert told(figure, text('*Drawn from:* <b>; 1 seed.')) == ['', line]

def test_cells_are_words_of_their_own_to_the_search():
    table = DataFrame(dict(a=['left'], b=['right']), index=['row']).to_html()
    for html in (table, '<table id="T_1"><tr><td>left</td><td>right</td></tr></table>'):
        assert 'left right' in re.sub('<[^<]+?>', '', set_tables(html))

def test_labels_of_runs_have_the_names_of_the_site():
    told = rows(DataFrame(dict(data=['small_cifar10'], claim=['MOON is ahead'])).set_index('data'))
    assert told == [['data', 'claim'], ['CIFAR-10 (small)', 'MOON is ahead']]
    styled = DataFrame(dict(data=['small_cifar10'])).style.to_html()
    assert 'CIFAR-10 (small)' in set_tables(styled)

def test_no_figure_is_said_to_be_drawn_at_paper_scale():
    "Nothing that trains has been run at it."
    told = {p: pages.command(p) for p in pages.notebooks() if pages.figures(p)}
    assert len(told) > 50 and not {p: c for p, c in told.items() if 'paper' in c.partition(' --scale ')[2]}

def test_a_table_that_was_stored_lean_is_the_same():
    fill = pytest.importorskip('fill')
    html = DataFrame(dict(x=[1.5, 2])).to_html(notebook=True)
    output = dict(data={'text/html': html, 'text/plain': 'x'})
    fill.lean(output)
    assert list(output['data']) == ['text/html'] and len(output['data']['text/html']) < len(html)/2
    assert set_tables(output['data']['text/html']) == set_tables(html)

def test_cells_over_several_rows_stay_in_their_columns():
    pairs = MultiIndex.from_product([['a', 'b'], ['x', 'y']], names=['letter', 'sign'])
    told = rows(DataFrame({('points', 'mean'): [1., 2, 3, 4], ('points', 'sd'): [.1]*4}, index=pairs))
    assert told == [['', '', 'points'], ['letter', 'sign', '!mean', '!sd'], ['a', 'x', '!1.0', '!0.1'],
                    ['y', '!2.0', '!0.1'], ['b', 'x', '!3.0', '!0.1'], ['y', '!4.0', '!0.1']]

def test_docments():
    source = ('__all__ = ["f", "g", "h", "C"]\n'
              'def f(\n'
              '    a, # first,\n'
              '       # (n,)\n'
              '    *rest, b=2, # second\n'
              '    **kw):\n'
              '    "Adds `a`."\n'
              '    return a # not a docment\n'
              'def g(task, a): # int, how many\n'
              '    "A note on one line is about the last parameter."\n'
              'def h(\n'
              '    task,\n'
              ') -> dict: # name -> number\n'
              '    "What comes back."\n'
              'class C:\n'
              '    "Holds."\n'
              '    x: int = 1 # a field\n'
              '    def m(self, y): "Does."\n'
              '    def _p(self): "No."\n')
    found = api.entries(source)
    assert [e.call for e in found] == ['f(a, *rest, b=2, **kw)', 'g(task, a)', 'h(task)', 'C(x=1)', 'C.m(y)']
    assert (found[0].params == [('a', '', 'first, (n,)'), ('b', '2', 'second')]
            and found[3].params == [('x', '1', 'a field')])
    assert [e.returns for e in found] == ['', '', '`dict`, name -> number', '', '']
    text = api.markdown(found, 'url')
    assert '| *returns* | `dict`, name -> number |' in text and '| `task` | Task, the data |' in text
    assert '| `b` | `2` | second |' in api.markdown(found, 'url') and 'href="url#L2"' in api.markdown(found, 'url')

def test_docments_of_lines_with_several_parameters():
    f, g, h = api.entries('__all__ = ["f", "g", "h"]\n'
                          'def f(\n'
                          '    a, b=1, # two of a kind\n'
                          '    *more,  # others\n'
                          '    **kw,   # by name\n'
                          ') -> int: pass\n'
                          'def g(task, way): # way: there\n'
                          '    pass\n'
                          'def h(*all): pass # not a docment\n', 'a.b')
    assert f.call == 'f(a, b=1, *more, **kw)' and f.returns == '`int`'
    assert f.params == [('a', '', 'two of a kind'), ('b', '1', 'two of a kind'), ('*more', '', 'others'),
                        ('**kw', '', 'by name')]
    assert g.params == [('task', '', ''), ('way', '', 'there')] and not g.returns
    assert not h.params and h.module == 'a.b'

def test_a_default_inside_field_is_the_default():
    [c] = api.entries('__all__ = ["C"]\nclass C:\n    a: float = field(default=1e-5, repr=False) # small\n'
                      '    b: dict = field(default_factory=dict)\n    c: int = field(repr=False)\n')
    assert c.call == 'C(a=1e-05, b=dict(), c)' and c.params[0] == ('a', '1e-05', 'small')

def test_names_yml_knows_words_by_place(monkeypatch):
    monkeypatch.setattr(api, 'COMMON', dict(a='anywhere'))
    monkeypatch.setattr(api, 'PLACES', {'x.f': dict(a='at f'), 'x.*': dict(a='in x', b='too')})
    assert [api.meaning('a', p) for p in ('x.f', 'x.C.f', 'y.f')] == ['at f', 'in x', 'anywhere']
    assert api.place_of('b', 'x.f') == 'x.*' and api.place_of('b', 'y.f') is None and api.meaning('b', 'y.f') == ''

def test_bibliography():
    found = pages.bibliography()
    assert (pages.short(found['mcmahan2017'][1]) == 'McMahan et al., 2017'
            and 'Agüera' in found['mcmahan2017'][1]['author'])

def dots(png):
    "Dots per inch of a PNG in base 64, or 72 where it does not say."
    raw = base64.b64decode(png)
    at = raw.find(b'pHYs', 0, 4096)
    return .0254*int.from_bytes(raw[at+4:at+8], 'big') if at > 0 else 72

def wide(png): return int.from_bytes(base64.b64decode(png[:64])[16:20], 'big')

def test_figures_have_twice_the_pixels():
    "Of what matplotlib draws, or, where that is wider, of a page's column."
    found = {p for p in pages.notebooks() for _, picture, *_ in pages.figures(p)
             if not picture.startswith('<') and dots(picture) < 120 and wide(picture) < 1400}
    assert not found, f'python docs/fill.py {" ".join(sorted("nbs/" + p for p in found))}'

def test_the_readme_is_short():
    "At most 700 words, and what a program prints is one block."
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert len(text.split()) <= 700
    printed = re.findall(r'(?:^    \S.*\n)+', re.sub(r'^```.*?^```', '', text, flags=re.S | re.M), re.M)
    assert len(printed) == 1 and printed[0].count('accuracy') == 3

def test_the_row_that_the_readme_repeats_is_one_row(capsys):
    "With its three seeds, and no other method or mixture of labels."
    from fedlit.cli import main
    command = re.search('`fedlit (reproduce .*? --only .*?)`', (ROOT/'README.md').read_text(encoding='utf-8'))[1]
    main([*command.split(), '--list'])
    assert re.search(r' \d/3 ', capsys.readouterr().out)

# -- what a language model reads

def test_llms_txt_lists_every_page_once_with_its_subtitle():
    listed = re.findall(r'^- \[(.+)\]\((\S+)\): (.+)$', llms.listing(), re.M)
    assert [link for _, link, _ in listed] == [f'{llms.SITE}/{page_of(p)}.html.md' for _, p in pages.sidebar()]
    assert ('MOON', f'{llms.SITE}/methods/moon.html.md', 'Let the local features agree with the global ones') in listed

def test_the_context_file_holds_the_prose_and_the_code_of_every_page():
    text = llms.context()
    for p in pages.notebooks():
        held = text.split(f'url="{llms.url(p)}">\n')[1].split('\n</doc>')[0].splitlines()
        cells = [''.join(c['source']) for c in pages.read(p)['cells']]
        shown = [line for s in cells if 'hide' not in directives(s)[0] for line in s.splitlines()]
        assert not [line for line in shown if line not in held and '](' not in line and not line.startswith('#|')], p

def test_links_of_the_context_file_are_those_of_the_site():
    assert llms.links('[a](../05_method.ipynb#x), `[b](c.ipynb)`', 'methods/12_moon.ipynb') == (
        f'[a]({llms.SITE}/method.html#x), `[b](c.ipynb)`')
    assert llms.links('[here](#why) [out](https://x.org/a.ipynb)', 'methods/12_moon.ipynb') == (
        f'[here]({llms.SITE}/methods/moon.html#why) [out](https://x.org/a.ipynb)')

# -- the pages as files

built = pytest.mark.skipif(not (SITE/'index.html').exists(), reason=f'{SITE} is not built: make docs')

class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.images, self.sidebar, self.in_sidebar = set(), [], [], [], 0
        self.feed(path.read_text(encoding='utf-8'))
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ('id', 'name') if a.get(k)}
        self.links += [a[k] for k in ('href', 'src') if a.get(k) is not None]
        if tag == 'img': self.images.append(a)
        if tag == 'div' and 'sidebar-tree' in a.get('class', ''): self.in_sidebar = 1
        elif tag == 'div' and self.in_sidebar: self.in_sidebar += 1
        if tag == 'a' and self.in_sidebar: self.sidebar.append(a['href'])
    def handle_endtag(self, tag): self.in_sidebar -= tag == 'div' and self.in_sidebar > 0

@pytest.fixture(scope='module')
def site():
    found = {p.relative_to(SITE).as_posix(): p for p in sorted(SITE.rglob('*.html')) if '_static' not in p.parts}
    return {n: Page(p) for n, p in found.items()}

@built
def test_every_page_is_there(site): assert {page_of(p) + '.html' for _, p in pages.sidebar()} <= site.keys()

@built
def test_internal_links_and_anchors_resolve(site):
    broken = []
    for name, page in site.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith('//'): continue
            there = urlsplit(urljoin('/' + name, link))
            path, anchor = unquote(there.path).lstrip('/'), unquote(there.fragment)
            if not (SITE/path).is_file() or anchor and path in site and anchor not in site[path].ids:
                broken.append((name, link))
    assert not broken

@built
def test_files_for_language_models_are_served_and_their_links_resolve(site):
    broken, files = [], [SITE/'llms.txt', SITE/'llms-ctx.txt', *SITE.rglob('*.html.md')]
    assert len(files) == 2 + len(pages.sidebar())
    for f in files:
        for link in re.findall(r'\]\(' + re.escape(llms.SITE) + r'/([^)\s]*)\)', f.read_text(encoding='utf-8')):
            path, _, anchor = link.partition('#')
            if not (SITE/path).is_file() or anchor and unquote(anchor) not in site[path].ids:
                broken.append((f.name, link))
    assert not broken

@built
def test_no_citation_stays_raw(site): assert not [n for n in site if '[@' in (SITE/n).read_text(encoding='utf-8')]

@built
def test_pages_load_nothing_from_elsewhere(site):
    text = {n: (SITE/n).read_text(encoding='utf-8') for n in site}
    assert not [(n, m) for n, t in text.items()
                for m in re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="((?:https?:)?//[^"]*)"|'
                                    r'<link[^>]*rel="stylesheet"[^>]*href="(https?://[^"]*)"', t)]

@built
def test_images_have_alternative_texts(site):
    assert not [(n, i) for n, page in site.items() for i in page.images if len(i.get('alt') or '') < 10]

# Pandoc and MyST read this alike
FOLDED = r'(?:\A|\n\n)<details>\n<summary>[^<\n]+</summary>\n\n.+?\n\n</details>(?:\n\n|\Z)'

def test_folded_answers_are_read_as_markdown_by_both_routes():
    found = {p: [''.join(c['source']) for c in pages.read(p)['cells']
                 if c['cell_type'] == 'markdown' and '<details' in ''.join(c['source'])] for p in pages.notebooks()}
    assert sum(map(len, found.values())) > 3
    for p, cells in found.items():
        assert all(len(re.findall(FOLDED, c, re.S)) == c.count('<details') for c in cells), p

@built
def test_folded_answers_are_lists(site):
    folded = re.compile(r'<details>\s*<summary>Answer.*?</details>', re.S)
    told = {n: folded.findall((SITE/n).read_text(encoding='utf-8')) for n in site}
    assert sum(map(len, told.values())) > 3
    assert not [n for n, found in told.items() for f in found if '<li>' not in f or re.search(r'^\d\. ', f, re.M)]

DUMPED = {'a machine': r'(?<![\w./])/(?:work|tmp|home|root)/(?!bash)', 'an address': r' at 0x[0-9a-f]{6}',
          'a type': r'np\.float64\(', 'a graph': r'grad_fn=', 'a bar': r'\d%\|',
          'sixteen digits': r'(?<!"\()\b\d\.(?!0{3})\d{9}'}

@built
def test_outputs_are_written_for_a_reader(site):
    out = {n: ' '.join(re.findall(r'<div class="cell_output docutils container">(.*?)</div>\n</div>',
                                  (SITE/n).read_text(encoding='utf-8'), re.S)) for n in site}
    assert sum(map(bool, out.values())) > 100
    assert not [(n, what, m[0]) for n, text in out.items() for what, form in DUMPED.items()
                for m in re.finditer('.{0,30}' + form, re.sub('<script.*?</script>|<svg.*?</svg>|data:[^"]*', '', text,
                                                              flags=re.S))]

@built
def test_tables_are_set(site):
    tables = [(n, t) for n in site for t in re.findall(r'<table[^>]*class="dataframe.*?</table>',
                                                       (SITE/n).read_text(encoding='utf-8'), re.S)]
    assert len(tables) > 200
    for n, t in tables:
        cells = [re.sub('<[^>]*>', '', c).strip() for c in re.findall(r'<td[^>]*>(.*?)</td>', t, re.S)]
        assert not [c for c in cells if c in ('NaN', 'None', '&lt;NA&gt;', '...') or '± +' in c
                    or re.fullmatch(r'[-+]?\d+\.\d{7,}', c)], n
        assert 'border="1"' not in t and '<style' not in t, n

def test_the_round_of_the_course_is_a_lesson_alone():
    "Its code for the package stands in the reference."
    course = [p for captions, p in pages.sidebar() if captions == ('Start here',)]
    assert 'guides/round.ipynb' in course and '09_cohort.ipynb' not in course
    assert not pages.module_of(pages.read('guides/round.ipynb'))

@built
def test_the_sidebar_is_in_the_order_of_reading(site):
    order = [page_of(p) + '.html' for _, p in pages.sidebar() if p != 'index.ipynb']
    assert [link for link in site['index.html'].sidebar] == order
    for name, then in zip(order, order[1:]):
        here = (SITE/name).read_text(encoding='utf-8')
        assert urljoin('/' + name, re.search(r'class="next-page" href="([^"]*)"', here)[1]) == '/' + then

# -- the pages in a browser

def browsed(test): return built(conftest.browsed(test))

@pytest.fixture(scope='module')
def tab(browser):
    page = browser.new_context(offline=True, viewport=dict(width=1280, height=900)).new_page()
    page.set_default_timeout(300_000) # only a fault takes that long, on any machine
    page.faults = []
    page.on('console', lambda m: page.faults.append((page.url, m.text)) if m.type in ('error', 'warning') else None)
    page.on('pageerror', lambda e: page.faults.append((page.url, str(e))))
    page.on('requestfailed', lambda r: page.faults.append((page.url, r.url)))
    page.on('request', lambda r: page.faults.append((page.url, 'asks the network: ' + r.url))
                       if not r.url.startswith(('file:', 'data:', 'blob:')) else None)
    return page

def show(tab, name, width=1280, height=900):
    "Open a page of the site in a window of this size."
    tab.set_viewport_size(dict(width=width, height=height))
    tab.goto((SITE/f'{name}.html').as_uri())

def let_fade(tab):
    "Wait until colours that furo fades are what they will be."
    tab.evaluate("""() => Promise.allSettled(
        document.getAnimations().filter(a => a instanceof CSSTransition).map(a => a.finished))""")

LOOK = """async () => { await (window.MathJax && MathJax.startup ? MathJax.startup.promise : null);
    const wide = [...document.querySelectorAll('.content *')].filter(e =>
        e.getBoundingClientRect().right > innerWidth + 1
        && !e.closest('pre, .cell_output, .table-wrapper, mjx-container, .toc-drawer, .visually-hidden'));
    const tex = e => (e?.innerText.match(/\\\\[a-z]+\\{|\\$\\$/g) || []).length; // what looks like undrawn mathematics
    return {math: document.querySelectorAll('.math').length,
            drawn: document.querySelectorAll('.math > mjx-container > svg').length,
            wrong: [...document.querySelectorAll('mjx-merror, [data-mml-node=merror]')].map(e => e.textContent),
            raw: tex(document.querySelector('article'))
                 - [...document.querySelectorAll('article :is(pre, code)')]
                       .filter(e => !e.parentElement.closest('pre, code')).reduce((n, e) => n + tex(e), 0),
            width: document.documentElement.scrollWidth, wide: wide.slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
            broken: [...document.images].filter(e => e.loading != 'lazy' && !e.naturalWidth).map(e => e.src)} }"""

BARS = """() => [...document.querySelectorAll('article :not(mjx-container)')].filter(e =>
    e.scrollWidth > e.clientWidth + 2 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    ).map(e => e.outerHTML.slice(0, 120))"""

@pytest.fixture(scope='module')
def seen(site, tab):
    "What the browser says of every page on a telephone, and what scrolls sideways on a wide screen."
    found = {}
    for name in site:
        tab.set_viewport_size(dict(width=375, height=800))
        tab.goto((SITE/name).as_uri(), wait_until='load')
        found[name] = tab.evaluate(LOOK)
        tab.set_viewport_size(dict(width=1280, height=800))
        found[name]['bars'] = tab.evaluate(BARS)
    return found

@browsed
def test_pages_open_without_errors(seen, tab):
    assert not tab.faults
    assert not {n: s['broken'] for n, s in seen.items() if s['broken']}

@browsed
def test_math_is_drawn(seen):
    assert sum(s['math'] for s in seen.values()) > 500
    assert not {n: s for n, s in seen.items() if s['drawn'] != s['math'] or s['wrong'] or s['raw'] > 0}

@browsed
def test_nothing_overflows_at_375_pixels(seen):
    assert not {n: (s['width'], s['wide']) for n, s in seen.items() if s['width'] > 375 or s['wide']}

@browsed
def test_nothing_scrolls_sideways_at_1280_pixels(seen): assert not {n: s['bars'] for n, s in seen.items() if s['bars']}

@browsed
def test_a_long_line_of_code_goes_on_under_its_comment(tab):
    show(tab, 'run')
    code = tab.locator('article pre', has_text='def federate(').first
    ends = code.evaluate("""e => [...e.querySelectorAll('.c1')].map(e => [...e.getClientRects()])
        .map(r => [r.at(-1).top - r[0].top, r.at(-1).left - r[0].left])""") # of its last line, from its first
    long = [right for down, right in ends if down > 0]
    assert len(long) > 5 and all(0 < right < 20 for right in long), long
    assert code.text_content().rstrip('\n') == inspect.getsource(federate).rstrip('\n') # for those who copy it

FOUND = {'FedDecorr': 'methods/feddecorr', 'dimensional collapse': 'guides/seven_pictures',
         'BatchNorm': 'methods/statistics', 'non-iid': 'partition', 'dirichlet': 'partition', 'checkpoint': 'result',
         'save model': 'result', 'federate': 'run', **dict.fromkeys(('GPU', 'metrics', 'resume', 'cite', 'contribute',
         'compare', 'seeds', 'ResNet', 'tune', 'held-out', 'elsewhere', 'regression', 'CSV',
         'speed', 'install', 'multiple GPUs', 'hyperparameter', 'learning rate'), 'guides/recipes'),
         'personalized federated learning': 'methods/personal',
         'own dataset': 'guides/recipes|guides/own_data', 'reproduced': 'papers/results',
         'which method is best': 'papers/landscape', 'my own loss': 'guides/recipes',
         **dict.fromkeys(('FedDecorr Table 1', 'MOON fig. 6', 'Table 3'), 'papers/results'),
         'citation': 'guides/recipes', 'bibtex': 'guides/recipes', 'dataset': 'guides/own_data'}
ASKED = yaml.safe_load((ROOT/'docs'/'asked.yml').read_text(encoding='utf-8'))
FOUND |= {said[0]: page for page, said in ASKED.items()}

def test_what_is_asked_in_other_words_has_a_page_and_only_one():
    assert {*ASKED} <= {page_of(p) for _, p in pages.sidebar()}
    every = [said for many in ASKED.values() for said in many]
    assert len(every) == len({*every}) and all(isinstance(said, str) for said in every)

INTERNALS = {page_of(p) for captions, p in pages.sidebar() if captions[:1] == ('Internals',)}

@browsed
@pytest.mark.parametrize('asked', FOUND)
def test_search_finds_the_right_page_first(tab, asked):
    show(tab, 'index')
    tab.fill('.sidebar-search', asked)
    tab.press('.sidebar-search', 'Enter')
    tab.wait_for_selector('#search-results li a')
    tab.wait_for_function("document.querySelector('#search-results .search-summary')"
                          "?.textContent.includes('matching')")
    hits = [h.split('?')[0].split('#')[0].removesuffix('.html') for h in
            tab.eval_on_selector_all('#search-results li a', 'es => es.map(e => e.getAttribute("href"))')]
    assert hits[0] in FOUND[asked].split('|'), hits[:5]
    assert not {*pages.GENERATED} & {*hits} # lists hold every word
    inside = [h in INTERNALS for h in hits]
    assert inside == sorted(inside), hits # the internals last
    assert not tab.faults

@browsed
def test_the_sidebar_stands_at_the_page_and_its_headings_are_beside_it(tab):
    show(tab, 'methods/fedgse')
    opened = tab.eval_on_selector_all('.sidebar-tree details[open]', 'es => es.map(e => e.innerText)')
    assert len(opened) == 2 and all('FedGSE' in text for text in opened) # the methods, and among them the sub-models
    top = tab.eval_on_selector_all('.sidebar-tree > details > summary', 'es => es.map(e => e.innerText.trim())')
    assert len(top) == 7, top
    seen = lambda at: tab.eval_on_selector(at, """e => { const r = e.getBoundingClientRect();
        return r.width > 50 && r.top >= 0 && r.bottom <= innerHeight && r.left >= 0 && r.right <= innerWidth }""")
    assert seen('.sidebar-tree .current-page') and seen('.toc-tree li li a')
    pair = tab.eval_on_selector_all('article, .toc-drawer', 'es => es.map(e => e.getBoundingClientRect())')
    assert pair[0]['right'] <= pair[1]['left']
    show(tab, 'index')
    assert 'seven pictures' in tab.eval_on_selector('.sidebar-tree details[open]', 'e => e.innerText')
    places = tab.eval_on_selector_all('.fedlit-moving svg', 'es => es.map(e => e.getBoundingClientRect().y)')
    assert len({*places}) == 1 # labels and curves side by side

def columns(png):
    "By how much a page's column shrinks a figure."
    raw = base64.b64decode(png)
    return int.from_bytes(raw[16:20], 'big')*100/dots(png)/768

def test_the_column_shows_every_figure_at_60_percent_of_its_size_or_more():
    shrunk = {page_of(p): columns(picture) for p in pages.notebooks() for _, picture, *_ in pages.figures(p)
              if not picture.startswith('<')}
    assert len(shrunk) > 50 and not {p: c for p, c in shrunk.items() if c > 1/.6}

@browsed
@pytest.mark.parametrize('name', ['methods/feddecorr', 'papers/landscape'])
def test_a_figure_on_a_telephone_is_wide_enough_to_be_read(tab, name):
    "It scrolls in its own place."
    show(tab, name, 375)
    wide = tab.eval_on_selector_all('.cell_output img', 'es => es.map(e => [e.clientWidth, e.naturalWidth])')
    assert wide and all(shown == 560 for shown, own in wide if own > 1120)
    assert tab.evaluate('document.documentElement.scrollWidth') == 375

@browsed
@pytest.mark.parametrize('width', [1280, 375])
def test_a_name_on_the_map_is_a_link_to_its_page(tab, width):
    show(tab, 'papers/landscape', width)
    names = tab.locator('.linked').first.locator('a[title="MOON"]')
    assert names.count() == 3 # a panel for each mixture of labels
    names.first.click() # fails where something lies over it
    tab.wait_for_url('**/methods/moon.html') # until all is there, else the next test sees what was broken off

@built
def test_every_figure_of_the_papers_has_a_line_with_its_verdict(site):
    from fedlit.papers.catalogue import CATALOGUE
    text = (SITE/'papers'/'results.html').read_text(encoding='utf-8')
    table = re.search(r'<div class="sortable verdict-last">.*?</table>', text, re.S)[0]
    rows = [re.findall(r'<td.*?>(.*?)</td>', row, re.S) for row in re.findall('<tr.*?</tr>', table, re.S)[1:]]
    told = {href for row in rows for href in re.findall('href="[^"#]*#([^"]*)"', row[0])}
    lacking = [e.id for e in CATALOGUE.values() if 'not in' not in e.source and e.id != 'collapse'
               and any(not claim.ours for claim in e.claims.values())
               and not {e.id.replace('/', '-'), e.id.replace('/', '-') + '-short'} & told]
    assert not lacking
    assert all(re.fullmatch(r'(<p>)?(\d+ (holds?|do(es)? not|undecided|not evaluated)(, )?)+(</p>)?', row[-1].strip())
               for row in rows)

@browsed
@pytest.mark.parametrize('width', [1280, 375])
def test_the_verdict_is_always_on_screen_and_a_heading_sorts(tab, width):
    show(tab, 'papers/results', width)
    boxes = '.sortable tbody tr > td:last-child'
    shown = lambda: tab.eval_on_selector_all(boxes, """es => es.slice(0, 5).every(e => {
        const r = e.getBoundingClientRect(); return r.left >= 0 && r.right <= innerWidth && r.width > 50 })""")
    assert shown()
    tab.eval_on_selector('.sortable table', 'e => { (e.closest(".table-wrapper, .cell_output")).scrollLeft = 400 }')
    assert shown()
    seeds = lambda: tab.eval_on_selector_all('.sortable tbody tr',
                                             'es => es.map(e => parseFloat(e.cells[4].innerText))')
    before = seeds()
    tab.click('.sortable th:nth-child(5)')
    assert seeds() == sorted(before) != before
    tab.click('.sortable th:nth-child(5)')
    assert seeds() == sorted(before, reverse=True)
    assert not tab.faults

@browsed
@pytest.mark.parametrize('name', ['cli', 'run', 'partition', 'methods/fedgse', 'methods/feddecorr', 'papers/catalogue',
                                  'engine/speed'])
def test_no_line_of_code_is_cut_off_at_1280_pixels(tab, name):
    show(tab, name)
    lines = 'div.cell_input pre, div.cell_output pre, div.highlight-bash pre, div.highlight-python pre'
    assert not tab.eval_on_selector_all(lines, """es =>
        es.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))""")

@built
def test_a_link_to_a_page_says_what_it_is():
    for name in ('index.html', 'methods/moon.html'):
        said = re.findall(r'<meta (?:name|property)="(?:description|og:description)" content="([^"]{20,})"',
                          (SITE/name).read_text(encoding='utf-8'))
        assert len(said) == 2 and said[0] == said[1]
    assert 'Let the local features agree with the global ones' in said[0]

@browsed
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_text_stands_out_and_figures_lie_on_white_in(tab, scheme):
    tab.emulate_media(color_scheme=scheme)
    show(tab, 'methods/feddecorr')
    let_fade(tab)
    light = lambda css: sum(map(float, re.findall(r'[\d.]+', css)[:3]))/765
    style = lambda sel, key: tab.eval_on_selector(sel, f'e => getComputedStyle(e).{key}')
    assert abs(light(style('article p', 'color')) - light(style('body', 'backgroundColor'))) > .6
    assert (light(style('body', 'backgroundColor')) < .3) == (scheme == 'dark')
    if scheme == 'dark': assert light(style('article .cell_output img', 'backgroundColor')) == 1

@browsed
def test_the_first_screen_moves(tab):
    "Three doors; the slider takes the labels apart, the switch brings FedDecorr; nothing plays against one's hand."
    tab.emulate_media(color_scheme='light', reduced_motion='reduce')
    show(tab, 'index')
    said, curve = lambda: tab.inner_text('.fedlit-moving .said'), lambda: tab.get_attribute('.curves > .average', 'd')
    settled = lambda words: tab.wait_for_function( # said and curve are set together
        "words => document.querySelector('.fedlit-moving .said').textContent.startsWith(words)", arg=words)
    settled('alpha = 0.05:')
    uneven = curve()
    tab.focus('.fedlit-moving input[type=range]')
    tab.keyboard.press('Home')
    settled('even labels:')
    even = curve()
    height = lambda path: sum(float(p.split()[1]) for p in path[1:].split('L')) # downwards
    assert height(even) < height(uneven)
    tab.keyboard.press('End')
    settled('alpha = 0.05:')
    doors = tab.eval_on_selector('.doors', 'e => e.getBoundingClientRect().top')
    tab.check('.fedlit-moving input[type=checkbox]')
    settled('alpha = 0.05, with FedDecorr:')
    assert height(curve()) < height(uneven) and 'directions' in said()
    assert tab.eval_on_selector('.doors', 'e => e.getBoundingClientRect().top') == doors # nothing jumps
    colour = lambda kind: tab.eval_on_selector(f'.fedlit-moving input[type={kind}]',
                                               'e => getComputedStyle(e).accentColor')
    assert colour('checkbox') == 'rgb(194, 65, 12)' != colour('range') # orange is FedDecorr
    assert tab.eval_on_selector_all('.doors a', 'es => es.length') == 3
    low = lambda s: tab.eval_on_selector(s, 'e => e.getBoundingClientRect().bottom + window.scrollY')
    tab.set_viewport_size(dict(width=1280, height=800))
    assert low('.fedlit-moving') < low('.doors') < low('article a[href="https://github.com/fedlit/fedlit"]') < 800
    assert not tab.faults
    tab.emulate_media(reduced_motion='no-preference')

@browsed
def test_a_door_is_on_the_first_screen_of_a_telephone(tab):
    tab.emulate_media(reduced_motion='reduce')
    show(tab, 'index', 375, 800)
    tab.wait_for_function("document.querySelector('.fedlit-moving .said').textContent")
    low = lambda s: tab.eval_on_selector(s, 'e => e.getBoundingClientRect().bottom')
    assert low('.lead') < low('.lead ~ p:not(.nb-links)') < low('.fedlit-moving .curves') < low('.doors a') < 800
    tab.emulate_media(reduced_motion='no-preference')

@browsed
@pytest.mark.parametrize('name', ['moon', 'feddecorr', 'fedgse', 'depth', 'feddecorr_images', 'catalogue'])
def test_a_table_fits_or_begins_with_what_matters_at_1280_pixels(tab, name):
    show(tab, f'papers/{name}')
    seen = tab.eval_on_selector_all('article table.dataframe', """es => es.map(e => {
        const right = e.closest('.cell_output').getBoundingClientRect().right + 1, cells = [...e.rows[0].cells];
        const matters = cells.filter(c => /^(verdict|ours|paper, .*)$/.test(c.innerText));
        return [e.getBoundingClientRect().right > right,
                matters.filter(c => c.getBoundingClientRect().right > right).map(c => c.innerText)] })""")
    assert len(seen) > 6
    assert sum(wide for wide, _ in seen) <= 1
    assert not [hidden for _, hidden in seen if hidden]

PORTRAIT = """() => [...document.querySelectorAll('svg.portrait')].map(s => {
    const out = s.getBoundingClientRect(), rect = e => e.getBoundingClientRect(),
        boxes = [...s.querySelectorAll('rect[rx="8"]')].map(rect),
        texts = [...s.querySelectorAll('text')].map(e => [e.textContent, rect(e)]),
        hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    return {wide: out.width, ink: getComputedStyle(s).color,
            accent: getComputedStyle(s.querySelector('.accent') || s).color,
            outside: texts.filter(([t, r]) => r.left < out.left - 1 || r.right > out.right + 1
                                              || r.bottom > out.bottom + 1).map(([t]) => t),
            on: texts.filter(([t, r], i) => t != 'server' && boxes.some(b => hit(r, b))
                                            || texts.some(([_, q], j) => j > i && hit(r, q))).map(([t]) => t)} })"""

@browsed
@pytest.mark.parametrize('width', [1280, 375])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('page, many', [('portrait', 2), ('methods/index', 35)])
def test_portraits_can_be_read(tab, width, scheme, page, many):
    tab.emulate_media(color_scheme=scheme)
    show(tab, page, width)
    let_fade(tab)
    lightness = lambda css: sum(map(float, re.findall(r'[\d.]+', css)[:3]))/765
    ground = lightness(tab.eval_on_selector('body', 'e => getComputedStyle(e).backgroundColor'))
    found = tab.evaluate(PORTRAIT)
    assert len(found) >= many
    for s in found:
        assert s['wide'] <= width and not s['outside'] and not s['on'], s
        assert abs(lightness(s['ink']) - ground) > .5 and abs(lightness(s['accent']) - ground) > .35, s
