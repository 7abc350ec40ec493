"Now in modules of fedlit.papers. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.catalogue', 'fedlit.papers.catalogue', 'fedlit.papers.entries', 'fedlit.papers.claims',
      'fedlit.papers.drawings', 'fedlit.papers.feddecorr', 'fedlit.papers.moon', 'fedlit.papers.feddecomp',
      'fedlit.papers.feddse', 'fedlit.papers.fedgse')
