"""What can be seen without running anything: the order of reading, alternative texts, names that nobody documents,
promises without a test, dependencies without a reason, doors in the code.

`python docs/lint.py` prints every complaint and fails if there is one; `make lint` runs it."""
import ast, builtins, configparser, json, os, re, sys
from inspect import isgeneratorfunction
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import pages
from imports import circles, imports, modules, reached
from pages import ROOT

def text(path): return (ROOT/path).read_text(encoding='utf-8')

# -- pages

def every_notebook_stands_in_the_sidebar():
    files = (p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
    there = {p.relative_to(ROOT/'nbs').as_posix() for p in files}
    names = [p for _, p in pages.sidebar()]
    for p in sorted(there - set(names)): yield f'nbs/{p} is missing in nbs/sidebar.yml'
    for p in sorted({p for p in names if p.endswith('.ipynb')} - there):
        yield f'nbs/sidebar.yml names nbs/{p}, which is not there'
    for p in sorted({p for p in names if names.count(p) > 1}): yield f'nbs/sidebar.yml names {p} more than once'
    for p in sorted({p[:-4] for p in names if p.endswith('.qmd')} ^ set(pages.GENERATED)):
        yield f'{p} must stand both in nbs/sidebar.yml and in GENERATED of docs/pages.py'

def numbers_rise_within_a_section():
    number = lambda p: re.match(r'(\d+)', os.path.basename(p))
    for caption in dict(pages.sidebar()):
        numbers = [int(m[1]) for c, p in pages.sidebar() if c == caption and (m := number(p))]
        if numbers != sorted(numbers): yield f'nbs/sidebar.yml: {caption!r} is not in the order of its numbers'

def every_figure_has_an_alternative_text():
    for p in pages.notebooks():
        for alt, *_ in pages.figures(p):
            if len(alt.split()) < 6 or not re.match('[A-Z0-9]', alt):
                yield f'{p}: a cell that draws a figure begins with "#| fig-alt: ", and a sentence on what it shows'

LESSON, EXPORTED = 96, 120 # characters, of a cell that a reader sees run and of one that becomes part of the package
LONGEST = 25 # lines of code in an exported cell, which is read in one breath

def cells_of_code():
    "(page, index, source, is it exported?) of every cell."
    for p in pages.notebooks():
        for k, c in enumerate(pages.read(p)['cells']):
            source = ''.join(c['source'])
            if c['cell_type'] == 'code': yield p, k, source, bool(re.search(r'^#\|\s*exports?\b', source, re.M))

def no_line_of_a_notebook_is_too_wide():
    for p, k, source, export in cells_of_code():
        limit = EXPORTED if export else LESSON
        for line in source.splitlines():
            if len(line) > limit:
                yield f'{p}[{k}]: {len(line)} characters in a line, but at most {limit}: {line.strip()[:60]}'

def is_data(source):
    "Does a cell only import, bind names to literals, or list the arguments of a call? Then it is a table, to look up."
    def literal(v):
        try: ast.literal_eval(v)
        except ValueError: return False
        return True
    def plain(n):
        if isinstance(n, ast.If): return ast.unparse(n.test) == 'TYPE_CHECKING'
        return isinstance(n, (ast.Import, ast.ImportFrom)) or isinstance(n, ast.Assign) and literal(n.value)
    body = ast.parse(source).body
    signature = len(body) == 1 and isinstance(body[0], ast.FunctionDef) and len(body[0].body) <= 2
    return signature or all(map(plain, body))

def lines_too_many(source):
    """How many lines of code an exported cell has, where these are too many; 0 where they are not. A row of the table
    that `Method` is, a hook that does nothing, is none."""
    rest = re.sub(r'^    def .*: return .*', '', source, flags=re.M) if 'class Method(' in source else source
    n = sum(bool(line.strip()) and not line.startswith('#|') for line in rest.splitlines())
    return n if n > LONGEST and not is_data(source) else 0

def no_exported_cell_is_too_long():
    for p, k, source, export in cells_of_code():
        if export and (n := lines_too_many(source)):
            yield f'{p}[{k}]: {n} lines of code, but at most {LONGEST}; tell it in steps'

HEAVIEST = 300_000 # bytes of a page: it is loaded whole, and every version of it stays in the history

def no_page_is_too_heavy():
    for p in pages.notebooks():
        if (n := (ROOT/'nbs'/p).stat().st_size) > HEAVIEST:
            yield f'nbs/{p}: {n:,} bytes, but at most {HEAVIEST:,}; smaller figures or two pages'

READ = {'default_exp', 'echo', 'eval', 'exec_doc', 'export', 'exporti', 'exports', 'filter_stream', 'hide', 'hide_line',
        'include', 'notest', 'output', 'skip', 'slow'} # what nbdev, or its test, does something at

def no_line_of_a_text_is_a_directive():
    "nbdev takes the first word of every line behind `#|` for one, those of a folded alternative text too."
    for p in pages.notebooks():
        for k, c in enumerate(pages.read(p)['cells']):
            words = re.findall(r'^#\| {2,}(\S+)', ''.join(c['source']), re.M) if c['cell_type'] == 'code' else ()
            for w in READ.intersection(words): yield f'{p}[{k}]: nbdev takes {w!r} for a directive; break elsewhere'

def at_once(node):
    "The nodes that a cell evaluates when it is run: not what its functions will."
    later = [*node.body] if isinstance(node, ast.FunctionDef) else [node.body] if isinstance(node, ast.Lambda) else []
    yield node
    for n in ast.iter_child_nodes(node):
        if n not in later: yield from at_once(n)

def bindings(tree):
    "The names that a cell binds, its parameters and those of its comprehensions among them."
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load): yield n.id
        elif isinstance(n, (ast.FunctionDef, ast.ClassDef)): yield n.name
        elif isinstance(n, ast.arg): yield n.arg
        elif isinstance(n, ast.ExceptHandler) and n.name: yield n.name
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names: yield (a.asname or a.name).split('.')[0]

def unbound(sources):
    """Quarto's preparation runs those cells of a page that import something or are exported, and no others:
    (cell, name) of what such a cell needs and none of them binds."""
    names = {*dir(builtins), 'get_ipython'}
    for k, source in enumerate(sources):
        if re.search(r'^#\|\s*eval:\s*false', source, re.M): continue
        tree = ast.parse(re.sub(r'^[%!].*', 'pass', source, flags=re.M))
        export = re.search(r'^#\|\s*(exports?|exporti|exec_doc)\b', source, re.M)
        if not export and not any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree)): continue
        names |= {*bindings(tree)}
        for n in at_once(tree):
            if isinstance(n, ast.Name) and n.id not in names: yield k, n.id

def a_cell_that_imports_needs_no_cell_that_does_not():
    for p in pages.notebooks():
        if not pages.module_of(nb := pages.read(p)): continue # without exported cells none is run
        for k, name in unbound([''.join(c['source']) if c['cell_type'] == 'code' else '' for c in nb['cells']]):
            yield f'{p}[{k}]: Quarto runs this cell, since it imports, but not the cell that binds {name}'

def every_public_name_is_documented():
    for p in pages.notebooks():
        if (module := pages.module_of(pages.read(p))) and module != 'methods.__init__':
            names, source = {e.name for e in pages.entries(p)}, text(pages.module_file(module))
            for n in re.findall(r'^(?:def|class) ([A-Za-z]\w*)', source, re.M):
                if f"'{n}'" in source.split(']')[0] and n not in names: yield f'{p}: {n} is public and not documented'

def every_paper_has_an_author_a_title_and_a_year():
    papers, source = pages.bibliography(), text('nbs/references.bib')
    if len(papers) != (n := source.count('\n@') + source.startswith('@')):
        yield f'nbs/references.bib: {len(papers)} of {n} entries can be read'
    for key, (_, fields) in papers.items():
        for lack in {'author', 'title', 'year'} - fields.keys(): yield f'nbs/references.bib: {key} has no {lack}'

def every_citation_has_a_paper():
    papers = pages.bibliography()
    for p in pages.notebooks():
        for k, c in enumerate(pages.read(p)['cells']):
            cites = re.findall(r'\[@[^\]]+\]', ''.join(c['source'])) if c['cell_type'] == 'markdown' else ()
            for key in {*re.findall(r'@([\w:-]+)', ' '.join(cites))} - papers.keys():
                yield f'{p}[{k}]: nbs/references.bib has no {key}'

# -- the layout: the core is read in the order of its numbers, and imported in the same order

def core():
    "Module -> number of its page, of the pages that are read in order."
    numbers = {}
    for _, p in pages.sidebar():
        if (m := re.match(r'(\d+)_', p)) and (module := pages.module_of(pages.read(p))):
            numbers[module] = int(m[1])
    return dict(sorted(numbers.items(), key=lambda page: page[1]))

def arrows_run_down():
    "A page needs lower numbers only, also by way of the engine; none of the core needs papers, and the ground nothing."
    number, graph = core(), imports()
    for module, n in number.items():
        for other in sorted(reached(graph, module)):
            if number.get(other, -1) >= n:
                yield f'fedlit.{module}, page {n}, needs fedlit.{other}, page {number[other]}'
            if other.startswith(('papers.', 'scale.')): yield f'fedlit.{module} needs fedlit.{other}'
    for module, others in graph.items():
        if module.startswith('ground.') and (up := [o for o in others if not o.startswith('ground')]):
            yield f'fedlit.{module} needs fedlit.{up[0]}, but the ground stands on itself'

def no_circle_of_imports():
    for circle in circles(imports()): yield f"these modules import each other: {', '.join(circle)}"

def no_private_name_crosses_a_module():
    for module, file in modules(ROOT/'fedlit').items():
        for n in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            if not isinstance(n, ast.ImportFrom) or not (n.level or (n.module or '').startswith('fedlit')): continue
            for a in n.names:
                if a.name.startswith('_') and a.name != '__version__':
                    yield f'fedlit.{module} imports the private {a.name} of {n.module}'

DOORS = 'methods', 'flower', '' # modules that collect the names of others, or shorten theirs

def lessons():
    "Place -> source: the cells of all notebooks, and the programs beside the package."
    for p in pages.notebooks():
        for k, c in enumerate(pages.read(p)['cells']):
            source = re.sub(r'^(\s*)[%!].*', r'\1pass', ''.join(c['source']), flags=re.M)
            if c['cell_type'] == 'code': yield f'{p}[{k}]', source
    for folder in ('tests', 'docs', 'bench', 'examples'):
        for f in (ROOT/folder).rglob('*.py'):
            if '.envs' not in f.parts: yield f.relative_to(ROOT).as_posix(), f.read_text(encoding='utf-8')

def every_name_is_imported_from_its_home():
    "The module that makes it, which is the only one that lists it in `__all__`."
    foreign = {module: {a.asname or a.name for n in ast.walk(ast.parse(file.read_text(encoding='utf-8')))
                        if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
               for module, file in modules(ROOT/'fedlit').items() if module not in DOORS}
    foreign['papers.catalogue'] -= {'CATALOGUE'} # which is complete only there
    for place, source in lessons():
        if re.search('^_all_ =', source, re.M): yield f'{place} lists names of others'
        for n in ast.walk(ast.parse(source)):
            if not isinstance(n, ast.ImportFrom) or not (n.module or '').startswith('fedlit.'): continue
            for a in n.names:
                if a.name in foreign.get(n.module[7:], ()): yield f'{place}: {a.name} is not of {n.module}'

MANY = 8 # parameters; what users call may have more, and so may a hook, which asks for what it needs by name
FRONT = 'federate', 'federating'

def no_function_has_too_many_parameters():
    hooks = re.findall(r'(\w+)=Hook\(', text('fedlit/vocabulary.py'))
    for module, file in modules(ROOT/'fedlit').items():
        for n in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            if not isinstance(n, ast.FunctionDef) or n.name in (*FRONT, *hooks): continue
            names = [a.arg for a in n.args.posonlyargs + n.args.args + n.args.kwonlyargs]
            many = len(set(names) - {'self', 'cls'})
            if many > MANY: yield f'fedlit.{module}: {n.name} has {many} parameters, but at most {MANY}'

def patches(tree):
    "(line, class, name, is it right?) of what a module adds to a class: right if the class is its own and lacks it."
    own = {c.name: {n.name for n in c.body if isinstance(n, ast.FunctionDef)}
           for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    for n in ast.walk(tree):
        if any(full_name(getattr(d, 'func', d)) == 'patch' for d in getattr(n, 'decorator_list', ())):
            cls, name = full_name(n.args.args[0].annotation), n.name
        elif isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute):
            cls, name = full_name(n.targets[0].value), n.targets[0].attr
        else: continue
        yield n.lineno, cls, name, cls in own and name not in own[cls]
        if cls in own: own[cls].add(name)

def a_class_is_changed_by_its_own_page_only():
    "`@patch` adds a method on the page that defines the class, and replaces none."
    trees = {m: ast.parse(f.read_text(encoding='utf-8')) for m, f in modules(ROOT/'fedlit').items()}
    classes = {n.name for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    for module, tree in trees.items():
        for line, cls, name, right in patches(tree):
            if cls in classes and not right:
                yield f'fedlit.{module}:{line}: {cls}.{name} is added elsewhere, or replaced; write a subclass'

def every_module_comes_from_a_notebook():
    "Except `fedlit.flower`, a short name."
    for module, file in modules(ROOT/'fedlit').items():
        source = file.read_text(encoding='utf-8')
        if source and module != 'flower' and '# AUTOGENERATED! DO NOT EDIT!' not in source:
            yield f'fedlit.{module}: no notebook makes this file'

# -- promises and reasons

def every_promise_names_a_test_that_exists():
    cells = json.loads(text('nbs/guides/rely.ipynb'))['cells']
    page = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    here = 'https://github.com/fedlit/fedlit/blob/main/'
    tests = re.findall(rf'\[([\w ]+)\]\({here}(tests/[\w/]+\.py|docs/lint\.py)\)', page)
    if len(tests) < 30: yield f'nbs/guides/rely.ipynb: only {len(tests)} tests are named'
    for title, file in tests:
        name = 'test_'*file.startswith('tests') + title.replace(' ', '_')
        there = (ROOT/file).exists() and f'def {name}(' in text(file)
        if not there: yield f'nbs/guides/rely.ipynb: {file} has no {name}'
    for row in page.splitlines():
        if row.startswith('| ') and not row.startswith('| promise') and here not in row:
            yield f'nbs/guides/rely.ipynb: a promise without a test: {row}'
        if row.startswith('|') and row.count('|') != 3: yield f'nbs/guides/rely.ipynb: not two columns: {row}'

def every_dependency_is_justified():
    config = configparser.ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    rows = [row for row in text('docs/dependencies.md').splitlines() if row.startswith('|')]
    lists = ('requirements', 'dev_requirements', 'docs_requirements')
    for need in ' '.join(config['DEFAULT'][key] for key in lists).split():
        name, bounds = re.match(r'([\w-]+)(.*)', need).groups()
        row = next((row for row in rows if re.search(rf'\b{name}\b', row.split('|')[1])), None)
        if row is None:
            yield f'docs/dependencies.md: {need} has no row'
            continue
        for bound in filter(None, bounds.split(',')):
            if re.sub('(>=|==|<)', r'\1 ', bound) not in row:
                yield f'docs/dependencies.md: {need} is bounded otherwise: {row}'

# -- doors: calls that run what a file says, reach a shell, or trust a name or an address

FOLDERS = 'fedlit', 'bench', 'docs', 'examples'
SOURCES = [*(f for d in FOLDERS for f in sorted((ROOT/d).rglob('*.py'))), ROOT/'setup.py']
MODULES = {'pickle', 'cPickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib', 'telnetlib', 'ftplib'}
CALLS = {'eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'yaml.load', 'yaml.unsafe_load',
         'tempfile.mktemp', 'pd.read_pickle', 'pandas.read_pickle', 'torch.hub.load', 'np.frompyfunc',
         'shutil.unpack_archive', 'torch.save', 'urllib.request.urlretrieve',
         'urlretrieve', 'ssl._create_unverified_context'}
UNPACKING = {'extractall', 'extract'}
WRITING = {'Pickler', 'PickleBuffer'} # of pickle; what writes runs nothing
PLAIN = 'http:/' + r'/(?!127\.0\.0\.1|localhost|www\.w3\.org)' # in two parts, so that it does not find itself
# the one module that downloads and unpacks, see tests/test_files.py; a zip file knows no filter
WHERE = {'fedlit/ground/files.py': {'imports urlopen', 'file.extract without a filter'},
         'fedlit/ground/tape.py': {'exec'}}    # runs what it has itself written from recorded tensor operations

def full_name(f): return f'{full_name(f.value)}.{f.attr}' if isinstance(f, ast.Attribute) else getattr(f, 'id', '')
def value_of(call, name):
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)

def doors(source):
    "What a text of Python opens: (line, what). tests/test_security.py shows that it finds what it looks for."
    out, archives = [], re.search(r'\b(tarfile|zipfile)\b', source)
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in n.names]
            if isinstance(n, ast.ImportFrom):
                if n.module == 'pickle' and WRITING.issuperset(names): continue
                names.append(n.module or '')
            out += [(n.lineno, f'imports {m}') for m in names if m.split('.')[0] in MODULES]
            out += [(n.lineno, f'imports {m}') for m in names if m in ('urlopen', 'urlretrieve', 'requests')]
        if isinstance(n, ast.Call):
            f = full_name(n.func)
            if f in CALLS or f.endswith('.read_pickle'): out.append((n.lineno, f))
            if f == 'torch.load' and value_of(n, 'weights_only') is not True:
                out.append((n.lineno, 'torch.load without weights_only=True'))
            if value_of(n, 'allow_pickle'): out.append((n.lineno, 'allow_pickle=True'))
            if value_of(n, 'shell'): out.append((n.lineno, 'shell=True'))
            if value_of(n, 'verify') is False: out.append((n.lineno, 'verify=False'))
            if f.rpartition('.')[2] in UNPACKING and archives and value_of(n, 'filter') is None:
                out.append((n.lineno, f'{f} without a filter'))
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            if re.search(PLAIN, n.value): out.append((n.lineno, 'an http address'))
    return out

def a_module_opens_no_door():
    for file in SOURCES:
        if '.envs' in file.parts: continue # environments that the benchmark made for others
        name = file.relative_to(ROOT).as_posix()
        for line, what in doors(text(name)):
            if what not in WHERE.get(name, ()): yield f'{name}:{line}: {what}'

def every_file_is_written_by_one_module():
    "`open` for writing, `write_text`, `savefig` and others to a path: only fedlit.ground.files does it."
    writes = re.compile(r"\bopen\([^)]*['\"][wxa]b?\+?['\"]|\.write_(text|bytes)\(|np\.savez?\(\w*path|"
                        r"save_file\(|torch\.save\(|\.savefig\((?!whole|drawn|buffer)|"
                        r"\.to_(csv|json|pickle|parquet)\([^)]*(path|out/)|shutil\.(copy|move)")
    for f in (ROOT/'fedlit').rglob('*.py'):
        name = f.relative_to(ROOT).as_posix()
        if f.name == 'costs.py': continue # to /proc
        calls = {m[0] for m in writes.finditer(text(name))} - {'shutil.copy'*(f.name == 'flower.py')} # to a new folder
        if calls and name != 'fedlit/ground/files.py':
            yield f'{name} writes a file by itself; fedlit.ground.files does it'

# every generator above that asks for nothing, in the order of this file
CHECKS = [f for f in [*globals().values()]
          if isgeneratorfunction(f) and not f.__code__.co_argcount and f not in (lessons, cells_of_code)]

if __name__ == '__main__':
    first, *others = CHECKS
    faults = list(first()) or [c for check in others for c in check()] # a page that is not there cannot be read
    print('\n'.join(faults) or f'lint: {len(CHECKS)} checks of pages and sources, no complaint')
    sys.exit(bool(faults))
