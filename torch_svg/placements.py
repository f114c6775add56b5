"""Where the parts of a pipeline stand when a script asks for what only CUDA has: offloading, device maps, backends."""

from __future__ import annotations

import contextlib
import functools

import torch

from .cuda_names import FLOAT16, Replacements, is_cuda, xla_device


@contextlib.contextmanager
def placements(note=print):
    """Turns what diffusers and transformers can do on CUDA alone into a placement on the XLA device.

    Model and sequential offloading move weights around a forward, which on XLA would mean to wait and to copy at every
    step: the encoders of prompts and images stay on the host and run there once, everything else on the device.

    Args:
        note: ``note(text)`` is told what is not done as asked.
    """
    replaced, hooks = Replacements(), []
    try:
        _replace_loading(replaced, note)
        _replace_offloading(replaced, note, hooks)
        _replace_backends(replaced, note)
        yield
    finally:
        replaced.restore()
        for hook in hooks:
            hook.remove()


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module's first parameter or buffer stands; the host where it has neither."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def modules_of(pipe) -> dict[str, torch.nn.Module]:
    """The components of a pipeline that hold weights, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _replace_loading(replaced: Replacements, note) -> None:
    import diffusers
    import transformers

    for owner in (diffusers.DiffusionPipeline, diffusers.ModelMixin, transformers.PreTrainedModel):
        replaced.set(owner, "from_pretrained", classmethod(_loading(owner.__dict__["from_pretrained"].__func__, note)))


def _loading(stock, note):
    @functools.wraps(stock)
    def from_pretrained(cls, *args, **kwargs):
        device_map = kwargs.pop("device_map", None)
        if kwargs.pop("quantization_config", None) is not None:
            note(f"{cls.__name__} is loaded without its quantization_config, which needs CUDA kernels")
        for name in {"dtype", "torch_dtype"} & set(kwargs):
            kwargs[name] = _without_float16(kwargs[name], note)
        loaded = stock(cls, *args, **kwargs)
        if device_map is not None and str(device_map) != "cpu":
            if not is_cuda(device_map):
                note(f"device_map={device_map!r} becomes a placement: all of {cls.__name__} on the XLA device")
            # with output_loading_info a tuple comes back
            (loaded[0] if isinstance(loaded, tuple) else loaded).to(xla_device())
        return loaded

    return from_pretrained


def _without_float16(dtype, note):
    if isinstance(dtype, dict):
        return {name: _without_float16(value, note) for name, value in dtype.items()}
    if dtype in (torch.float16, "float16"):
        note(FLOAT16)
        return torch.bfloat16
    return dtype


def _replace_offloading(replaced: Replacements, note, hooks: list) -> None:
    import diffusers
    import diffusers.hooks.group_offloading

    pipeline = diffusers.DiffusionPipeline
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"):
        if hasattr(pipeline, name):
            replaced.set(pipeline, name, _spreading(getattr(pipeline, name), note, hooks))

    stock_to = pipeline.__dict__["to"]

    @functools.wraps(stock_to)
    def to(self, *args, **kwargs):
        half = torch.float16 in (*args, *kwargs.values())
        if half:
            note(FLOAT16)
            args = tuple(torch.bfloat16 if value is torch.float16 else value for value in args)
            kwargs = {name: torch.bfloat16 if value is torch.float16 else value for name, value in kwargs.items()}
        # the pipeline compares names of devices before it moves anything
        args = tuple(xla_device(value) if is_cuda(value) else value for value in args)
        kwargs = {name: xla_device(value) if is_cuda(value) else value for name, value in kwargs.items()}
        return stock_to(self, *args, **kwargs)

    replaced.set(pipeline, "to", to)

    stock_device = pipeline.__dict__["_execution_device"]

    def execution_device(self):
        # encoders that stand on the host must not draw everything else there
        for module in modules_of(self).values():
            if device_of(module).type == "xla":
                return device_of(module)
        return stock_device.__get__(self)

    replaced.set(pipeline, "_execution_device", property(execution_device))

    def stay(module, *args, **kwargs):
        note(f"group offloading becomes a placement: {type(module).__name__} stands on the XLA device")
        module.to(xla_device())

    replaced.set(diffusers.ModelMixin, "enable_group_offload", stay)
    for owner in (diffusers.hooks, diffusers.hooks.group_offloading):
        replaced.set(owner, "apply_group_offloading", stay)


def _spreading(stock, note, hooks: list):
    @functools.wraps(stock)
    def spread(self, *args, **kwargs):
        import transformers

        at_host = []
        for name, module in modules_of(self).items():
            if isinstance(module, transformers.PreTrainedModel):
                at_host.append(name)
                module.to("cpu")
                hooks.append(module.register_forward_pre_hook(_to_own_device, with_kwargs=True))
                hooks.append(module.register_forward_hook(_to_xla_device))
            else:
                module.to(xla_device())
        rest = f"{', '.join(at_host)} on the host, everything else" if at_host else "everything"
        note(f"{stock.__name__} becomes a placement: {rest} on the XLA device")

    return spread


def _to_own_device(module, args, kwargs):
    from accelerate.utils import send_to_device

    return send_to_device(args, device_of(module)), send_to_device(kwargs, device_of(module))


def _to_xla_device(module, args, output):
    from accelerate.utils import send_to_device

    return send_to_device(output, xla_device())


def _replace_backends(replaced: Replacements, note) -> None:
    import diffusers

    def pass_over_xformers(self, *args, **kwargs):
        note("xformers is passed over: on the XLA device attention runs on torch_svg's kernels")

    for owner in (diffusers.DiffusionPipeline, diffusers.ModelMixin):
        replaced.set(owner, "enable_xformers_memory_efficient_attention", pass_over_xformers)

    stock = diffusers.ModelMixin.__dict__.get("set_attention_backend")
    if stock is None:
        return

    @functools.wraps(stock)
    def set_attention_backend(self, backend, *args, **kwargs):
        if backend == "native":
            return stock(self, backend, *args, **kwargs)
        note(f"attention backend {backend!r} is passed over: on the XLA device attention runs on torch_svg's kernels")

    replaced.set(diffusers.ModelMixin, "set_attention_backend", set_attention_backend)
