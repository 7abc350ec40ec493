"""A stand-in for an accelerator: tensors of the device 'dev' lie in the machine's memory, and PyTorch takes them for a
GPU's.

Importing this module registers the device, once and for good, so tests import it in processes of their own (`UNABLE`
says why where PyTorch is too old). What it guarantees:

- **Numbers.** Every operation is the CPU's, on the same memory: results agree with the CPU's to the last bit. Views,
  strides, data pointers and what is written in place are real, so a recorder that looks at memory sees what it would
  see on a GPU. Convolutions may be done by another of the CPU's kernels, and then differ by rounding.
- **Refusals.** An operation that mixes 'dev' and 'cpu' fails as on CUDA: with `RuntimeError: Expected all tensors to be
  on the same device`. Numbers without dimensions may come from the CPU, and so may indices. A generator of the CPU
  draws nothing here.
- **Counts.** `counts` has every operation by name; 'SYNC', how often the host waited for a number or a shape; 'TO CPU'
  and 'FROM CPU', how many tensors crossed. `places` says where in fedlit the host read something.
- **No double precision**, inside of `limits(double=False)`: float64 is refused as on Apple's devices.

- **Autocast** of products, as on the CPU: `CASTED` of them are done in the lower precision.

Nothing is said about speed or memory.
"""
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
import torch
from torch.utils import backend_registration

# since torch 2.10 (pytorch/pytorch#157859)
UNABLE = ('' if hasattr(backend_registration, '_setup_privateuseone_for_python_backend')
          else f'torch {torch.__version__} has no backends written in Python; they came with 2.10')
READS = 'SYNC', 'TO CPU'
THROUGH = 'fedlit.ground.tree', 'fedlit.ground.draws' # where others' reads pass through
counts, places, _double = Counter(), Counter(), True

def reads():
    "How often the host waited for the device so far."
    return sum(counts[k] for k in READS)

@contextmanager
def counted():
    "Inside of it, counts begin at zero; a dictionary that has them at the end."
    kept, seen = (counts.copy(), places.copy()), {}
    counts.clear()
    places.clear()
    try: yield seen
    finally:
        seen.update(counts, reads=reads(), places=dict(places))
        for now, before in zip((counts, places), kept): now.update(before)

@contextmanager
def limits(double):
    "Inside of it, is there double precision?"
    global _double
    before, _double = _double, double
    try: yield
    finally: _double = before

# ---- tensors: two on one memory ----

PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) # for kernels that look at shapes only

def here(v): return isinstance(v, torch.Tensor) and v.device.type == 'dev'

def twin(v):
    "The CPU's tensor on the memory of `v`."
    return torch.empty(0, dtype=v.dtype).set_(v.untyped_storage().host, v.storage_offset(), v.shape, v.stride())

def _storage(host):
    "A storage of the device on the CPU's memory, which it keeps alive."
    new = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device('dev', 0), host.nbytes())
    new.host = host
    return new

def _onto(v, cpu, known):
    "Let `v` show what `cpu` shows; `known` are the device's storages by the CPU's."
    host = cpu.untyped_storage()
    storage = known.setdefault(host._cdata, None) or _storage(host)
    known[host._cdata] = storage
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        PLAIN, v, storage, cpu.storage_offset(), cpu.shape, cpu.stride())

def lifted(cpu, known):
    "The device's tensor on the memory of `cpu`."
    if cpu.dtype is torch.float64 and not _double:
        raise TypeError("Cannot convert a dev tensor to float64: this device has no double precision")
    return _onto(torch._C._acc.create_empty_tensor((0,), cpu.dtype), cpu, known)

# ---- operations ----

SHAPES = 'as_strided', 'view', 'set_' # of the CPU's kernels, those that look at no numbers
PUTTING = 'index_put', 'index_put_', '_index_put_impl_'
SCALARS = 'fill_', 'masked_fill', 'masked_fill_', *PUTTING # take numbers from the CPU, as elementwise operations do
INDEXING = 'index', '_unsafe_index', *PUTTING
WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} # for numbers, or for how many there are

def _map(f, v): return type(v)(_map(f, u) for u in v) if isinstance(v, (list, tuple)) else f(v)

def _flat(vs): return [u for v in vs for u in (_flat(v) if isinstance(v, (list, tuple)) else [v])]

def _refuse(op, name, args, given):
    "An operation that mixes devices, as PyTorch's own kernels refuse it."
    may = lambda v: not v.dim() and (torch.Tag.pointwise in op.tags or name in SCALARS)
    indices = {id(i) for i in args[1]} if name in INDEXING and here(args[0]) else ()
    for v in given:
        if isinstance(v, torch.Tensor) and not here(v) and not may(v) and id(v) not in indices:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, dev:0 "
                               f"and {v.device}! ({op} got {tuple(v.shape)} from there)")
        if isinstance(v, torch.Generator) and v is not torch.default_generator:
            raise RuntimeError(f"Expected a 'dev' device type for generator but found '{v.device}' ({op})")

def _masked(name, args): # elsewhere PyTorch calls `nonzero`
    return name in PUTTING and any(here(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])

def _note(kind):
    "Count, and where the host reads, say where in fedlit."
    counts[kind] += 1
    if kind not in READS: return
    frame = sys._getframe(2)
    name = lambda f: f.f_globals.get('__name__', '')
    while frame and (not name(frame).startswith('fedlit.') or name(frame) in THROUGH): frame = frame.f_back
    places[f'{name(frame)}:{frame.f_lineno}' if frame else 'elsewhere'] += 1

def _copied(source, target):
    "`target`, with the numbers of `source`; one of them is on the device, or both are."
    if here(source) != here(target): _note('TO CPU' if here(source) else 'FROM CPU')
    (twin(target) if here(target) else target).copy_(twin(source) if here(source) else source)
    return target

def dispatch(op, *args, **kwargs):
    "One operation on tensors of the device: the CPU's, on the same memory."
    name = op.overloadpacket.__name__
    counts[name] += 1
    if name in SHAPES: return op.redispatch(PLAIN, *args, **kwargs)
    if name == '_copy_from': return _copied(*args[:2])
    given = _flat([*args, *kwargs.values()])
    _refuse(op, name, args, given)
    if WAITS & {*op.tags} or _masked(name, args): _note('SYNC')
    pairs = {id(v): (v, twin(v)) for v in given if here(v)}
    known = {c.untyped_storage()._cdata: v.untyped_storage() for v, c in pairs.values()}
    ours = {id(c): v for v, c in pairs.values()}
    down = lambda v: pairs[id(v)][1] if id(v) in pairs else torch.device('cpu') if isinstance(v, torch.device) else v
    up = lambda c: c if not isinstance(c, torch.Tensor) else ours[id(c)] if id(c) in ours else lifted(c, known)
    numbers = any(isinstance(v, (bool, int, float)) and str(a.type) == 'Tensor'
                  for a, v in zip(op._schema.arguments, args))
    out = CONVOLUTION.get(name, op.overloadpacket if numbers else op)(
        *_map(down, args), **{k: _map(down, v) for k, v in kwargs.items()})
    if op._schema.is_mutable: # `out=` may have grown
        for v, c in pairs.values():
            if v.shape != c.shape or v.data_ptr() != c.data_ptr() or v.stride() != c.stride(): _onto(v, c, known)
    return _map(up, out)

def _convolution_backward(grad, x, weight, *rest):
    return torch.ops.aten.convolution_backward(grad, x, weight, [grad.shape[1]] if rest[-1][2] else None, *rest)

# what PyTorch calls on devices that it does not know
CONVOLUTION = dict(convolution_overrideable=torch.ops.aten.convolution.default,
                   convolution_backward_overrideable=_convolution_backward)

# for the rest the fallback is enough; but `torch.tensor` calls these inside of modes, which do not find a fallback
BY_NAME = (*CONVOLUTION, 'empty.memory_format', 'empty_strided', '_copy_from', '_local_scalar_dense')

# ---- autocast ----

CASTED = 'linear', 'matmul', 'mm', 'bmm', 'baddbmm', 'addmm', 'addbmm', 'conv1d', 'conv2d', 'convolution'
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

def casted(op, *args, **kwargs):
    "A product of tensors in the precision that was asked for."
    to = torch.get_autocast_dtype('dev')
    down = lambda v: v.to(to) if here(v) and v.is_floating_point() and v.dtype is not torch.double else v
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return op(*map(down, args), **{k: down(v) for k, v in kwargs.items()})

# ---- the device ----

_clone = torch.UntypedStorage.clone

def _cloned(storage):
    "As `copy.deepcopy` of a network asks for it."
    return _storage(storage.host.clone()) if storage.device.type == 'dev' else _clone(storage)

class Device:
    "What `torch.dev` is."
    default_generators = torch.default_generator, # draws are the CPU's
    def is_initialized(self): return True
    def is_available(self): return True
    def current_device(self): return 0
    def device_count(self): return 1
    def get_rng_state(self, device=None): return torch.get_rng_state()
    def set_rng_state(self, state, device=None): torch.set_rng_state(state)
    def manual_seed_all(self, seed): pass
    def _is_in_bad_fork(self): return False
    def get_amp_supported_dtype(self): return [torch.bfloat16, torch.float16]

if not UNABLE:
    backend_registration._setup_privateuseone_for_python_backend('dev', backend_module=Device())
    _library = torch.library.Library('_', 'IMPL')
    _library.fallback(dispatch, 'PrivateUse1')
    _own = torch.library.Library('aten', 'IMPL')
    for _name in BY_NAME:
        _packet, _, _overload = _name.partition('.')
        _op = getattr(getattr(torch.ops.aten, _packet), _overload or 'default')
        _own.impl(_name, partial(dispatch, _op), 'PrivateUse1')
    _library.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
    for _name in CASTED:
        _own.impl(_name, partial(casted, getattr(torch.ops.aten, _name).default), 'AutocastPrivateUse1')
    torch.UntypedStorage.clone = _cloned
