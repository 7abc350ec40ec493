"A run as a page: its numbers are the run's, its text is harmless, and a browser shows it without network or script."
import json, math, os, re, warnings
from dataclasses import replace
from html.parser import HTMLParser
import pytest, torch
from fedlit.after import report
from fedlit.after.report import embed, facts, page, partition, plain, tag, took_part
from fedlit.cli import main
from fedlit.data import load
from fedlit.engine.guard import Guard
from fedlit.measure import effective_rank, evaluate, features_of, spectrum
from fedlit.local import Between, Cosine, Decay, Local, Rates, Schedule, Warmup
from fedlit.methods import FedALA, FedAvg, FedPer, HeteroFL, PerFedAvg, SCAFFOLD
from fedlit.models import build
from fedlit.participation import BySize, Participation, PowerOfChoice, RoundRobin
from fedlit.partition import dirichlet
from fedlit.result import Run
from fedlit.scores import tests_of as own_tests
from fedlit.run import federate, federating
from fedlit.ground.tree import flatten
from conftest import browsed
from fedlit.scale.capacity import traffic

EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>'
TASK = load('digits')
CLIENTS = dirichlet(TASK.y_train, clients=6, alpha=.5, seed=0)
FAST = dict(local=Local(epochs=1, batch_size=64), progress=False)

def net(): return build('mlp', TASK, seed=0, hidden=(16,), features=8, norm='batch')
def run(method=None, task=TASK, **kw): return federate(net(), task, CLIENTS, method or FedAvg(), **{**FAST, **kw})
def sickly():
    "A task whose class and whose name are markup, and where client 1 has no numbers."
    x = TASK.x_train.float().clone()
    x[CLIENTS[1]] = math.nan
    return replace(TASK, x_train=x, name=EVIL, labels=(EVIL, *map(str, range(1, 10))))

@pytest.fixture(scope='module')
def skipping():
    with pytest.warns(UserWarning):
        return run(task=sickly(), rounds=3, participation=.5, bad_clients='skip')

# -- the numbers

def test_once_more_is_the_round_that_would_come_next():
    two, three = run(rounds=2), run(rounds=3, keep_locals=True)
    before = {k: v + 0 for k, v in flatten(dict(p=two.state.params, b=two.state.buffers)).items()}
    f, tests = facts(two), own_tests(TASK, CLIENTS)
    assert all(torch.equal(v, before[k]) for k, v in flatten(dict(p=two.state.params, b=two.state.buffers)).items())
    server = two.per_client(TASK, tests)['global']
    for k, c in enumerate(f['clients']):
        ended = tuple({n: v[k] for n, v in three.locals[part].items()} for part in ('params', 'buffers'))
        x, y = TASK.x_test[tests[k]], TASK.y_test[tests[k]]
        seen = spectrum(features_of(two.model, TASK.x_test, prepare=TASK.normalise, state=ended))
        assert c['after'] == pytest.approx(evaluate(two.model, x, y, prepare=TASK.normalise, state=ended)['accuracy'],
                                           abs=1e-6)
        assert c['server'] == pytest.approx(server[k], abs=1e-6) and c['tested'] == len(y) and 'own' not in c
        assert c['rank'] == pytest.approx(effective_rank(seen), rel=1e-4)
        assert f['spectra']['clients'][str(k)]['values'] == pytest.approx(seen.tolist(), rel=1e-3, abs=1e-6)
    assert sum(c['drift'] for c in f['clients'])/6 == pytest.approx(three.history.drift.iloc[-1], rel=1e-4)
    assert f['partition'] == [TASK.y_train[c].bincount(minlength=10).tolist() for c in CLIENTS]
    assert [c['share'] for c in f['clients']] == pytest.approx([len(c)/len(TASK.y_train) for c in CLIENTS], rel=1e-5)

@pytest.mark.parametrize('m', [FedAvg(), FedPer()])
def test_without_training_it_shows_what_is_there(m):
    f = facts(run(m, rounds=2), again=False)
    assert f['source'] == '' and not f['spectra']['clients'] and not {'after', 'drift'} & f['clients'][0].keys()
    assert 'server' in f['clients'][0] and ('own' in f['clients'][0]) == (m == FedPer())
    said = ' '.join(how for _, how in f['missing'])
    assert 'again=True' in said and '<svg' in page(f)

def test_a_run_from_a_file_says_what_it_lacks_and_with_data_lacks_nothing(tmp_path):
    first = run(SCAFFOLD(), rounds=2)
    back = Run.load(first.save(tmp_path/'run'))
    bare = facts(back)
    assert bare['partition'] is None and bare['spectra'] is None and 'server' not in bare['clients'][0]
    assert 'task=task, clients=clients' in bare['missing'][0][1] and bare['clients'][0]['down'] > 0
    assert facts(back, task=TASK, clients=CLIENTS) == facts(first)
    with pytest.raises(ValueError, match='another partition'): facts(back, task=TASK, clients=CLIENTS[::-1])
    with warnings.catch_warnings(), pytest.raises(ValueError, match='another criterion; pass criterion='):
        warnings.simplefilter('error') # it is said once
        facts(back, task=TASK, clients=CLIENTS, criterion=torch.nn.CrossEntropyLoss(label_smoothing=.1))
    empty = Run.load(tmp_path/'run')
    empty.history = empty.history[:0]
    with pytest.raises(ValueError, match='no round yet'): facts(empty)

def test_who_took_part_and_why_not(skipping):
    f = facts(skipping)
    assert [len(who) for who in f['drawn']] == [3, 3, 3]
    assert f['clients'][1]['rounds'] > 0 and 'after' not in f['clients'][1]
    for row, who in zip(f['rounds'], f['drawn']):
        assert row['participants'] == len(who) - (1 in who) and row['bad_clients'] == '1'*(1 in who)
        assert ('why' in row) == (1 in who)
    assert any('client 1 produced NaN or infinity' in row.get('why', '') for row in f['rounds'])
    for k, v in (('participation', 1/3), ('seed', 2)): # other counts; a bad client that is not among the drawn
        other = replace(skipping, settings={**skipping.settings, k: v})
        assert took_part(other) is None and 'do not agree' in str(facts(other, again=False)['missing'])

def test_a_run_that_diverged_has_a_report_too(tmp_path):
    "Also from a file; it says that there are no spectra."
    with pytest.warns(UserWarning): lost = run(rounds=2, bad_clients='report', local=Local(epochs=1, lr=1e30))
    lost.save(tmp_path/'run')
    for r, given in ((lost, {}), (Run.load(tmp_path/'run'), dict(task=TASK, clients=CLIENTS))):
        f = facts(r, **given)
        assert not f['spectra'] and any('features of test samples are not finite' in what for what, _ in f['missing'])
        assert len(f['clients']) == 6 and '</html>' in page(f)

def test_a_run_that_was_not_tested_yet_has_a_report_too():
    early = next(federating(net(), TASK, CLIENTS, FedAvg(), rounds=9, evaluate_every=2, **FAST))
    f = facts(early, again=False)
    assert any('evaluate_every=1' in how for _, how in f['missing']) and '</html>' in page(f)

def test_what_a_report_says_first_is_of_the_last_round():
    "Not of an earlier one, if the last was not tested, or if the network has diverged since."
    with pytest.warns(UserWarning): lost = run(rounds=2, bad_clients='report', local=Local(lr=Rates((.05, 1e30))))
    early = [*zip(range(3), federating(net(), TASK, CLIENTS, FedAvg(), rounds=9, evaluate_every=2, **FAST))][2][1]
    for r, n, tested in (lost, 2, 1), (early, 3, 2):
        said, seen = page(facts(r, again=False)), 100*r.history.accuracy[tested-1]
        assert f'{n} rounds: accuracy –.' in said and f'{seen:.1f} % after round {tested}.' in said

def test_a_list_that_was_watched_is_shown():
    f = facts(run(rounds=1, watch=lambda *_: dict(counts=[1, None, 'a'])), again=False)
    assert '[1, None, &#x27;a&#x27;]' in page(f)

@pytest.mark.parametrize('at_once', [10**7, 5000]) # all six clients at once, and three
def test_bytes_are_those_of_the_traffic_table(at_once, monkeypatch):
    monkeypatch.setattr(report, 'AT_ONCE', at_once)
    for m in (FedPer(), HeteroFL(rates=(1., .5))):
        f, there = facts(run(m, rounds=1)), traffic(m, net(), (1, 8, 8), 10, 6)
        assert [(c['down'], c['up']) for c in f['clients']] == list(zip(there.down, there.up))

def test_many_clients_are_looked_at_in_part():
    f = facts(run(rounds=1), most=3)
    assert [c['client'] for c in f['clients'] if 'after' in c] == [0, 2, 5] and len(f['spectra']['clients']) == 3
    assert page(f).count('<section') == page(facts(run(rounds=1))).count('<section')

# -- the text

class Read(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.inside = [], [], [], {}
        self.feed(text)
    def handle_starttag(self, name, attrs):
        self.tags.append((name, dict(attrs)))
        if name != 'meta': self.open.append(name)
    def handle_endtag(self, name):
        assert self.open.pop() == name
    def handle_data(self, data):
        self.text.append(data)
        if self.open[-1:] == ['script']: self.inside.setdefault(len([t for t, _ in self.tags if t == 'script']), data)

def test_names_are_harmless_and_the_json_is_strict(skipping):
    f = facts(skipping)
    text = page(f)
    seen = Read(text)
    names = [t for t, _ in seen.tags]
    assert not seen.open and not {'img', 'style', 'image', 'foreignObject'} & {*names[names.index('body'):]}
    assert names.count('script') == 1 # the facts
    assert EVIL in ' '.join(seen.text) and EVIL in f['labels'] # it is there, as text
    def refuse(v): raise AssertionError(v)
    assert json.loads(*seen.inside.values(), parse_constant=refuse) == f == json.loads(json.dumps(f, allow_nan=False))
    assert not [a for _, a in seen.tags if {'src', 'xlink:href'} & a.keys() or a.get('href', '#')[0] != '#']
    assert not re.search(r'https?:|url\((?!#)|@import|javascript:', text)
    policy = next(a['content'] for t, a in seen.tags if 'http-equiv' in a)
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[\w+/=]+'", policy)
    assert not [a for _, a in seen.tags if any(k.startswith('on') or k == 'style' for k in a)]

@pytest.mark.parametrize('text', [EVIL, '&lt;', '"\'<>&', 'a\u2028b', '</style>', '\x00'])
def test_whatever_a_name_is_it_stays_text(text):
    seen = Read(tag('p', text, title=text) + '')
    assert [t for t, _ in seen.tags] == ['p']
    assert '\x00' in text or ''.join(seen.text) == seen.tags[0][1]['title'] == text
    assert json.loads(embed([text])) == [text] and not set('<>&\u2028') & set(embed([text]))

@pytest.mark.parametrize('name', ['</text><script>', '$x^2$', r'$\frac{', '\x00\x0b', '"\'<>&', 'a style="x: y"',
                                  '漢字', 'a'*300])
def test_a_class_of_any_name_can_be_drawn(name):
    drawn = partition(dict(partition=[[3, 1], [0, 2]], labels=[name, 'b']))
    seen = Read(drawn + '')
    said = re.sub(r'[\x00\x0b]', '�', name)
    assert (said if len(said) < 14 else f'{said[:6]}…{said[-6:]}') in seen.text and not seen.open
    assert {t for t, _ in seen.tags} == {*'section h2 p div svg g path use text defs clippath rect'.split()}

def test_every_figure_says_what_it_shows_and_is_the_same_every_time(skipping):
    f = facts(skipping)
    alts = [a['aria-label'] for t, a in Read(page(f)).tags if t == 'svg']
    assert len({*alts}) == len(alts) == 7 and min(map(len, alts)) > 15 and page(f) == page(f)
    ids = [re.findall(r' id="(\w+)"', svg) for svg in page(f).split('<svg')[1:]]
    assert all(len({*i}) == len(i) for i in ids) and len({*sum(ids, [])}) == len(sum(ids, []))

def test_plain_values():
    assert plain(dict(a=math.nan, b=(1, math.inf), c=torch.tensor(1.5), d=True, e=Guard)) == dict(
        a=None, b=[1, None], c=1.5, d=True, e=str(Guard))

def test_the_command_line_writes_it(tmp_path, capsys):
    one, two, file = tmp_path/'one.html', tmp_path/'two.html', tmp_path/'run.safetensors'
    quick = ['run', '--quiet', '--rounds', '2', '--epochs', '1', '--clients', '4', '--option', 'hidden=(16,)']
    main([*quick, '--without', '3', '--report', str(one), '--save', str(file)])
    main(['report-run', str(file), '--to', str(two)])
    assert one.read_bytes() == two.read_bytes() and re.search(r'Tensors alone, [\d.]+ .B went', one.read_text('utf-8'))
    assert 'Left out of the run from the beginning: 3' in one.read_text(encoding='utf-8')
    main(['report-run', str(file), '--root', str(tmp_path), '--no-again'])
    assert (tmp_path/'run.html').exists() and 'two.html' in capsys.readouterr().out
    run(rounds=1).save(file) # from Python: nobody knows the clients
    main(['report-run', str(file)])
    assert 'nor who had which sample' in (tmp_path/'run.html').read_text(encoding='utf-8')

# -- in a browser

@pytest.fixture(scope='module')
def file(skipping, tmp_path_factory):
    return skipping.report(os.path.join(tmp_path_factory.mktemp('report'), 'run.html'))

def opened(browser, file, **kw):
    tab = browser.new_context(offline=True, **kw).new_page()
    tab.faults = []
    tab.on('console', lambda m: tab.faults.append(m.text))
    tab.on('pageerror', lambda e: tab.faults.append(str(e)))
    tab.on('dialog', lambda d: (tab.faults.append('a dialog: ' + d.message), d.dismiss()))
    tab.on('request', lambda r: tab.faults.append(r.url) if r.url != 'file://' + str(file) else None)
    tab.goto('file://' + str(file))
    return tab

@browsed
@pytest.mark.parametrize('width', [1280, 375])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_it_opens_at_every_width_in_light_and_dark(browser, file, width, scheme):
    tab = opened(browser, file, viewport=dict(width=width, height=800), color_scheme=scheme)
    assert tab.evaluate('document.documentElement.scrollWidth') <= width
    light = lambda css: sum(map(float, re.findall(r'[\d.]+', css)[:3]))/765
    style = lambda k: tab.eval_on_selector('body', f'e => getComputedStyle(e).{k}')
    paper, ink = light(style('backgroundColor')), light(style('color'))
    assert (paper < .3) == (scheme == 'dark') and abs(paper - ink) > .6
    assert tab.locator('svg').count() == 7 and not tab.faults
    assert all(tab.eval_on_selector_all('svg text', 'es => es.map(e => e.getBoundingClientRect().width)'))
    tab.context.close()

@browsed
def test_without_javascript_it_is_pictures_and_tables(browser, file):
    tab = opened(browser, file, java_script_enabled=False)
    for i, words in enumerate((('rank', 'drift'), ('client 1 produced NaN or infinity',), (EVIL,))):
        tab.locator('summary').nth(i).click()
        folded = tab.locator('details').nth(i)
        assert folded.locator('table').is_visible() and not tab.faults
        assert all(w in folded.text_content() for w in words)
    tab.context.close()

@pytest.mark.parametrize('method, participation', [(FedAvg(), RoundRobin(.5)), (PerFedAvg(), BySize(.5)),
                                                   (FedALA(), 1.), (FedAvg(), PowerOfChoice(.5))])
def test_schedules_and_participation_come_back_from_a_file(tmp_path, method, participation):
    effort = 1 if method == FedALA() else Between(1, 2)
    own = dict(local=Local(epochs=effort, batch_size=64, lr=Decay(.1, .9)), participation=participation)
    first = run(method, rounds=2, **own)
    f, back = facts(first), Run.load(first.save(tmp_path/'run'))
    assert facts(back, task=TASK, clients=CLIENTS) == f
    assert (f['drawn'] is None) == (participation == PowerOfChoice(.5)) and f['clients'][5]['after'] >= 0
    assert ('own' in f['clients'][0]) == (method != FedAvg())
    one, other = (r.without(client=1, **more) for r, more in ((first, {}), (back, dict(task=TASK, clients=CLIENTS))))
    assert all(torch.equal(v, other.run.state.params[k]) for k, v in one.run.state.params.items())

class Growing(Participation):
    first: int = 2
    def draw(self, clients, round): return range(min(self.first + round, clients))

class Halving(Schedule):
    lr: float = .1
    def __call__(self, round): return self.lr/2**round

@pytest.mark.parametrize('lr', [Cosine(.05, rounds=2), Warmup(Cosine(.05, 4), 2), Halving()])
def test_schedules_that_end_and_values_of_ones_own(tmp_path, lr):
    own = dict(local=Local(epochs=1, batch_size=64, lr=lr), participation=Growing())
    first = run(rounds=2, **own)
    f, back = facts(first), Run.load(first.save(tmp_path/'run'))
    assert f['clients'][0]['after'] >= 0 and f['drawn'] == [[0, 1], [0, 1, 2]]
    there = facts(back, task=TASK, clients=CLIENTS, **own)
    assert {**there, 'drawn': 0, 'missing': 0, 'clients': 0} == {**f, 'drawn': 0, 'missing': 0, 'clients': 0}
    one, other = first.without(client=1), back.without(client=1, task=TASK, clients=CLIENTS, **own)
    assert all(torch.equal(v, other.run.state.params[k]) for k, v in one.run.state.params.items())

def test_the_rounds_are_those_that_were_run():
    early = next(federating(net(), TASK, CLIENTS, FedAvg(), rounds=9, **FAST))
    html = page(facts(early, again=False))
    assert '6 clients on digits, 1 round: accuracy' in html and '<th scope="row">rounds</th>' not in html
