"""What the pages of the papers claim and plan: sentences say what is judged, rounds fit into a slice."""
import re
import pandas as pd
from fedlit.papers.catalogue import CATALOGUE
from fedlit.papers.claims import judge
from fedlit.papers.entries import judged

def claims(): return [(e.id, text, numbers) for e in CATALOGUE.values() for text, numbers in e.claims.items()]

def test_a_rank_correlation_is_called_a_tendency():
    "Kendall's tau above zero leaves room for pairs in the other order."
    by_rank = {(id, text) for id, text, numbers in claims() if numbers.unit == 'tau'}
    assert {'feddecorr/fig8', 'feddecorr/tpami-fig4', 'feddse/fig3.6', 'fedgse/fig4.4'} <= {id for id, _ in by_rank}
    assert not (bold := {(id, text) for id, text in by_rank if not re.search(r'\btends? to\b', text)}), bold

def test_a_gain_minus_a_gain_is_not_called_nothing():
    "A step that is larger than all later ones together says where most is gained, not that no more is gained."
    assert not (bold := {(id, text) for id, text, _ in claims() if 'hardly' in text}), bold

def ratio_rows(**accuracies):
    "Rows of `feddecomp/ratios`: the accuracies of the three ratios, one a seed, by kind of layer."
    rows = pd.DataFrame([dict(data='digits', layers=layers, ratio=r, seed=i, personal_late=v)
                         for layers, table in accuracies.items() for r, vs in table.items() for i, v in enumerate(vs)])
    rows.attrs['labels'] = ['data', 'layers', 'ratio', 'seed']
    return rows

def test_a_ratio_that_changes_nothing_is_not_judged():
    "A network without convolutions is the same for every ratio of theirs, and no number of seeds would tell."
    e, same, other = CATALOGUE['feddecomp/ratios'], [80., 81., 82.], {.2: [70., 72., 71.], 1.: [79., 78., 79.5]}
    flat = ratio_rows(r_l={.6: same, **other}, r_c=dict.fromkeys((.2, .6, 1.), same))
    of = lambda rows, layers: judge({k: v for k, v in e.claims.items() if layers in k}, rows)
    t = of(flat, 'r_c')
    assert len(t) == 2 and set(t.verdict) == {'not evaluated'} and set(t.measured) == {'r_c changes nothing here'}
    for rows, layers in ((flat, 'r_l'), (ratio_rows(r_l={.6: same, **other}, r_c={.6: same, **other}), 'r_c')):
        assert of(rows, layers).seeds.tolist() == [3, 3]
    lines = lambda rows: [text.get_text() for text in e.draw(rows).axes[0].get_legend().get_texts()]
    assert lines(flat) == ['layers r_l'] and len(lines(ratio_rows(r_l={.6: same}, r_c={.6: same, **other}))) == 1

def test_the_claims_about_convolutions_wait_for_a_network_that_has_some():
    "On digits, where it is a perceptron that is trained."
    t = judged([CATALOGUE['feddecomp/ratios']], 'embedded').set_index('claim')
    assert (t[t.index.str.contains('r_c')].verdict == 'not evaluated').all()
    assert (t[t.index.str.contains('r_l')].seeds >= 20).all()
