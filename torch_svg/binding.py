"""Ties our processor to a transformer: which of its attention modules are video self-attention, and what the forward
that is running right now looks like (grid, step, which layers are dense)."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from dataclasses import dataclass, replace

import torch

from .callsite import running_call_values, running_step
from .families import Family, forward_inputs, set_processor
from .grid import TokenGrid
from .pattern import Pattern, Plan, sparse_plan

logger = logging.getLogger("torch_svg")


@dataclass
class Layer:
    """One attention module: the processor that it had, and its place among the video layers (None: another kind)."""

    path: str
    processor: object
    video_index: int | None


@dataclass
class ForwardState:
    """What the layers of the running forward need to know.

    ``leading_tokens`` stand before the video and are counted as text after it; ``layer_plans`` are those of video
    layers whose sequence is another one than the others'.
    """

    plan: Plan
    step: int
    dense_flags: torch.Tensor | None
    dense_reason: str | None
    leading_tokens: int
    layer_plans: dict[int, Plan]

    def plan_of(self, layer: Layer) -> Plan:
        return self.layer_plans.get(layer.video_index, self.plan)


class StepCounter:
    """Counts denoising steps over all transformers of a generation (Wan 2.2 has two).

    Inside a pipeline the scheduler's own step is used. Outside, every forward with another ``timestep`` tensor is a
    step, so that the two guidance branches of a step, which get the very same tensor, count once; call ``reset``
    between generations there.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.step = -1
        self.timestep = None

    def advance(self, timestep, pipeline_step: int | None) -> tuple[int, bool]:
        """The step of a forward, and whether a new generation starts with it."""
        if pipeline_step is not None:
            fresh = pipeline_step < self.step or self.step < 0
            self.step = pipeline_step
        else:
            fresh = self.step < 0
            if timestep is None or timestep is not self.timestep:
                self.step += 1
        if self.step == 0 and timestep is not self.timestep and self.timestep is not None:
            # a generation of one step follows another one
            fresh = True
        self.timestep = timestep
        return self.step, fresh


class Binding:
    """A transformer with our processor in its attention modules.

    Args:
        transformer: A transformer that ``family`` serves.
        family: Its declaration.
        processor: The SparseVideoAttnProcessor whose config, counter and record are used.
        wrapped: Module path -> the processor to wrap, where it is known; others get the module's default class.
    """

    def __init__(self, transformer, family: Family, processor, wrapped: dict[str, object] | None = None):
        wrapped = wrapped or {}
        video = family.video_attention_modules(transformer)
        order = {path: index for index, path in enumerate(video)}
        self.family = family
        self.processor = processor
        self.num_video_layers = len(video)
        self.layers: dict[torch.nn.Module, Layer] = {}
        for path, module in transformer.named_modules():
            if getattr(module, "processor", None) is processor:
                original = wrapped.get(path) or family.default_processor_of(transformer, path, module)
                self.layers[module] = Layer(path, original, order.get(path))
        self.state: ForwardState | None = None
        self._video_order = order
        self._warned = False
        self._transformer = weakref.ref(transformer)
        self._hook = transformer.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True)

    @property
    def transformer(self):
        """The bound transformer, or None when it is gone."""
        return self._transformer()

    def adopt(self, module) -> Layer:
        """Adds a module in which the processor was set after the others."""
        path = next(path for path, other in self.transformer.named_modules() if other is module)
        layer = self.layers[module] = Layer(
            path, self.family.default_processor_of(self.transformer, path, module), self._video_order.get(path)
        )
        return layer

    def release(self) -> None:
        """Gives every module the processor that it had, and leaves the transformer as it was."""
        self._hook.remove()
        for module, layer in self.layers.items():
            if module.processor is self.processor:
                set_processor(module, layer.processor)

    def begin_forward(self, transformer, args: tuple, kwargs: dict) -> None:
        """Prepares a forward: grid, plan, step, dense layers.

        Raises:
            ValueError: The config does not fit the model, the grid or the number of steps. The transformer has its
                old processors again by then.
        """
        try:
            self.state = self._new_state(transformer, forward_inputs(transformer, args, kwargs))
        except (ValueError, NotImplementedError):
            self.processor.forget(self)
            self.release()
            raise

    def _new_state(self, transformer, inputs: dict) -> ForwardState:
        processor, config = self.processor, self.processor.config
        family = self.family
        if family.pipeline_values is not None:
            inputs = {**inputs, **running_call_values(*family.pipeline_values)}
        grid = family.grid(transformer, inputs)
        leading_tokens = family.leading_tokens(transformer, inputs) if family.leading_tokens else 0
        resolved = config.resolve(family.preset(transformer, grid), grid.video_tokens)
        if resolved.dense_reason is None:
            rules = (resolved.density, config.density_rule, config.sink)
        else:
            rules = (1.0, "pairs", "none")
        plan = plan_for(grid, *rules)
        layer_plans = {}
        if family.layer_grid is not None:
            for path, index in self._video_order.items():
                # the same patterns on the video; the other tokens, exact there too, do not count as text
                layer_plans[index] = replace(plan, grid=family.layer_grid(transformer, path, grid))
        pipeline_step, num_steps = running_step()
        step, fresh = processor.counter.advance(inputs.get(family.timestep_argument), pipeline_step)
        if fresh:
            processor.record.start_generation()
        record = processor.record
        record.plan, record.layer_plans = plan, layer_plans
        record.start_forward(step)
        if resolved.dense_reason is not None:
            if not self._warned:
                logger.warning("sparse video attention stays dense: %s", resolved.dense_reason)
                self._warned = True
            return ForwardState(plan, step, None, resolved.dense_reason, leading_tokens, layer_plans)
        dense_step = step < resolved.warmup_count(num_steps)
        dense_layers = resolved.dense_layer_count(self.num_video_layers)
        record.dense_layers.update(range(dense_layers))
        if dense_step:
            record.dense_steps.add(step)
        flags = tuple(dense_step or layer < dense_layers for layer in range(self.num_video_layers))
        # a model that packs its latents into lists has no tensor of this name
        latents = inputs.get("hidden_states")
        device = latents.device if isinstance(latents, torch.Tensor) else next(transformer.parameters()).device
        return ForwardState(plan, step, _flags_on(flags, device), None, leading_tokens, layer_plans)


class _ForwardHook:
    """The forward pre-hook of a bound transformer."""

    def __init__(self, binding: Binding | None):
        self.binding = binding

    def __deepcopy__(self, memo):
        # a copied transformer is bound anew on its first forward; until then its copy of the hook does nothing
        return _ForwardHook(None)

    def __call__(self, transformer, args, kwargs) -> None:
        binding = self.binding
        if binding is not None and any(module.processor is binding.processor for module in binding.layers):
            binding.begin_forward(transformer, args, kwargs)


@functools.lru_cache(maxsize=64)
def plan_for(grid: TokenGrid, density: float, density_rule: str, sink: str) -> Plan:
    """The plan for a density: spatial, temporal and dense patterns on a grid.

    Raises:
        ValueError: The sink alone has more pairs than ``density`` allows.
    """
    if density_rule == "pairs":
        return sparse_plan(grid, density, sink)
    tokens = grid.tokens
    band_share = density - 2 * grid.text_tokens / tokens
    if band_share <= 0:
        raise ValueError(
            f"SVG's knob {density} is spent by the {grid.text_tokens} text tokens alone: expected more than "
            f"{2 * grid.text_tokens / tokens:.3f}"
        )
    half_width = math.ceil(tokens * (1 - math.sqrt(1 - min(band_share, 1.0))))
    return Plan(
        grid,
        (
            Pattern("spatial", half_width, sink),
            Pattern("temporal", half_width, sink),
            Pattern("spatial", None, "none"),
        ),
    )


@functools.lru_cache(maxsize=64)
def _flags_on(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """(layers,) bool on the device; a generation needs one for dense and one for sparse steps."""
    return torch.tensor(flags).to(device)
