"""What the pages of the papers claim and plan: sentences say what is judged, rounds fit into a slice."""
import re, shlex
from pathlib import Path
import matplotlib.pyplot as plt, pytest, torch
from fedlit.cli import parser
from fedlit.data import load
from fedlit.local import SGD, Local
from fedlit.methods import SOLO, FedAvg
from fedlit.models import build
from fedlit.papers.catalogue import plan
from fedlit.papers.entries import CATALOGUE, SCALES, found_rows, judged, row_name, select, whole
from fedlit.papers.settings import address
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
    named = [(id, text) for id, text, _ in claims() if 'Scaffold' in text]
    assert {'moon/table1', 'feddecorr/table8', 'feddecorr/table9'} <= {id for id, _ in named}
    assert all('corrected form' in text for _, text in named), named

def test_the_claims_about_convolutions_wait_for_a_network_that_has_some():
    "On digits, where a perceptron is trained, no run asks for a ratio of theirs."
    e = CATALOGUE['feddecomp/ratios']
    tried = {scale: {labels['layers'] for labels, _ in e.grid(scale)} for scale in SCALES}
    assert tried == dict(embedded={'r_l'}, short={'r_l', 'r_c'}, paper={'r_l', 'r_c'})
    t = judged([e], 'embedded').set_index('claim')
    assert (t[t.index.str.contains('r_c')].verdict == 'not evaluated').all()
    assert (t[t.index.str.contains('r_l')].seeds >= 20).all()

@pytest.mark.parametrize('id', ['feddecorr/tpami-fig4', 'feddecorr/tpami-fig6'])
def test_local_and_global_models_are_followed_through_the_rounds_on_real_images(id):
    e = CATALOGUE[id]
    made = dict(e.draws)['rounds'](whole(*found_rows(e, 'short')))
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
