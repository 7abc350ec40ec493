"Now fedlit.engine.guard. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.guard', 'fedlit.engine.guard')
