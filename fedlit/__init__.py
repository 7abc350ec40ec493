__version__ = "0.1.0"

def __getattr__(name):
    if name == 'check': from fedlit.laws import check as found # late, as they import torch
    elif name == 'interactions': from fedlit.papers.interactions import interactions as found
    else: raise AttributeError(f"module 'fedlit' has no attribute {name!r}")
    return found
