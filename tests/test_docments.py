"Parameters of the library have notes, and every word of docs/names.yml is used. Reads sources."
import inspect, sys
from importlib import import_module
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'docs'))
import api, pages

ENTRIES = [e for p in pages.notebooks() for e in pages.entries(p)]
SILENT = [(f'{e.module}.{e.name}', name) for e in ENTRIES for name, _, note in e.params if not note]

def test_every_parameter_of_the_library_has_a_note():
    "What is in `papers` serves the entries of its own page."
    assert sum(len(e.params) for e in ENTRIES) > 2000
    assert not [f'{place}: {name}' for place, name in SILENT
                if not place.startswith('papers.') and not api.meaning(name, place)]

def test_every_word_of_names_yml_is_used():
    used = {(api.place_of(name, place), name) for place, name in SILENT}
    told = {(None, name) for name in api.COMMON} | {(p, name) for p, words in api.PLACES.items() for name in words}
    assert sorted(told - used, key=str) == []

@pytest.mark.parametrize('module', sorted({e.module for e in ENTRIES}))
def test_annotations_name_what_is_there(module):
    "The site's reference, and `typing.get_type_hints`, evaluate those that are strings."
    try: made = vars(import_module(module := f'fedlit.{module}')).values()
    except ImportError as e: pytest.skip(str(e))
    for f in made:
        if (inspect.isfunction(f) or inspect.isclass(f)) and f.__module__ == module:
            inspect.get_annotations(f, eval_str=True)
