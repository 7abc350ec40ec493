"No doors: the exported package, the benchmarks and the scripts call nothing that runs what a file says, reaches a shell, or trusts a name or an address."
import ast, re
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(f for folder in ('fedlit', 'bench', 'docs', 'examples') for f in (ROOT/folder).rglob('*.py') if '.envs' not in f.parts) + [ROOT/'setup.py'] # .envs: the peers' environments
MODULES = {'pickle', 'cPickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib', 'telnetlib', 'ftplib'}
CALLS = {'eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'yaml.load', 'yaml.unsafe_load', 'tempfile.mktemp', 'pd.read_pickle', 'pandas.read_pickle', 'torch.hub.load', 'np.frompyfunc',
         'shutil.unpack_archive', 'urllib.request.urlretrieve', 'urlretrieve', 'torch.save', 'ssl._create_unverified_context'}
UNPACKING = {'extractall', 'extract'}
WHERE = {'fedlit/files.py': {'imports urlopen'},  # the one module that downloads, see tests/test_files.py
         'fedlit/tape.py': {'exec'}}              # runs the text that it has itself written from recorded tensor operations, in which strings stand as their repr

def dotted(f): return f'{dotted(f.value)}.{f.attr}' if isinstance(f, ast.Attribute) else getattr(f, 'id', '')
def given(call, name): return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)

def doors(source):
    "What a text of Python opens: (line, what)."
    out = []
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module or '', *(a.name for a in n.names)]
            out += [(n.lineno, f'imports {m}') for m in names if m.split('.')[0] in MODULES]
            out += [(n.lineno, f'imports {m}') for m in names if m in ('urlopen', 'urlretrieve', 'requests')]
        if isinstance(n, ast.Call):
            f = dotted(n.func)
            if f in CALLS or f.endswith('.read_pickle'): out.append((n.lineno, f))
            if f == 'torch.load' and given(n, 'weights_only') is not True: out.append((n.lineno, 'torch.load without weights_only=True'))
            if given(n, 'allow_pickle'): out.append((n.lineno, 'allow_pickle=True'))
            if given(n, 'shell'): out.append((n.lineno, 'shell=True'))
            if given(n, 'verify') is False: out.append((n.lineno, 'verify=False'))
            if f.rpartition('.')[2] in UNPACKING and re.search(r'\b(tarfile|zipfile)\b', source) and given(n, 'filter') is None: out.append((n.lineno, f'{f} without a filter'))
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            if re.search(r'http://(?!127\.0\.0\.1|localhost|www\.w3\.org)', n.value): out.append((n.lineno, 'an http address'))
    return out

@pytest.mark.parametrize('file', SOURCES, ids=[str(f.relative_to(ROOT)) for f in SOURCES])
def test_a_module_opens_no_door(file):
    allowed = WHERE.get(file.relative_to(ROOT).as_posix(), ())
    assert not [d for d in doors(file.read_text(encoding='utf-8')) if d[1] not in allowed]

@pytest.mark.parametrize('source,what', [
    ('import pickle', 'imports pickle'), ('from pickle import loads', 'imports pickle'), ('import os; os.system("ls")', 'os.system'), ('eval("1")', 'eval'), ('x = exec', None), ('compile("1", "", "eval")', 'compile'),
    ('torch.load(f)', 'torch.load without weights_only=True'), ('torch.load(f, weights_only=False)', 'torch.load without weights_only=True'), ('torch.load(f, weights_only=True)', None), ('re.compile("a")', None),
    ('np.load(f, allow_pickle=True)', 'allow_pickle=True'), ('np.load(f)', None), ('subprocess.run("ls", shell=True)', 'shell=True'), ('yaml.load(f)', 'yaml.load'), ('yaml.safe_load(f)', None),
    ('import tarfile; tarfile.open(f).extractall()', '.extractall without a filter'), ('import tarfile; t.extractall(filter="data")', None), ('from .axes import extract; extract(model)', None),
    ('a = "http:/" "/example.org"', 'an http address'), ('a = "https://example.org"', None), ('tempfile.mktemp()', 'tempfile.mktemp'), ('from urllib.request import urlopen', 'imports urlopen'), ('model.eval()', None)])
def test_the_search_finds_what_it_looks_for(source, what):
    found = [w for _, w in doors(source)]
    assert found == ([] if what is None else [what])

def test_every_file_is_written_by_one_module():
    "`open` for writing, `write_text`, `savez`, `savefig`, `to_csv` to a path: only fedlit.files, and the spill file of fedlit.table, which has no name."
    writes = re.compile(r"\bopen\([^)]*['\"][wxa]b?\+?['\"]|\.write_(text|bytes)\(|np\.savez?\(\w*path|\.savefig\((?!whole|drawn)|\.to_(csv|json|pickle|parquet)\([^)]*(path|out/)|save_file\(|torch\.save\(")
    allowed = {'fedlit/files.py', 'fedlit/costs.py'} # costs writes to /proc
    found = {f.relative_to(ROOT).as_posix() for f in (ROOT/'fedlit').rglob('*.py') if writes.search(f.read_text(encoding='utf-8'))}
    assert found <= allowed, found - allowed

def test_downloads_are_https_and_known_by_sha256():
    from fedlit.data import _archives, _cifar_files, _quads
    addresses = [*_archives.values(), *((url, v) for url, files in _quads.values() for v in files.values())]
    assert len(addresses) == 12 and all(url.startswith('https://') for url, _ in addresses)
    assert all(re.fullmatch('[0-9a-f]{64}', v) for _, v in addresses) and all(re.fullmatch('[0-9a-f]{64}', v) for files in _cifar_files.values() for v in files.values())
