"Now fedlit.engine.files. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.files', 'fedlit.engine.files')
