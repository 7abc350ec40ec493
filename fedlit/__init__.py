__version__ = "0.1.0"

def __getattr__(name):
    if name != 'check': raise AttributeError(f"module 'fedlit' has no attribute {name!r}")
    from fedlit.laws import check # late, as it imports torch
    return check
