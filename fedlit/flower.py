"The same as `fedlit.scale.flower`, under a short name. Written by hand."
import sys
from .scale import flower
sys.modules[__name__] = flower
