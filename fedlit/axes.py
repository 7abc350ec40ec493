"Now fedlit.engine.axes. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.axes', 'fedlit.engine.axes')
