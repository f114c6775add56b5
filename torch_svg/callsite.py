"""Who is calling: the transformer whose forward runs, and the pipeline whose loop runs it.

diffusers hands a processor nothing but its attention module, and pipelines hand a transformer neither the step index
nor the number of steps (WanPipeline alone does, through ``cache_context``). Both are on the call stack, as the
``self`` of the frames above, for every pipeline and every diffusers version; reading them there needs no hook on the
pipeline, no copy of its loop and no read from the device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass
class RunningForward:
    """A model's forward call that is on the stack."""

    model: torch.nn.Module
    args: tuple
    kwargs: dict


def running_forward() -> RunningForward | None:
    """The innermost diffusers model whose call is on the stack, with the inputs it was called with."""
    from diffusers import ModelMixin

    call = torch.nn.Module._call_impl.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            caller = frame.f_locals
            if isinstance(caller.get("self"), ModelMixin):
                return RunningForward(caller["self"], caller.get("args", ()), caller.get("kwargs", {}))
        frame = frame.f_back
    return None


def running_call_values(pipeline_class: str, names: tuple[str, ...]) -> dict:
    """The local variables ``names`` of the call of a pipeline of this class on the stack.

    For what a pipeline knows and tells nobody. Empty where no such pipeline runs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if names[0] in frame.f_code.co_varnames:
            values = frame.f_locals
            if any(cls.__name__ == pipeline_class for cls in type(values.get("self")).__mro__):
                return {name: values[name] for name in names if name in values}
        frame = frame.f_back
    return {}


def running_step() -> tuple[int | None, int | None]:
    """The denoising step of the pipeline on the stack and its number of steps, in steps; None where not known.

    The scheduler counts its own steps as a Python int, whatever its timesteps are (``scheduler.step_index``, None
    before the first step unless the pipeline sets it).
    """
    from diffusers import DiffusionPipeline

    frame = sys._getframe(1)
    while frame is not None:
        pipeline = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(pipeline, DiffusionPipeline):
            return _step_of(pipeline)
        frame = frame.f_back
    return None, None


def _step_of(pipeline) -> tuple[int | None, int | None]:
    scheduler = getattr(pipeline, "scheduler", None)
    num_steps = getattr(pipeline, "_num_timesteps", None)
    if num_steps is None:
        timesteps = getattr(scheduler, "timesteps", None)
        num_steps = None if timesteps is None else len(timesteps)
    if hasattr(scheduler, "step_index"):
        return scheduler.step_index or 0, num_steps
    # DDIM and its kin keep no index; where their timesteps are on the host, the current one has a place among them
    timesteps, current = getattr(scheduler, "timesteps", None), getattr(pipeline, "_current_timestep", None)
    if isinstance(timesteps, torch.Tensor) and timesteps.device.type == "cpu" and current is not None:
        places = (timesteps == torch.as_tensor(current).cpu()).nonzero()
        if len(places):
            return int(places[0]), num_steps
    return None, num_steps
