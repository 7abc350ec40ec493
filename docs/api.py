"What the modules offer, read from their source without importing anything: names, signatures, docments."
import ast, io, re, tokenize
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
import yaml

COMMON = yaml.safe_load((Path(__file__).parent/'names.yml').read_text(encoding='utf-8'))
PLACES = COMMON.pop('in') # pattern of places -> what the words mean there

def place_of(name, place):
    "The first pattern of names.yml that fits a place, such as `papers.moon.weight`, and has this word; else None."
    return next((p for p, words in PLACES.items() if name in words and fnmatchcase(place, p)), None)

def meaning(name, place):
    "What names.yml says of a parameter: at this place, else all over."
    near = place_of(name, place)
    return PLACES[near][name] if near else COMMON.get(name, '')

@dataclass
class Entry:
    "One public name: how it is called, what it says of itself and returns, its parameters as (name, default, comment)."
    name: str
    call: str
    doc: str
    params: list = field(default_factory=list)
    line: int = 0
    returns: str = ''
    module: str = ''

def comments(source):
    "The comment at the end of each line, by line number, with lines below it that hold nothing but more of it."
    lines, notes, above, first = source.splitlines(), {}, None, 0
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type != tokenize.COMMENT: continue
        (n, column), text = t.start, t.string.lstrip('# ')
        if above == (n-1, column) and not lines[n-1][:column].strip(): notes[first] += f' {text}'
        else: notes[n], first = text, n
        above = n, column
    return notes

def of_function(f, notes, name=None):
    a = f.args
    args = a.posonlyargs + a.args
    defaults = (dict(zip(reversed(args), reversed(a.defaults)))
                | {k: v for k, v in zip(a.kwonlyargs, a.kw_defaults) if v is not None})
    own = [x for x in args + a.kwonlyargs if x.arg not in ('self', 'cls')]
    text = lambda x: ast.unparse(defaults[x]) if x in defaults else ''
    last = {x.lineno: x for x in own} # a comment is about the parameters of its line, behind `def` about the last one
    mine = lambda x: x.lineno < f.body[0].lineno and (last.get(x.lineno, x) is x or x in own and x.lineno > f.lineno)
    note = lambda x: notes.get(x.lineno, '').removeprefix(f'{x.arg}: ') if mine(x) else ''
    params = [(x.arg, text(x), note(x)) for x in own]
    calls = [f'{p}={d}' if d else p for p, d, _ in params]
    more = [(-len(a.kwonlyargs) or len(calls), '*', a.vararg), (len(calls) + 1, '**', a.kwarg)]
    for at, stars, x in more:
        if not x: continue
        calls.insert(at, stars + x.arg)
        if words := note(x): params.insert(at, (stars + x.arg, '', words))
    return Entry(name or f.name, f"{name or f.name}({', '.join(calls)})", ast.get_docstring(f) or '', params, f.lineno,
                 read_result(f, notes))

def read_result(f, notes):
    "What a function says it returns: the note behind its last bracket, else its annotation."
    a = f.args
    lines = {x.lineno for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if x}
    ends = range(f.lineno, f.body[0].lineno)
    note = next((notes[n] for n in reversed(ends) if n in notes and n not in lines), '')
    kind = ast.unparse(f.returns) if f.returns else ''
    return note if note and (not kind or kind in note) else ', '.join(filter(None, (f'`{kind}`' if kind else '', note)))

def default(value):
    "The default of a field: what `field(...)` says it is, else the value itself."
    if not value: return ''
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == 'field'): return ast.unparse(value)
    fields = {k.arg: ast.unparse(k.value) for k in value.keywords}
    return fields.get('default') or (f"{fields['default_factory']}()" if 'default_factory' in fields else '')

def of_class(c, notes):
    fields = [(n.target.id, default(n.value), notes.get(n.lineno, ''))
              for n in c.body if isinstance(n, ast.AnnAssign)]
    inits = [n for n in c.body if isinstance(n, ast.FunctionDef) and n.name == '__init__']
    whole = of_function(inits[0], notes, c.name) if inits and not fields else Entry(c.name, '', '', fields)
    whole.call = whole.call or f"{c.name}({', '.join(f'{n}={d}' if d else n for n, d, _ in fields)})"
    whole.doc, whole.line = ast.get_docstring(c) or whole.doc, c.lineno
    methods = [n for n in c.body if isinstance(n, ast.FunctionDef) and n.name[0] != '_' and ast.get_docstring(n)]
    return [whole] + [of_function(m, notes, f'{c.name}.{m.name}') for m in methods]

def entries(source, module=''):
    "The public names of a module in the order of `__all__`, methods after their class."
    tree, notes, by_name = ast.parse(source), comments(source), {}
    for n in tree.body:
        if isinstance(n, ast.ClassDef): by_name[n.name] = of_class(n, notes)
        elif isinstance(n, ast.FunctionDef):
            owner = next((a.annotation for a in n.args.args[:1]
                          if any(ast.unparse(d) == 'patch' for d in n.decorator_list)), None)
            if owner and n.name[0] != '_' and ast.get_docstring(n): # its class is of this module
                by_name.setdefault(owner.id, []).append(of_function(n, notes, f'{owner.id}.{n.name}'))
            elif not owner: by_name[n.name] = [of_function(n, notes)]
    names = next((ast.literal_eval(n.value) for n in tree.body
                  if isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == '__all__'), [])
    return [replace(e, module=module)
            for n in [*names, *(k for k in by_name if k not in names and k[0] != '_')] for e in by_name.get(n, [])
            if n in names or '.' in e.name]

cell = lambda text: text.replace('|', '\\|')
code = lambda text: f'`{cell(text)}`' if text else ''

def markdown(entries, source_url):
    "The reference section of a page."
    out = ['## Reference']
    for e in entries:
        source = f'<a class="nb-source" href="{source_url}#L{e.line}">source</a>'
        out += [f'### {e.name}', f'```python\n{e.call}\n```', f'{escape(e.doc)} {source}']
        params = [(n, d, note or meaning(n, f'{e.module}.{e.name}')) for n, d, note in e.params]
        if any(note for *_, note in params) or e.returns:
            rows = ([['parameter', 'default', 'meaning'], ['---']*3]
                    + [[code(n), code(d), cell(escape(note))] for n, d, note in params]
                    + [['*returns*', '', cell(escape(e.returns))]]*bool(e.returns))
            if not any(d for _, d, _ in params): rows = [[n, note] for n, _, note in rows]
            out.append('\n'.join('| ' + ' | '.join(r) + ' |' for r in rows))
    return '\n\n'.join(out)

def escape(text):
    "Docstrings and comments are plain text with code in backticks and mathematics between dollars."
    parts = re.split(r'(`[^`]*`|\$[^$\s](?:[^$]*[^$\s])?\$)', text)
    return ''.join(p if i % 2 else re.sub(r'([*_$<\[])', r'\\\1', p) for i, p in enumerate(parts))
