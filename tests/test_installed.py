"Away from the checkout: what travels with the package, and what a page may not ask of the folder where it is opened."
import importlib.util, io, json, lzma, math, re, sys, tarfile
from configparser import ConfigParser
from pathlib import Path
import pytest, yaml
import fedlit
from fedlit.ground import files
from fedlit.parse import methods_by_name, page_of

ROOT = Path(__file__).resolve().parent.parent

def text(*path): return ROOT.joinpath(*path).read_text(encoding='utf-8')

# -- the results that travel with the package

@pytest.fixture(scope='module')
def packed():
    pytest.importorskip('setuptools')
    spec = importlib.util.spec_from_file_location('setup', ROOT/'setup.py')
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.packed

@pytest.fixture(scope='module')
def archive(packed): return packed(ROOT/'results')

def lines(name, raw):
    "The results of a file; one that is packed has a line each."
    if name.endswith('.json'): return {name: json.loads(raw)}
    return {f'{name}: {r["file"]}': r for r in map(json.loads, lzma.decompress(raw).splitlines())}

def content(tar):
    return {n: r for m in tar for n, r in lines(m.name.removeprefix('results/'), tar.extractfile(m).read()).items()}

def bare(content):
    "A result without its format and its checksum."
    return {k: v for k, v in content.items() if k not in ('format', 'crc32')} if isinstance(content, dict) else content

def near(a, b):
    "Are two contents the same to six digits, and their settings and accuracies digit by digit?"
    exact = lambda k: k == 'setting' or 'accuracy' in k
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[k] == b[k] if exact(k) else near(a[k], b[k]) for k in a)
    if isinstance(a, list): return len(a) == len(b) and all(map(near, a, b))
    return math.isclose(a, b, rel_tol=5e-6) or a != a and b != b if isinstance(a, float) else a == b

def test_the_results_travel_in_a_file_of_a_few_mb(archive): assert 100_000 < len(archive) < 7_000_000

def test_every_result_travels_to_six_digits_and_settings_and_accuracies_as_they_are(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar: there = content(tar)
    results = ROOT/'results'
    here = {n: bare(r) for f in (*results.rglob('*.json'), *results.rglob('*.jsonl.xz'))
            for n, r in lines(f.relative_to(results).as_posix(), f.read_bytes()).items()}
    assert here.keys() == there.keys() and len(here) > 900
    for name in here: assert near(here[name], there[name]), name

def test_the_archive_depends_on_the_results_and_on_nothing_else(tmp_path, packed):
    (tmp_path/'b').mkdir()
    (tmp_path/'b'/'x.json').write_text(json.dumps(dict(v=1/3, format=2, crc32='0'), indent=1), encoding='utf-8')
    (tmp_path/'a.json').write_text(json.dumps([float('inf'), 1]), encoding='utf-8')
    first = packed(tmp_path)
    for f in tmp_path.rglob('*.json'):
        f.write_text(json.dumps(json.loads(f.read_text('utf-8'))), 'utf-8') # another date and layout
    assert packed(tmp_path) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as tar: said = [(m.name, tar.extractfile(m).read()) for m in tar]
    assert said == [('results/a.json', b'[Infinity,1]'), ('results/b/x.json', b'{"v":0.333333}')]

@pytest.fixture
def installed(monkeypatch, tmp_path, archive):
    "As if fedlit were installed: a package with its archive, and nothing around it."
    (tmp_path/'fedlit').mkdir()
    (tmp_path/'fedlit'/'results.tar.xz').write_bytes(archive)
    monkeypatch.setattr(files, '_package', lambda: tmp_path/'fedlit')
    monkeypatch.chdir(tmp_path)
    files._results.cache_clear()
    yield tmp_path
    files._results.cache_clear()

def test_a_checkout_reads_its_own_results(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert files.result_path('soak/soak.json') == ROOT/'results'/'soak'/'soak.json'

def test_an_installed_package_reads_what_travels_with_it(installed):
    from fedlit.papers.claims import results
    from fedlit.papers.catalogue import CATALOGUE
    from fedlit.papers.entries import select
    soak = files.result_path('soak/soak.json')
    assert not {installed, ROOT} & {*soak.parents} and files.read_json(soak)['rounds'] == 1000
    rows, missing = results(select(CATALOGUE['feddecorr/table1'], 'embedded'))
    assert len(rows) and not missing
    assert files.result_path() == soak.parents[1]
    assert [f.name for f in installed.iterdir()] == ['fedlit'] # unpacked once

def test_what_does_not_travel_is_named_and_how_to_get_it(installed):
    said = f"no 'x.json' among the results that come with fedlit {fedlit.__version__}, which are bench, .*git clone"
    with pytest.raises(FileNotFoundError, match=said): files.result_path('x.json')

# -- the pages

PAGES = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)

def cells(page, kind='code'):
    return [''.join(c['source']) for c in json.loads(text(page))['cells'] if c['cell_type'] == kind]

def test_no_page_reads_from_the_folder_where_it_is_opened():
    outside = re.compile(r"""['"](\.\./)+(results|nbs|examples)|Path\(['"]\.['"]\)""")
    found = {p.name: hits for p in PAGES if (hits := [m[0] for s in cells(p) for m in outside.finditer(s)])}
    assert not found, f'take results from fedlit.ground.files.result_path: {found}'

def test_the_table_of_methods_cites_what_their_pages_cite():
    cites = next(s for s in cells(ROOT/'nbs'/'methods'/'index.ipynb') if 'cites = ' in s)
    said = dict(re.findall(r"(\w+)='(\w+)'", cites))
    for name, method in methods_by_name().items():
        seen = re.findall(r'\[@(\w+)', ' '.join(cells(ROOT/'nbs'/'methods'/page_of(method), 'markdown')))
        several = len([m for m in methods_by_name().values() if m.__module__ == method.__module__]) > 1
        if name == 'OldCounts': continue # a part of FedDSE
        assert said.get(name) in ({None, *seen} if several else seen[:1] or [None]), name

# -- the other route to a site, and the one that is published

def test_quarto_reads_the_sidebar():
    "Quarto includes the files that nbs/_quarto.yml names, and none that these name."
    included = yaml.safe_load(text('nbs', '_quarto.yml'))['metadata-files']
    whole = {f: yaml.safe_load(text('nbs', f)) for f in included if f != 'nbdev.yml'} # which nbdev writes
    assert not [f for f, said in whole.items() if 'metadata-files' in said]
    listed = [f for f, said in whole.items() if said.get('website', {}).get('sidebar', {}).get('contents')]
    assert listed == ['sidebar.yml']

def test_what_is_published_is_what_is_tested():
    site = text('.github', 'workflows', 'site.yml')
    steps = yaml.safe_load(site)['jobs']['publish']['steps']
    assert 'make test-docs' in [s.get('run') for s in steps] and 'nbdev_docs' not in site
    assert next(s for s in steps if 'upload-pages-artifact' in s.get('uses', ''))['with']['path'] == '_docs'

@pytest.mark.parametrize('file', sorted((ROOT/'.github'/'workflows').glob('*.yml')), ids=lambda f: f.name)
def test_workflows_call_what_there_is(file):
    targets = re.findall(r'^([\w-]+):', text('Makefile'), re.M)
    settings = ConfigParser(delimiters=['='])
    settings.read(ROOT/'settings.ini', encoding='utf-8')
    steps = [s for job in yaml.safe_load(text(file))['jobs'].values() for s in job['steps']]
    for command in filter(None, (s.get('run') for s in steps)):
        assert set(re.findall(r'\bmake ([\w-]+)', command)) <= set(targets), command
        assert all((ROOT/f).exists() for f in re.findall(r'(?:bash|python) ([\w./]+/[\w.]+)', command)), command
        extras = re.findall(r'\.\[(\w+)\]', command)
        assert all(f'{e}_requirements' in settings['DEFAULT'] for e in extras), command

# -- Colab

def test_every_page_that_opens_in_colab_has_an_install_line():
    sys.path.insert(0, str(ROOT/'docs'))
    import colab
    assert not (found := [path for path, _ in colab.wrong()]), f'python docs/colab.py writes it into {found}'
    for page in PAGES:
        line = next(s for s in cells(page) if '/content' in s)
        assert line.startswith('#| hide\n#| eval: false\n# in Colab, run this first\n! [ -e /content ] && '), page
        assert 'git+https' in line or 'git clone' in line, page

def test_the_install_line_is_written_once_and_after_the_title():
    import colab
    title, more = dict(cell_type='markdown', source=['# A']), dict(cell_type='code', source=['x'])
    for before in ([], [dict(cell_type='code', source=['#| default_exp a'])]):
        once = colab.placed(dict(cells=[*before, title, more]), 'a.ipynb')
        assert once == [*before, title, colab.cell('a.ipynb'), more]
        old = [dict(c, source=['other']) if c.get('id') == 'colab' else c for c in once]
        assert colab.placed(dict(cells=once), 'a.ipynb') == once == colab.placed(dict(cells=old), 'a.ipynb')
