"The same as fedlit.scale.flower, under a short name. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.flower', 'fedlit.scale.flower', quiet=True)
