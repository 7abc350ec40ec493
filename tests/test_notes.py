"Every parameter that the site's reference shows has a note, and every word of docs/names.yml is used. Reads sources."
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
import api, pages

ENTRIES = [e for p in pages.notebooks() for e in pages.entries(p)]
SILENT = [(f'{e.module}.{e.name}', name) for e in ENTRIES for name, _, note in e.params if not note]

def test_every_parameter_has_a_note():
    assert sum(len(e.params) for e in ENTRIES) > 2000
    assert not [f'{place}: {name}' for place, name in SILENT if not api.meaning(name, place)]

def test_every_word_of_names_yml_is_used():
    used = {(api.place_of(name, place), name) for place, name in SILENT}
    told = {(None, name) for name in api.COMMON} | {(p, name) for p, words in api.PLACES.items() for name in words}
    assert sorted(told - used, key=str) == []
