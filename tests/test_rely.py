"What you can rely on: every test that the page names exists, and every dependency is justified."
import configparser, json, re
from pathlib import Path

ROOT = Path(__file__).parents[1]

def test_every_promise_names_a_test_that_exists():
    page = '\n'.join(''.join(c['source']) for c in json.loads((ROOT/'nbs/guides/rely.ipynb').read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'markdown')
    named = re.findall(r'\[([\w ]+)\]\(https://github.com/fedlit/fedlit/blob/main/(tests/\w+\.py)\)', page)
    assert len(named) >= 30
    for said, file in named: assert f"def test_{said.replace(' ', '_')}(" in (ROOT/file).read_text(encoding='utf-8'), f'{file}: {said}'
    rows = [l for l in page.splitlines() if l.startswith('| ') and not l.startswith('| promise')]
    assert not [l for l in rows if '/blob/main/tests/' not in l]   # a promise without a test

def test_every_dependency_is_justified():
    settings = configparser.ConfigParser(delimiters=['='])
    settings.read(ROOT/'settings.ini', encoding='utf-8')
    said = (ROOT/'docs/dependencies.md').read_text(encoding='utf-8')
    for key in ('requirements', 'dev_requirements', 'docs_requirements'):
        for need in settings['DEFAULT'][key].split():
            name, bounds = re.match(r'([\w-]+)(.*)', need).groups()
            row = next((l for l in said.splitlines() if l.startswith('|') and re.search(rf'\b{name}\b', l.split('|')[1])), None)
            assert row, f'{need} has no row'
            for bound in filter(None, bounds.split(',')): assert bound.replace('>=', '>= ').replace('<', '< ').replace('==', '== ') in row, f'{need}: {row}'
