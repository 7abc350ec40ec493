"Now fedlit.engine.table. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.table', 'fedlit.engine.table')
