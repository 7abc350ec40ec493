"No doors: docs/lint.py finds calls that run what a file says, reach a shell, or trust a name or an address."
import re, sys
from pathlib import Path
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]/'docs'))
from lint import doors

@pytest.mark.parametrize('source,what', [
    ('import pickle', 'imports pickle'),
    ('from pickle import loads', 'imports pickle'),
    ('from pickle import Pickler, loads', 'imports pickle'),
    ('from pickle import PickleBuffer, Pickler', None),
    ('import os; os.system("ls")', 'os.system'),
    ('eval("1")', 'eval'),
    ('x = exec', None),
    ('compile("1", "", "eval")', 'compile'),
    ('torch.load(f)', 'torch.load without weights_only=True'),
    ('torch.load(f, weights_only=False)', 'torch.load without weights_only=True'),
    ('torch.load(f, weights_only=True)', None),
    ('re.compile("a")', None),
    ('np.load(f, allow_pickle=True)', 'allow_pickle=True'),
    ('np.load(f)', None),
    ('subprocess.run("ls", shell=True)', 'shell=True'),
    ('yaml.load(f)', 'yaml.load'),
    ('yaml.safe_load(f)', None),
    ('import tarfile; tarfile.open(f).extractall()', '.extractall without a filter'),
    ('import tarfile; t.extractall(filter="data")', None),
    ('from .axes import extract; extract(model)', None),
    ('a = "http:/" "/example.org"', 'an http address'),
    ('a = "https://example.org"', None),
    ('tempfile.mktemp()', 'tempfile.mktemp'),
    ('from urllib.request import urlopen', 'imports urlopen'),
    ('model.eval()', None)])
def test_the_search_finds_what_it_looks_for(source, what):
    found = [w for _, w in doors(source)]
    assert found == ([] if what is None else [what])

def test_downloads_are_https_and_known_by_sha256():
    from fedlit.data import datasets
    from fedlit.ground.readers import _sources
    known = [v for name in datasets() for v in _sources(name).values()]
    assert len(known) == 22 and all(re.fullmatch('[0-9a-f]{64}', sha256) for sha256, _ in known)
    addresses = [url for _, url in known if url]
    assert len(addresses) == 12 and all(url.startswith('https://') for url in addresses)
