"""What the pages of the papers claim and plan: sentences say what is judged, rounds fit into a slice."""
import re
from fedlit.papers.catalogue import CATALOGUE

def claims(): return [(e.id, text, numbers) for e in CATALOGUE.values() for text, numbers in e.claims.items()]

def test_a_rank_correlation_is_called_a_tendency():
    "Kendall's tau above zero leaves room for pairs in the other order."
    by_rank = {(id, text) for id, text, numbers in claims() if numbers.unit == 'tau'}
    assert {'feddecorr/fig8', 'feddecorr/tpami-fig4', 'feddse/fig3.6', 'fedgse/fig4.4'} <= {id for id, _ in by_rank}
    assert not (bold := {(id, text) for id, text in by_rank if not re.search(r'\btends? to\b', text)}), bold

def test_a_gain_minus_a_gain_is_not_called_nothing():
    "A step that is larger than all later ones together says where most is gained, not that no more is gained."
    assert not (bold := {(id, text) for id, text, _ in claims() if 'hardly' in text}), bold
