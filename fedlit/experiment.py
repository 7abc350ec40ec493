"Now in modules of fedlit.papers. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.experiment', 'fedlit.papers.settings', 'fedlit.papers.measures')
