"Now fedlit.scale.costs. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.costs', 'fedlit.scale.costs')
