"`fedlit report` on a folder as it may be after weeks: it names what is odd, and shows the rest."
import json, re, warnings
import pytest
from fedlit.cli import main
from fedlit.ground.files import all_results, result_path, write_json
from fedlit.papers.entries import remember

@pytest.fixture
def folder(tmp_path):
    "Two seeds of the main job's results that come with fedlit, a file each."
    there = 0
    for name, r in all_results(result_path('digits')/'digits').items():
        if r['seed'] in (0, 1):
            write_json(tmp_path/'digits'/name, r)
            there += 1
    assert there == 28
    remember(tmp_path, 'collapse embedded', seeds=[2], repeated=False)
    return tmp_path

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Matplotlib')
def test_a_report_names_what_is_odd_and_shows_the_rest(folder, capsys):
    a, b, c, d, *_ = sorted((folder/'digits').glob('*.json'))
    a.unlink()
    b.write_bytes(b.read_bytes()[:-50])
    short = json.loads(c.read_text(encoding='utf-8'))
    for k in ('format', 'crc32'): short.pop(k)
    whole = dict(short, setting=dict(short['setting'], rounds=99))
    short['history'] = {k: v[:1] for k, v in short['history'].items()}
    write_json(c, short)
    write_json(folder/'digits'/'longer.json', whole)
    write_json(folder/'digits'/'mine.json', dict(a=1))
    (folder/'digits'/'text.json').write_text('hello', encoding='utf-8')
    (folder/'digits'/'list.json').write_text('[1]', encoding='utf-8')
    write_json(folder/'digits'/'odd.json', dict(setting='x'))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        main(['report', '--out', str(folder)])
    said, out = '\n'.join(str(w.message) for w in said), capsys.readouterr().out
    assert re.search(rf'missing: \S*{re.escape(a.name)}', out) and 'missing: 3 of 28 results' in out
    assert f'damaged: {b}' in out and f'{b} is damaged' in said
    assert re.search(rf'{re.escape(str(c))} has 1 rounds in its history, not \d+; it counts as missing', said)
    assert f"of another length: {folder/'digits'/'longer.json'} has 99 rounds" in out
    for name in ('mine', 'odd'): assert f"foreign: {folder/'digits'/name}.json is no result of a run" in out
    for name in ('text', 'list'): assert f"damaged: {folder/'digits'/name}.json" in out
    assert '25 of 28 runs' in out and (folder/'accuracy.png').exists() and (folder/'claims.csv').exists()
