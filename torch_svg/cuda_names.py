"""What a script calls "cuda" is the XLA device while `cuda_names` is in place, and nothing is left behind after it."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from types import SimpleNamespace

import torch
import torch.utils._device
from torch.overrides import TorchFunctionMode

# these ask torch.cuda what they themselves can do (kernels, memory, device maps), and must go on hearing the truth
_LIBRARIES = frozenset(
    (
        *("accelerate", "diffusers", "huggingface_hub", "jax", "peft", "safetensors", "torch", "torch_svg"),
        *("torch_xla", "torchvision", "transformers"),
    )
)


class Replacements:
    """Attributes of other modules and classes, replaced until `restore`."""

    def __init__(self):
        self._before = []

    def set(self, owner, name: str, value) -> None:
        """Replaces ``owner.name``; an attribute that ``owner`` only inherits is its own no more after `restore`."""
        self._before.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Puts everything back, the last replacement first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def is_cuda(value) -> bool:
    """Whether a value names a CUDA device: "cuda", "cuda:0", torch.device("cuda")."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) is not None


def xla_device(value=None) -> torch.device:
    """The XLA device that a CUDA device's name means, by its index."""
    import torch_xla

    index = torch.device(value).index if value is not None else None
    return torch_xla.device() if index is None else torch.device("xla", index)


@contextlib.contextmanager
def cuda_names(note=print):
    """Makes "cuda" mean the XLA device in torch's functions, generators, autocast and ``torch.cuda``.

    Random numbers are drawn on the host and moved, so that a seed gives what it gives on a CPU: torch_xla neither has
    generators nor follows ``torch.manual_seed`` on its device.

    Args:
        note: ``note(text)`` is told what is not done as asked.
    """
    replaced, default = Replacements(), _default_device()
    try:
        _replace_torch(replaced, note)
        _replace_torch_cuda(replaced)
        with _CudaIsXla():
            yield
    finally:
        replaced.restore()
        if _default_device() is not default:
            torch.set_default_device(default and default.device)
        if default is None and hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
            # torch cannot tell its default device once one was set and taken back
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _default_device():
    """The context in which ``torch.set_default_device`` puts new tensors, None where it was not called."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


class _CudaIsXla(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            return args[0].to(xla_device(_indexed(*args[1:2], **kwargs)))
        args = tuple(xla_device(value) if is_cuda(value) else value for value in args)
        kwargs = {name: xla_device(value) if is_cuda(value) else value for name, value in kwargs.items()}
        if function in _RANDOM:
            return _drawn_on_host(function, args, kwargs)
        if function in _RANDOM_LIKE and args and args[0].device.type == "xla":
            kwargs.setdefault("device", args[0].device)
            return _drawn_on_host(function, (torch.empty_like(args[0], device="cpu"), *args[1:]), kwargs)
        return function(*args, **kwargs)


_RANDOM = frozenset((torch.randn, torch.rand, torch.randint, torch.randperm))
_RANDOM_LIKE = frozenset((torch.randn_like, torch.rand_like, torch.randint_like))


def _drawn_on_host(function, args, kwargs):
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "xla":
        return function(*args, **kwargs)
    return function(*args, **{**kwargs, "device": "cpu"}).to(device)


def _indexed(device=None, **options):
    """A CUDA device's name from what ``Tensor.cuda`` takes: None, an index, a name, a device."""
    return f"cuda:{device}" if isinstance(device, int) else device


def _replace_torch(replaced: Replacements, note) -> None:
    replaced.set(torch, "Generator", _host_generators(torch.Generator))
    for owner, name, argument in (
        (torch.amp.autocast_mode.autocast, "__init__", "device_type"),
        (torch.utils._device.DeviceContext, "__init__", "device"),
    ):
        replaced.set(owner, name, _naming_xla(getattr(owner, name), argument, note))

    def load(file, map_location=None, **options):
        # what is loaded is copied into modules, or moved by its next `.to("cuda")`
        return stock_load(file, map_location="cpu" if is_cuda(map_location) else map_location, **options)

    stock_load = torch.load
    replaced.set(torch, "load", load)

    def compile_nothing(model=None, **options):
        note("torch.compile is passed over: XLA compiles the whole graph of every step anyway")
        return (lambda function: function) if model is None else model

    replaced.set(torch, "compile", _for_scripts(compile_nothing, torch.compile))
    replaced.set(torch.nn.Module, "compile", lambda self, *args, **kwargs: compile_nothing(self) and None)


def _naming_xla(init, argument, note):
    """An ``__init__`` whose first argument names a device, which "cuda" replaces by "xla"."""

    def wrapper(self, device=None, *args, **kwargs):
        device = kwargs.pop(argument, device)
        if is_cuda(device):
            device = "xla" if argument == "device_type" else xla_device(device)
            if torch.float16 in (*args, kwargs.get("dtype")):
                note(FLOAT16)
                args = tuple(torch.bfloat16 if value is torch.float16 else value for value in args)
                kwargs = {name: torch.bfloat16 if value is torch.float16 else value for name, value in kwargs.items()}
        return init(self, device, *args, **kwargs)

    return wrapper


FLOAT16 = "float16 becomes bfloat16, the half precision that a TPU multiplies"


def _host_generators(stock):
    class Kind(type):
        # generators that torch itself makes are still generators
        def __instancecheck__(cls, instance):
            return isinstance(instance, stock)

        def __subclasscheck__(cls, other):
            return issubclass(other, stock)

        def __call__(cls, device="cpu"):
            on_xla = is_cuda(device) or torch.device(device).type == "xla"
            return stock("cpu" if on_xla else device)

    return Kind("Generator", (), {"__doc__": stock.__doc__, "__module__": stock.__module__})


def _replace_torch_cuda(replaced: Replacements) -> None:
    for name, ours in _torch_cuda().items():
        replaced.set(torch.cuda, name, _for_scripts(ours, torch.cuda.__dict__.get(name)))
    replaced.set(torch.cuda, "Event", Event)
    if hasattr(torch, "accelerator"):
        replaced.set(torch.accelerator, "synchronize", _for_scripts(_synchronize, torch.accelerator.synchronize))


def _for_scripts(ours, stock):
    def function(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return (stock if caller in _LIBRARIES else ours)(*args, **kwargs)

    return function


def _torch_cuda() -> dict:
    """``torch.cuda`` as a script meets it: one device per XLA device, with XLA's own figures where it has them."""

    def supported(dtype=None, **options):
        return True

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: _runtime().addressable_device_count(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": lambda seed: torch.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: torch.manual_seed(seed) and None,
        # scripts ask these two for the dtype to load in
        "is_bf16_supported": supported,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: _name(),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=_name(), major=8, minor=0, total_memory=_memory("bytes_limit"), multi_processor_count=1
        ),
        "memory_allocated": lambda device=None: _memory("bytes_used"),
        "memory_reserved": lambda device=None: _memory("bytes_used"),
        "max_memory_allocated": lambda device=None: _memory("peak_bytes_used"),
        "max_memory_reserved": lambda device=None: _memory("peak_bytes_used"),
        "reset_peak_memory_stats": lambda device=None: None,
        "reset_max_memory_allocated": lambda device=None: None,
        "mem_get_info": lambda device=None: (_memory("bytes_limit") - _memory("bytes_used"), _memory("bytes_limit")),
    }


def _runtime():
    import torch_xla.runtime

    return torch_xla.runtime


def _name() -> str:
    import torch_xla.core.xla_model

    return torch_xla.core.xla_model.xla_device_hw(xla_device())


def _memory(entry: str) -> int:
    import torch_xla.core.xla_model

    try:
        return int(torch_xla.core.xla_model.get_memory_info(xla_device()).get(entry, 0))
    except RuntimeError:
        # XLA:CPU keeps no account of its memory
        return 0


def _synchronize(device=None) -> None:
    import torch_xla

    torch_xla.sync(wait=True)


class Event:
    """``torch.cuda.Event`` by the host's clock: recording waits for the device."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._seconds = None

    def record(self, stream=None) -> None:
        _synchronize()
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        _synchronize()

    def query(self) -> bool:
        return self._seconds is not None

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return 1000 * (end._seconds - self._seconds)
