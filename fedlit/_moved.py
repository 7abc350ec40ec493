"""Old names of modules, for one release. This file and the short modules that call `moved` are written by hand:
every other module of the package is made from a notebook of nbs/, and `nbdev_export` leaves these alone."""
import importlib, runpy, sys, types, warnings

GOES = '0.3.0' # the first release without the old names

class Several(types.ModuleType):
    "A module whose names live in several others. To set a name is to set it there, to delete it is to take that back."
    def __init__(self, old, homes):
        super().__init__(old)
        self.__dict__.update(__homes__=homes, __before__={})

    def _of(self, name): return [vars(h) for h in self.__homes__ if name in vars(h) and not name.startswith('__')]

    def __getattr__(self, name):
        if found := self._of(name): return found[0][name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; its names are now in "
                             + ', '.join(h.__name__ for h in self.__homes__))

    def __setattr__(self, name, value):
        if not (found := self._of(name)): return super().__setattr__(name, value)
        self.__before__.setdefault(name, [names[name] for names in found])
        for names in found: names[name] = value

    def __delattr__(self, name):
        if name not in self.__before__: return super().__delattr__(name)
        for names, value in zip(self._of(name), self.__before__.pop(name)): names[name] = value

    def __dir__(self): return sorted({n for home in self.__homes__ for n in dir(home)})

def _importer(frame):
    "The frame of the user's line: imports pass through Python's own modules."
    while frame.f_back and frame.f_globals.get('__name__', '').partition('.')[0] == 'importlib': frame = frame.f_back
    return frame

def moved(
    name,        # `__name__` of the module that calls this; "__main__" under `python -m`
    old,         # its name, such as "fedlit.axes"
    *new,        # where its names live now; of several modules, `python -m` runs the first
    quiet=False, # bool: is the old name to stay, without a warning?
):
    "Let the module `old` be the module `new`: the same object, or one that reads and writes through."
    run = name == '__main__'
    if not quiet:
        frame = sys._getframe(1) if run else _importer(sys._getframe(2))
        warnings.warn_explicit(f"{old} is now {', '.join(new)}; fedlit {GOES} will not have the old name",
                               DeprecationWarning, frame.f_code.co_filename, frame.f_lineno,
                               module=frame.f_globals.get('__name__', ''),
                               registry=frame.f_globals.setdefault('__warningregistry__', {}))
    if run: return runpy.run_module(new[0], run_name=name, alter_sys=True)
    homes = [importlib.import_module(n) for n in new]
    sys.modules[old] = homes[0] if len(homes) == 1 else Several(old, homes)
