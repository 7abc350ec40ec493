"""What a reader copies: code between the paragraphs of pages and of README.md is run in an empty folder, commands are
read by the parser and run for one round, and a cell needs no name that only a hidden cell defines."""
import ast, builtins, contextlib, importlib, importlib.util, io, os, re, shlex, shutil, symtable, sys
from functools import cache
from pathlib import Path
from textwrap import dedent
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
from convert import directives
import pages
from fedlit.cli import main, parser, setting, _names, _expand_grid

def fences(text):
    "(language, code) of the blocks between three backticks."
    return re.findall(r'^```(\w*)[^\n]*\n(.*?)^```', text, re.S | re.M)

def texts():
    "Name -> Markdown of every page; README.md is the index, with the outputs of its cells."
    said = lambda p: '\n\n'.join(''.join(c['source']) for c in pages.read(p)['cells'] if c['cell_type'] == 'markdown')
    return {'README': (ROOT/'README.md').read_text(encoding='utf-8'), **{p: said(p) for p in pages.notebooks()}}

TEXTS = texts()
BLOCKS = [(p, n, *f) for p, text in TEXTS.items() for n, f in enumerate(fences(text))]

def test_every_block_says_its_language():
    "And none is made by indentation, which says none and has no button to copy it."
    known = 'python', 'bash', 'toml', 'text'
    assert not [(p, code) for p, _, language, code in BLOCKS if language not in known]
    outside = {p: re.sub(r'^```.*?^```', '', t, flags=re.S | re.M) for p, t in TEXTS.items() if p != 'README'}
    assert not {p: m[0] for p, t in outside.items() if (m := re.search(r'(?:\A|\n\n) {4}(?![-*\d])\S.*', t))}

def test_no_line_of_a_block_is_too_wide():
    assert not [(p, line) for p, _, language, code in BLOCKS if language != 'text' and p != 'README'
                for line in code.splitlines() if len(line) > 96]

# -- Python

WITHOUT = { # beginning of a line -> why the block is not run
    'entry(': 'a cell of a page of the catalogue, shown to be read',
    'client = client_app(data=my_images': "a reader's own names"}
INSTEAD = { # what is downloaded, and what stands for it
    "weights='DEFAULT'": 'weights=None', 'pretrained=True': 'pretrained=False',
    'load("cifar10", download=True)': 'load("digits")', '"mobilenetv2"': '"mlp"', 'rounds=100': 'rounds=1',
    'local=Local(epochs=5)': 'local=Local(epochs=1)', 'seeds=5': 'seeds=2', '(100, 101, 102)': '(100, 101)'}
RECIPES = [directives(''.join(c['source'])) for c in pages.read('guides/recipes.ipynb')['cells']
           if c['cell_type'] == 'code'] # each is a program; the first hidden one that runs writes a folder of images
PYTHON = [pytest.param(code, id=f'{p}-{n}') for p, n, language, code in
          BLOCKS + [('recipes', n, 'python', code) for n, (said, code) in enumerate(RECIPES) if 'hide' not in said]
          if language == 'python' and not any(line.startswith(w) for w in WITHOUT for line in code.splitlines())]

def test_each_exception_is_needed():
    told = '\n'.join(p.values[0] for p in PYTHON) + '\n'.join(code for *_, code in BLOCKS)
    assert not [w for w in (*WITHOUT, *INSTEAD) if w not in told]

def alone(code):
    "Runs `code` as a program of its own would; a package that is an extra may be missing."
    needs = {(getattr(n, 'module', None) or n.names[0].name).split('.')[0] for n in ast.walk(ast.parse(code))
             if isinstance(n, (ast.Import, ast.ImportFrom))}
    if missing := [m for m in sorted(needs) if not importlib.util.find_spec(m)]: pytest.skip(f'no {missing}')
    names = {'__name__': '__main__'}
    exec(compile(code, 'snippet', 'exec'), names)
    return names

def own_files():
    "What a recipe reads of its reader's: `my_images` and `wards.csv`, in a folder that one then stands in."
    return alone(next(code for said, code in RECIPES if 'hide' in said and 'eval' not in said))

@pytest.fixture
def empty(tmp_path, monkeypatch):
    "An empty folder to stand in, and torch's switches as they were."
    import torch
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    yield tmp_path
    torch.use_deterministic_algorithms(False)

@pytest.mark.parametrize('code', PYTHON)
def test_a_block_of_python_runs_by_itself(code, empty):
    for old, new in INSTEAD.items(): code = code.replace(old, new)
    if 'executor="torchrun"' in code: # one rank, in this process
        code = code.replace('executor="torchrun"', 'rounds=1')
    made = any(w in code for w in ('my_images', 'wards.csv')) and own_files()
    alone(code)
    if made: made['folder'].cleanup()

def test_every_recipe_is_a_program_that_is_run():
    shown = [code for said, code in RECIPES if 'hide' not in said]
    assert sum('recipes' in p.id for p in PYTHON) == len(shown) >= 5
    assert all(ast.unparse(ast.parse(code).body[-1]).startswith('print(') for code in shown) # in a file too

# -- commands

def commands(code):
    "The commands of a block, with lines that go on joined and comments dropped."
    for line in re.sub(r'\\\n *', '', code).splitlines():
        for part in re.split(r' && ', line):
            if words := shlex.split(part, comments=True): yield words

def fedlit_words(words):
    "What the command line of fedlit is given, or None; torchrun starts it as a module."
    if words[0] == 'fedlit': return words[1:]
    if words[0] == 'torchrun' and '-m' in words and words[words.index('-m') + 1] == 'fedlit':
        return words[words.index('-m') + 2:]

def inline(text):
    "Commands in the middle of a sentence that can be typed as they stand: no `...`, no word in capitals but a method."
    for code in re.findall(r'(?<!`)`((?:fedlit|torchrun) [^`\n]*)`', text):
        if '...' not in code and not re.search(r'\b[A-Z]{4,}\b(?!\()|[{}]| [A-Z] ', code): yield shlex.split(code)

BLOCKED = {(p, tuple(asked)) for p, _, language, code in BLOCKS if language == 'bash' for words in commands(code)
           if (asked := fedlit_words(words)) is not None}
TYPED = BLOCKED | {(p, tuple(asked)) for p, text in TEXTS.items() for words in inline(text)
                   if (asked := fedlit_words(words)) is not None}
ONLY_NAMED = {('run', '--save'), ('run', '--json'), ('interactions',), ('check',), ('report-run',)} # as words of a text

def test_every_command_of_fedlit_can_be_parsed():
    assert len(TYPED) > 30
    wrong = []
    for p, asked in sorted(TYPED):
        if asked in ONLY_NAMED: continue
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
                parser().parse_args(asked)
        except SystemExit as e:
            if e.code: wrong.append((p, asked, said.getvalue().splitlines()[-1]))
    assert not wrong

def test_every_command_of_fedlit_asks_for_what_there_is():
    "Its methods, the hyperparameters of its grid, and options that go together; no data are read."
    wrong, theirs = [], {'--from', 'pictures/', 'Agree() + FedDecorr()'} # what a reader has or wrote
    for p, asked in sorted(TYPED):
        if asked in ONLY_NAMED or asked[0] not in ('run', 'compare', 'interactions') or theirs & {*asked}: continue
        a = parser().parse_args(asked)
        try:
            methods = _names(a, *(a.methods if 'methods' in a else [a.method or 'FedAvg()']))
            _expand_grid(methods, getattr(a, 'grid', []))
            setting(a)
        except ValueError as e: wrong.append((p, shlex.join(asked), str(e)))
    assert not wrong

def test_every_target_of_make_exists():
    made = {m[1] for text in TEXTS.values() for m in re.finditer(r'(?:^|`)make ([a-z-]+)', text, re.M)}
    there = set(re.findall(r'^([\w-]+):', (ROOT/'Makefile').read_text(encoding='utf-8'), re.M))
    assert {'bench', 'reproduce', 'test', 'test-slow'} <= made <= there

def test_every_script_that_a_page_names_exists():
    named = {m[0] for text in TEXTS.values() for m in re.finditer(r'(?<=python )[\w/]+\.py\b', text)}
    assert named and not [f for f in named if not (ROOT/f).exists()]

SHORTER = dict(run=['--rounds', '1', '--quiet'], compare=['--rounds', '1', '--quiet', '--seeds', '1'],
               interactions=['--rounds', '1', '--epochs', '1', '--quiet', '--seeds', '2'])
NOT_RUN = ('--download', '--scale paper', '--scale short', 'reproduce') # they need the network, hours, minutes
MINE = """from fedlit.method import Method

class Ridge(Method):
    "Pull the parameters towards zero."
    mu: float = .01
    def loss(self, params): return self.mu*sum(v.square().sum() for v in params.values())
"""
def is_run(words): return words[0] == 'fedlit' and not any(w in ' '.join(words) for w in NOT_RUN)

RUN = {p: [words[1:] for here, _, language, code in BLOCKS if here == p and language == 'bash'
           for words in commands(code) if is_run(words)] for p in TEXTS}

@pytest.mark.slow
@pytest.mark.parametrize('page', [p for p, asked in RUN.items() if asked])
def test_commands_of_a_page_run_in_an_empty_folder(page, empty, capsys):
    made = own_files()
    shutil.copytree('my_images', empty/'pictures')
    shutil.copy('wards.csv', empty)
    os.chdir(empty)
    made['folder'].cleanup()
    Path('mine.py').write_text(MINE, encoding='utf-8')
    for asked in RUN[page]: main([*asked, *SHORTER.get(asked[0], [])])
    assert capsys.readouterr().out

@pytest.mark.slow
def test_the_main_job_runs_in_an_empty_folder(empty, capsys):
    main(['reproduce', '--list'])
    assert 'feddecorr/table1' in capsys.readouterr().out
    main(['reproduce', '--seeds', '1', '--processes', '1', '--quiet'])
    assert 'holds' in capsys.readouterr().out and list((empty/'reproduced').rglob('*.png'))

# -- cells

def code(cell):
    "A cell's directives and its Python, magics and shell lines left out."
    found, source = directives(''.join(cell['source']))
    return found, re.sub(r'^(\s*)[%!].*$', r'\1pass', source, flags=re.M)

def names(source):
    "What a cell needs at once, what its functions need when they are called, and what it defines."
    top, now, later, defined = symtable.symtable(source, 'cell', 'exec'), set(), set(), set()
    for s in top.get_symbols():
        if s.is_referenced(): now.add(s.get_name())
        if s.is_assigned() or s.is_imported() or s.is_namespace(): defined.add(s.get_name())
    def walk(table):
        for t in table.get_children():
            for s in t.get_symbols():
                if s.is_global() and not s.is_local() and s.is_referenced(): later.add(s.get_name())
                if s.is_global() and s.is_assigned(): defined.add(s.get_name())
            walk(t)
    walk(top)
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.ImportFrom) and n.names[0].name == '*':
            module = importlib.import_module(n.module)
            defined |= set(getattr(module, '__all__', [k for k in vars(module) if k[0] != '_']))
    return now, later, defined

def hidden(found): return found.keys() & {'hide', 'default_exp', 'export', 'exporti'} or found.get('include') == 'false'

def lacking(cells):
    "(cell, names) that shown cells need and none of them defines: at once before it, in a function anywhere."
    shown = [(k, *names(source)) for k, c in enumerate(cells) if c['cell_type'] == 'code'
             for found, source in [code(c)] if not hidden(found) and found.get('echo') != 'false']
    known = {*dir(builtins), '__name__', '__file__', '__class__', 'display'}
    every = {n for *_, defined in shown for n in defined}
    for k, now, later, defined in shown:
        known |= defined
        if lack := now - known | later - known - every: yield k, sorted(lack)

def test_a_name_that_only_a_hidden_cell_defines_is_found():
    cell = lambda s: dict(cell_type='code', source=s)
    cells = [cell(s) for s in ('#| hide\nx = 1', 'y = x', 'def f(): return z', 'z = 1')]
    assert list(lacking(cells)) == [(1, ['x'])]
    assert list(lacking([cell('def top(v): return [v for v in v]'), cell('import a.b as c\nc.d')])) == []

@pytest.mark.parametrize('page', pages.notebooks())
def test_a_cell_needs_no_name_that_is_hidden(page):
    "So a reader who copies the cells of a page, imports first, has what they need."
    assert not list(lacking(pages.read(page)['cells']))

@cache
def exported():
    "Every name that a module of fedlit exports."
    sources = (f.read_text(encoding='utf-8') for f in (ROOT/'fedlit').rglob('*.py'))
    lists = (re.search(r'^__all__ = (\[.*?\])', source, re.S | re.M) for source in sources)
    return {name for found in lists if found for name in ast.literal_eval(found[1])}

@pytest.mark.parametrize('page', [p for p, text in TEXTS.items() if re.search('^ +```python', text, re.M)])
def test_an_answer_names_what_its_page_or_fedlit_has(page):
    "Code inside of a list is not run, so it outlived names that had changed."
    cells = [''.join(c['source']) for c in pages.read(page)['cells'] if c['cell_type'] == 'code']
    known = {*dir(builtins), 'torch', 'F', *exported(), *re.findall(r'\w+', '\n'.join(cells))}
    for block in re.findall(r'^ +```python\n(.*?)^ +```', TEXTS[page], re.S | re.M):
        now, later, defined = names(dedent(block))
        known |= defined
        assert not sorted((now | later) - known), block

def test_a_program_and_the_command_beside_it_are_one_setting():
    from types import SimpleNamespace
    from fedlit.local import Local
    from fedlit.methods import FedDecorr, MOON
    text = (ROOT/'README.md').read_text(encoding='utf-8').partition('## MOON + FedDecorr on CIFAR-10')[2]
    program, command = (re.search(f'```{kind}\n(.*?)```', text, re.S)[1] for kind in ('python', 'bash'))
    said = {}
    def note(name): return lambda *args, **kw: said.update({name: (args, kw)}) or SimpleNamespace(y_train=0, plot=int)
    made = {name: note(name) for name in ('load', 'dirichlet', 'build', 'federate')}
    exec('\n'.join(line for line in program.splitlines() if not line.startswith('from ')),
         dict(made, Local=Local, MOON=MOON, FedDecorr=FedDecorr))
    a = parser().parse_args(shlex.split(command.replace('\\\n', ' '))[1:])
    [method], asked = _names(a, a.method), setting(a)
    (_, _, _, theirs), kw = said['federate']
    assert (asked.task, asked.model) == (said['load'][0][0], said['build'][0][0])
    assert dict(asked.options) == dict(projector=said['build'][1]['projector'])
    assert method == theirs and (asked.rounds, asked.local) == (kw['rounds'], kw['local'])
    assert a.checkpoint == kw['checkpoint'] and a.download == said['load'][1]['download']
    assert asked.partition == f"dirichlet(alpha={said['dirichlet'][1]['alpha']})"
    assert asked.clients == said['dirichlet'][1]['clients']
