"Now fedlit.papers.theory. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.theory', 'fedlit.papers.theory')
