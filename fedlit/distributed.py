"Now fedlit.scale.torchrun. Written by hand: see fedlit/_moved.py"
from fedlit._moved import moved
moved(__name__, 'fedlit.distributed', 'fedlit.scale.torchrun')
