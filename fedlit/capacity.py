"Now fedlit.scale.capacity. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.capacity', 'fedlit.scale.capacity')
