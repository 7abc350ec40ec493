"""What the pages of the papers claim and plan: sentences say what is judged, rounds fit into a slice."""
import functools, math, re, shlex
from dataclasses import replace
from pathlib import Path
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastcore.docments import docments
from fedlit.cli import parser
from fedlit.data import load
from fedlit.ground.files import result_path
from fedlit.local import SGD, Local
from fedlit.measure import effective_rank, features_of, spectrum
from fedlit.methods import SOLO, Ditto, FedALA, FedAvg, FedPara, PerFedAvg
from fedlit.models import build
from fedlit.papers.catalogue import CATALOGUE, plan
from fedlit.papers.claims import evaluate
from fedlit.papers.entries import SCALES, complete_seeds, entry_runs, found_rows, judge_entries, row_name, select
from fedlit.papers.evidence import sequential_test
from fedlit.papers.measures import activations, layer_ranks, own_rank
from fedlit.papers.settings import address, result_of
from fedlit.parse import method as parse
from fedlit.partition import dirichlet
from fedlit.run import federate

ROOT = Path(__file__).parents[1]

def claims(): return [(e.id, text, numbers) for e in CATALOGUE.values() for text, numbers in e.claims.items()]

def test_a_rank_correlation_is_called_a_tendency():
    "Kendall's tau above zero leaves room for pairs in the other order."
    by_rank = {(id, text) for id, text, numbers in claims() if numbers.unit == 'tau'}
    assert {'feddecorr/fig8', 'feddecorr/tpami-fig4', 'feddse/fig3.6', 'fedgse/fig4.4'} <= {id for id, _ in by_rank}
    assert not (bold := {(id, text) for id, text in by_rank if not re.search(r'\btends? to\b', text)}), bold

def test_a_gain_minus_a_gain_is_not_called_nothing():
    "A step that is larger than all later ones together says where most is gained, not that no more is gained."
    assert not (bold := {(id, text) for id, text, _ in claims() if 'hardly' in text}), bold

def test_a_claim_about_scaffold_says_which_form():
    named = [(id, text) for id, text, _ in claims() if 'SCAFFOLD' in text]
    assert {'moon/table1', 'feddecorr/table8', 'feddecorr/table9'} <= {id for id, _ in named}
    assert all('corrected form' in text for _, text in named), named

def test_the_claims_about_convolutions_wait_for_a_network_that_has_some():
    "On digits, where a perceptron is trained, no run asks for a ratio of theirs."
    e = CATALOGUE['feddecomp/ratios']
    tried = {scale: {labels['layers'] for labels, _ in e.grid(scale)} for scale in SCALES}
    assert tried == dict(embedded={'r_l'}, short={'r_l', 'r_c'}, paper={'r_l', 'r_c'})
    t = judge_entries([e], 'embedded').set_index('claim')
    assert (t[t.index.str.contains('r_c')].verdict == 'not evaluated').all()
    assert (t[t.index.str.contains('r_l')].seeds >= 20).all()

@pytest.mark.parametrize('id', ['feddecorr/tpami-fig4', 'feddecorr/tpami-fig6'])
def test_local_and_global_models_are_followed_through_the_rounds_on_real_images(id):
    e = CATALOGUE[id]
    made = dict(e.draws)['rounds'](complete_seeds(*found_rows(e, 'short')))
    names = {text.get_text() for ax in made.axes for text in ax.texts}
    assert {'FedAvg, local', 'FedAvg, global'} <= names, names
    plt.close(made)

# ---- what a GPU is asked for ----

IMAGES = dict(mnist=60_000, cifar10=50_000, cifar100=50_000, tiny_imagenet=100_000, office_caltech10=2_533,
              domainnet=569_010) # of training, or more; all of DomainNet
A_SECOND, MINUTES = 14_000, 9    # what results/README.md reckons with

def images_in_a_round(s): return IMAGES[s.data]*s.participation*s.local.epochs if s.rounds else 0

def test_a_round_at_paper_scale_ends_within_a_slice():
    "A checkpoint is written after a round: a longer one begins again in every slice."
    long = {(str(a), s.rounds, s.local.epochs) for a, s in plan('paper').items()
            if s.data != 'blank' and images_in_a_round(s) > A_SECOND*60*MINUTES}
    assert not long, long

def test_every_command_of_the_first_hour_selects_runs():
    text = (ROOT/'results'/'README.md').read_text(encoding='utf-8')
    lines = [line.strip() for line in text.partition('## The first hour on a GPU')[2].splitlines()]
    [more] = [line[3:-1] for line in lines if line.startswith('R="')]
    said = [shlex.split(line.replace('$R', more)) for line in lines if line.startswith('fedlit reproduce ')]
    assert len(said) >= 6
    for words in said:
        a = parser().parse_args(words[1:])
        assert a.entry and (a.scale, a.minutes) == ('paper', MINUTES), words
        for id in a.entry:
            runs = select(CATALOGUE[id], a.scale, a.only or '')
            assert runs and all(address(s) in plan('paper') for _, s in runs), (id, a.only)

@pytest.mark.parametrize('method, clients', [(SOLO(), 2), (FedAvg(), 1)], ids=['SOLO', 'FedAvg of one'])
def test_epochs_in_rounds_are_the_same_training_where_nothing_is_averaged(method, clients):
    "With whole batches, where the order of the samples makes no difference."
    task, parts = load('digits').subset(60, seed=0), torch.arange(60).chunk(clients)
    def after(rounds, epochs, kept):
        local = Local(epochs=epochs, batch_size=60, lr=.1, weight_decay=1e-3, optimizer=SGD(kept=kept))
        net = build('mlp', task, seed=0, hidden=(8,), features=4, norm='batch')
        state = federate(net, task, parts, method, rounds, local, progress=False).state
        return torch.cat([v[:clients].flatten().float() for own in (state.personal, state.params, state.buffers)
                          for v in own.values() if v.dim()])
    one = after(1, 6, False)
    assert (after(3, 2, True) - one).abs().max() < 1e-5 < 1e-3 < (after(3, 2, False) - one).abs().max()

@pytest.mark.parametrize('id', ['feddse/table3.4', 'feddse/table3.5', 'feddse/table3.6',
                                'fedgse/table4.3', 'fedgse/table4.4', 'fedgse/table4.5'])
def test_every_table_of_the_thesis_has_the_released_code_s_reading(id):
    "Score, odds, average and augmentation: what the code does in another way does not depend on the table."
    runs = {tuple(sorted((k, str(v)) for k, v in labels.items())): s for labels, s in CATALOGUE[id].grid('paper')}
    other = {k: s for k, s in runs.items() if '(released)' in dict(k)['method']}
    beside = [runs[tuple(sorted({**dict(k), 'method': row_name(dict(k)['method'])}.items()))] for k in other]
    chosen = [s for k, s in runs.items() if k not in other and ('DSE(' in s.method or 'GSE(' in s.method)]
    assert len(chosen) == sum('OldCounts' in s.method for s in other.values()) > 0
    assert all(a != b and (a.seed, a.partition) == (b.seed, b.partition) for a, b in zip(other.values(), beside))
    assert {s.recipe for s in other.values() if s.data == 'mnist'} == {'feddse'}

# ---- what counts rounds ----

@functools.lru_cache
def counts_rounds(cls): # of a Method
    "Its settings that are numbers of rounds, by their notes."
    return [k for k, note in docments(cls).items() if str(note).startswith('number of rounds')]

def parts_at(*scales):
    "(rounds, part) of every method in the catalogue."
    runs = {(s.method, s.rounds) for scale in scales for s in plan(scale).values() if s.rounds}
    return [(rounds, part) for method, rounds in sorted(runs) for part in parse(method).parts]

def test_what_counts_rounds_fits_into_the_run():
    "A ramp of 300 rounds would stay at its beginning in thirty."
    numbers = {(p.name, k, getattr(p, k), rounds) for rounds, p in parts_at(*SCALES) for k in counts_rounds(type(p))}
    assert {v[:2] for v in numbers} == {('DepthFL', 'ramp'), ('FedCAC', 'beta')}
    assert not [v for v in numbers if v[2] > v[3]]

def test_a_window_goes_around_as_often_as_at_paper_scale():
    steps = {(rounds, p.step) for rounds, p in parts_at(*SCALES[:2]) if p.name == 'FedRolex'}
    assert steps and all(step == round(800/rounds) for rounds, step in steps)

# ---- the sentences of the papers ----

SENTENCES = pd.read_csv(ROOT/'fedlit'/'papers'/'sentences.csv', keep_default_na=False)

def test_every_sentence_is_judged_or_says_why_not():
    assert SENTENCES.groupby('paper').sentence.nunique().min() >= 8
    for r in SENTENCES.itertuples():
        assert bool(r.entry) != bool(r.why), r
        assert not r.entry or r.claim in CATALOGUE[r.entry].claims, (r.entry, r.claim)

def test_every_claim_of_a_paper_is_a_sentence_of_it():
    "What no sentence says is a question of ours, or nobody's."
    said = {*SENTENCES.claim}
    idle = [(id, text) for id, text, numbers in claims() if not numbers.ours and text not in said]
    assert not [v for v in idle if v[0] != 'collapse'], idle # whose claims have the names of their figures

def raw(id):
    "Rows of an entry as committed: labels and the curve of accuracies in percent."
    e, out = CATALOGUE[id], []
    for labels, s in entry_runs(e, 'embedded'):
        if r := result_of(result_path('catalogue'), s):
            curve = 100*np.array(r['history']['accuracy'])
            out.append(dict(labels, curve=curve, late=curve[-math.ceil(len(curve)/3):].mean(), last=curve[-1]))
    return pd.DataFrame(out)

def side(t, value='late', **labels):
    for k, v in labels.items(): t = t[t[k] == v]
    return t.groupby('seed')[value].mean()

def by_hand_table2(b):
    g = lambda t, m: (side(t, method=f'{b}+FedDecorr', classes=m) - side(t, method=b, classes=m))
    return lambda t: g(t, 3) - g(t, 5)

def by_hand_rounds(t):
    "How many rounds earlier FedDecorr is where either curve ends; half of the sum for the two ends."
    wide = t.pivot(index=['alpha', 'seed'], columns='method', values='curve')
    first = lambda curve, goal: next((i + 1 for i, v in enumerate(curve) if v >= goal - 1e-9), len(curve) + 1)
    sums = [sum(first(plain, end) - first(ours, end) for end in (plain[-1], ours[-1]))
            for plain, ours in zip(wide['FedAvg'], wide['FedAvg+FedDecorr'])]
    return (pd.Series(sums, wide.index)/2).groupby('seed').mean()

BY_HAND = [
    ('feddecorr/tpami-table2', 'its gain shrinks with more classes a client (FedAvg,', by_hand_table2('FedAvg')),
    ('feddecorr/tpami-table2', 'its gain shrinks with more classes a client (FedAvgM,', by_hand_table2('FedAvgM')),
    ('feddecorr/fig4', 'and needs fewer rounds to the same accuracy', by_hand_rounds),
    ('feddecorr/table6', 'DeCov lowers', lambda t: side(t, method='FedAvg') - side(t, method='FedAvg+DeCov')),
    ('moon/fig7', 'with 20 local epochs MOON is ahead of FedAvg',
     lambda t: side(t, method='MOON', epochs=20) - side(t, method='FedAvg', epochs=20)),
    ('moon/table3', 'SCAFFOLD (corrected form) falls behind',
     lambda t: side(t, method='FedAvg') - side(t, method='SCAFFOLD')),
    ('moon/table5', 'the distance gains nothing', lambda t: side(t, method='FedAvg') - side(t, method='l2')),
    ('moon/table1', 'MOON leads FedAvg by at least two',
     lambda t: side(t, method='MOON') - side(t, method='FedAvg') - 2),
    ('feddecorr/table4', 'FedDecorr helps with 20 local',
     lambda t: side(t, method='FedAvg+FedDecorr', epochs=20) - side(t, method='FedAvg', epochs=20))]

def bets(d):
    "The sequential test written out: p value, and the side that the money is on."
    most = {}
    for sign in (1, -1):
        money, square = [1., 1., 1.], 0.
        for n, v in enumerate(d, 1):
            square += v*v
            z = v/math.sqrt(square/n) if square else 0.
            money = [m*(1 + math.tanh(sign*c*z)) for m, c in zip(money, (.5, 1, 2))]
            most[sign] = max(most.get(sign, 0), sum(money)/3)
    return min(1, 2/max(most.values())), 1 if most[1] > most[-1] else -1

@pytest.mark.parametrize('id, start, by_hand', BY_HAND, ids=[f'{id} {start}' for id, start, _ in BY_HAND])
def test_a_verdict_from_the_stored_runs_by_hand(id, start, by_hand):
    "Effect and evidence."
    [text] = [k for k in CATALOGUE[id].claims if k.startswith(start)]
    d = by_hand(raw(id)).sort_index().to_numpy()
    weighed = {w.claim: w for w in evaluate(CATALOGUE[id].claims, *found_rows(CATALOGUE[id], 'embedded'),
                                         CATALOGUE[id].derive, sequential_test)}[text]
    assert len(d) >= 20 and abs(weighed.differences - d).max() < 1e-9
    p, side = bets(d)
    assert math.isclose(weighed.evidence.p, p, rel_tol=1e-9) and weighed.evidence.side == side

def test_the_best_of_four_by_hand():
    "One of the rows with FedDecorr must be ahead of all without it; four tries cost a factor of four, either way."
    text, id = 'the highest accuracy of all is with FedDecorr (alpha 0.05)', 'feddecorr/table1'
    t = raw(id)
    wide = t[t.alpha == .05].pivot_table(index='seed', columns='method', values='late')
    four = ['FedAvg', 'FedProx', 'FedAvgM', 'MOON']
    e = CATALOGUE[id]
    [w] = [w for w in evaluate(e.claims, *found_rows(e, 'embedded'), e.derive, sequential_test) if w.claim == text]
    ours = [f'{m}+FedDecorr' for m in four]
    best = lambda names: wide[wide[names].mean().idxmax()]
    assert abs(w.differences - (best(ours) - best(four))).max() < 1e-9 and w.evidence.side == -1
    against = lambda a: [p for p, side in (bets((wide[a] - wide[b]).to_numpy()) for b in four) if side < 0]
    assert math.isclose(w.evidence.p, max(min(1, 4*min(against(a))) for a in ours), rel_tol=1e-9)

@pytest.mark.parametrize('name, calls', [('resnet20', 19), ('feddecomp_resnet8', 7), ('preact_resnet18', 17)])
def test_every_relu_is_a_layer_whether_a_module_or_a_function_and_twice_if_called_twice(name, calls):
    digits = load('digits')
    task = replace(digits.subset(60), x_test=.9*digits.x_train, y_test=digits.y_train) # two batches
    net, clients = build(name, task, seed=0, width=.25), dirichlet(task.y_train, 2, 5., seed=0)
    run = federate(net, task, clients, FedAvg(), 1, Local(epochs=1), keep_locals=True, progress=False)
    last = effective_rank(spectrum(features_of(run.model, task.x_test, prepare=task.normalise)))
    ranks = layer_ranks(run, task, clients, None, None)['layer_rank']
    assert len(ranks) == calls and ranks[-1] == pytest.approx(last, rel=1e-4)
    assert own_rank(run, task, clients, None, None) == pytest.approx(last, rel=1e-4)
    assert [len(layers) for layers in activations(run, task, clients, None, None)] == [calls + 1]*2 # and the head

def test_ranks_of_a_network_that_has_diverged_and_of_networks_that_a_method_makes():
    task = load('digits')
    net, clients = build('mlp', task, seed=0, norm='batch'), dirichlet(task.y_train[:600], 4, .5, seed=0)
    for method in (FedPara(), Ditto(), PerFedAvg(alpha=.01), FedALA()): # whose tensors are not the network's
        run = federate(net, task, clients, method, 1, Local(epochs=1), keep_locals=True, progress=False)
        ranks = layer_ranks(run, task, clients, None, None)
        assert all(v > 1 for each in ranks.values() for v in each) and own_rank(run, task, clients, None, None) > 1
    run.state = replace(run.state, params={k: v*math.nan for k, v in run.state.params.items()})
    ranks = layer_ranks(run, task, clients, None, None)
    assert set(ranks['layer_rank']) == {None} and None not in ranks['local_layer_rank']
    run.method = FedAvg()
    assert own_rank(run, task, clients, None, None) is None
