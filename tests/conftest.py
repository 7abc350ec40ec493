"Small federations that the tests share: fixed batches, ragged clients, a network with BatchNorm."
import importlib.util, os, shutil, subprocess, sys, zlib
os.environ.setdefault('KINETO_LOG_LEVEL', '99') # torch 2.15 otherwise reports every profile, and that there is no GPU
os.environ['COLUMNS'] = '80' # as wide as argparse writes its help, whatever the terminal
from pathlib import Path
import matplotlib, pytest, torch
from hypothesis import HealthCheck, settings
from fedlit.method import Method
from fedlit.papers.entries import CATALOGUE
from fedlit.parse import methods_by_name

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
# tests on data sets that are not there are skipped
DATA = Path(os.environ.get('FEDLIT_DATA', ROOT/'data'))
# the same cases in every run, however slow the machine is; HYPOTHESIS_PROFILE=default looks for new ones
settings.register_profile('steady', derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'steady'))

matplotlib.use('Agg')
torch.set_num_threads(1) # fixtures of a module come before those of a test

@pytest.fixture(autouse=True)
def _one_thread_and_no_figure_left():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    if pyplot := sys.modules.get('matplotlib.pyplot'): pyplot.close('all')

# what no processor changes: a device that is none, the site, texts, files, the statistics of results
SAME = ('accelerator bench catalogue check cli docments docs evidence export files foreign_files hub inputs installed '
        'kernel layout logs odd_results papers parse pictures portraits process release report security snippets '
        'startup typed unreadable_files').split()

# ---- tests with a case for every method, or every entry of the catalogue: a third of the cases at a time ----

MANY = 40

def git(*words):
    "What git says, line by line; nothing where it cannot."
    if not shutil.which('git'): return []
    said = subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True)
    return [] if said.returncode else said.stdout.split('\n')

# which third: by what HEAD holds, so another after most landings; all where there is no git
SAID = os.environ.get('FEDLIT_THIRD') or (git('rev-parse', 'HEAD^{tree}') or ['all'])[0]
NOW = None if SAID == 'all' else int(SAID, 16) % 3
NEW = {*git('diff', '--name-only', 'HEAD~1')} # what this landing changes, committed or not
SELDOM = pytest.mark.slow, pytest.mark.long
THIRDS = [pytest.param(k, marks=[] if NOW in (None, k) else SELDOM, id=f'third {k}') for k in range(3)]

def in_third(name, about=None, third=NOW):
    "Is a case in this third? In that of now is also what is about a method that this landing changes."
    if third is None or zlib.crc32(name.encode()) % 3 == third: return True
    parts = about.parts if isinstance(about, Method) else filter(None, [methods_by_name().get(about)])
    return third == NOW and any(f"{p.__module__.replace('.', '/')}.py" in NEW for p in parts)

def subject(item):
    "The method or entry that a case is about."
    given = getattr(item, 'callspec', None)
    for v in given.params.values() if given else ():
        if isinstance(v, Method) or isinstance(v, str) and (v in methods_by_name() or v in CATALOGUE): return v

@pytest.hookimpl(tryfirst=True) # before -m is looked at
def pytest_collection_modifyitems(items):
    "The other two thirds are `long`."
    cases = {}
    for item in items:
        if item.path.stem.removeprefix('test_') in SAME: item.add_marker('same')
        if subject(item) is not None: cases.setdefault(item.nodeid.partition('[')[0], []).append(item)
    for item in sum((of for of in cases.values() if len(of) >= MANY), []):
        if not in_third(item.nodeid, subject(item)):
            for mark in SELDOM: item.add_marker(mark)

def pytest_terminal_summary(terminalreporter):
    if NOW is not None:
        terminalreporter.write_line(f'Of tests with a case for every method, this was FEDLIT_THIRD={NOW} of 0, 1, 2; '
                                    'FEDLIT_THIRD=all is all.')

# ---- a checkpoint ----

@pytest.fixture(scope='module')
def calm(tmp_path_factory):
    "That of three rounds, which nothing has stopped."
    from test_files import go
    file = tmp_path_factory.mktemp('calm')/'c.safetensors'
    go(3, file)
    return file

# ---- pages in a browser ----

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
browsed = pytest.mark.skipif(
    not CHROMIUM or not importlib.util.find_spec('playwright'),
    reason='needs Chromium and the Python package playwright (make test-docs installs the latter)')

@pytest.fixture(scope='module')
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield browser
        browser.close()
