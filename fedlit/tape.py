"Now fedlit.engine.tape. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.tape', 'fedlit.engine.tape')
