"Which module imports which, read from the source: `python docs/imports.py` prints a line a module."
import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent/'fedlit'

def modules(package):
    "Module -> file, for instance `engine.tape`; a package counts under its own name."
    parts = lambda f: f.relative_to(package).with_suffix('').parts
    files = {'.'.join(p for p in parts(f) if p != '__init__'): f for f in sorted(package.rglob('*.py'))}
    return {m: f for m, f in files.items() if m and m != '_modidx'}

def statements(tree):
    "Every import, also inside of functions."
    return (s for s in ast.walk(tree) if isinstance(s, (ast.Import, ast.ImportFrom)))

def imports(package=PACKAGE):
    "Module -> the modules of the same package that it imports. The package itself, a face, is left out."
    files, graph = modules(package), {}
    for name, file in files.items():
        here, graph[name] = [package.name, *name.split('.')], set()
        if file.name != '__init__.py': here.pop()
        for s in statements(ast.parse(file.read_text(encoding='utf-8'))):
            if isinstance(s, ast.Import): names = [a.name for a in s.names]
            else:
                base = here[:len(here) + 1 - s.level] if s.level else []
                base = '.'.join([*base, *([s.module] if s.module else [])])
                names = [f'{base}.{a.name}' if f'{base}.{a.name}'.removeprefix(f'{package.name}.') in files else base
                         for a in s.names]
            graph[name] |= {a.removeprefix(f'{package.name}.') for a in names} & files.keys() - {name}
    return graph

def reached(graph, start):
    "All modules that `start` needs, and they need, and so on."
    out, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - out
        out |= new
        todo += new
    return out

def circles(graph):
    "Sets of modules that need each other, each in alphabetical order."
    needs = {m: reached(graph, m) for m in graph}
    return sorted({tuple(sorted(o for o in needs[m] if m in needs[o])) for m in graph if m in needs[m]})

if __name__ == '__main__':
    for module, others in imports().items(): print(f"{module}: {', '.join(sorted(others))}")
