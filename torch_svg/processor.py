"""The processor that a user sets."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref

import torch
import torch.nn.functional as F

from . import attention, interception
from .binding import Binding, Layer, StepCounter
from .callsite import running_forward
from .config import SparseVideoConfig
from .families import TextMask, family_of, set_processor
from .grid import TokenGrid
from .kernels.tuning import blocks_for, small_blocks_for
from .pattern import Plan, pair_density
from .report import RunRecord, RunReport
from .routing import choose_kinds, sample_rows
from .worktable import Blocks, tile_density

DENSE_KIND = 2


class SparseVideoAttnProcessor:
    """Sparse VideoGen attention for a diffusers video transformer.

    Wraps the model's own processors: projections, norms, image keys, LoRA and output stay theirs, only the attention
    core of the video self-attention is replaced. Cross-attention and everything else stay exact; on an XLA device
    they run on a kernel that never holds a tokens x tokens matrix.

    The same object may be set on both transformers of a two-expert pipeline; it then counts denoising steps over
    both.

    Args:
        config: What to compute. Default: ``SparseVideoConfig()``, which follows the model and the clip's size.

    Example:
        >>> import torch
        >>> from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
        >>> from torch_svg.testing import random_tiny_wan_pipeline
        >>> pipe = random_tiny_wan_pipeline()
        >>> processor = SparseVideoAttnProcessor(SparseVideoConfig(density=0.5, warmup_steps=1, dense_layers=0))
        >>> pipe.transformer.set_attn_processor(processor)
        >>> video = pipe("a red ball", height=32, width=32, num_frames=9, num_inference_steps=2).frames
        >>> processor.report().dense_steps
        [0]
    """

    def __init__(self, config: SparseVideoConfig | None = None):
        if config is not None and not isinstance(config, SparseVideoConfig):
            raise ValueError(f"config must be a SparseVideoConfig or None, got {type(config).__name__}")
        self.config = config or SparseVideoConfig()
        self.counter = StepCounter()
        self.record = RunRecord()
        self._bindings: list[Binding] = []
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Binding, Layer]] = weakref.WeakKeyDictionary()
        self._backend = None

    def __deepcopy__(self, memo):
        # a copied transformer binds its copy of the processor on its first forward
        return type(self)(self.config)

    def __call__(self, attn, hidden_states, *args, **kwargs):
        binding, layer = self._layers.get(attn) or self._bind_running(attn)
        state = binding.state
        if layer.video_index is None:
            return self._run_other(layer, attn, hidden_states, *args, **kwargs)
        if state.dense_reason is not None:
            self.record.fallbacks[state.dense_reason] += 1
            if hidden_states.device.type != "xla":
                return self._run_other(layer, attn, hidden_states, *args, **kwargs)
            return self._run_video(binding, layer, _dense_core, attn, hidden_states, args, kwargs)
        chosen = []

        def core(query, key, value, text_lengths, scale, plan):
            dense = state.dense_flags[layer.video_index]
            out, kinds, errors = self._sparse_core(plan, dense, query, key, value, text_lengths, scale)
            chosen.append((kinds, errors))
            return out

        out = self._run_video(binding, layer, core, attn, hidden_states, args, kwargs)
        if len(chosen) > 1:
            # a processor that loops over the batch has called the core once for every row
            chosen = [tuple(torch.cat(parts) for parts in zip(*chosen, strict=True))]
        for kinds, errors in chosen:
            self.record.layer(layer.video_index, kinds, errors)
        return out

    def report(self) -> RunReport:
        """What the last generation computed (fetches it from the device)."""
        record = self.record
        if record.plan is None:
            return record.report([1.0] * 3, [1.0] * 3)
        plans = [record.layer_plans.get(layer, record.plan) for layer in range(record.num_layers)]
        shares = {plan: self._densities(plan) for plan in {*plans, record.plan}}
        by_layer = [shares[plan] for plan in plans or [record.plan]]
        blocks = self._blocks(record.plan)
        return record.report(
            [pairs for pairs, _ in by_layer],
            [tiles for _, tiles in by_layer],
            blocks and dataclasses.asdict(blocks),
        )

    def reset(self) -> None:
        """Starts a new generation: steps count from zero, the record is empty. Needed only when a transformer is
        called in a loop of your own; inside a pipeline it happens by itself."""
        self.counter.reset()
        self.record.start_generation()

    def bind(self, transformer, wrapped: dict[str, object] | None = None) -> Binding:
        """Ties this processor to a transformer in whose modules it is set (done by itself on the first forward).

        Args:
            transformer: A transformer of a served family.
            wrapped: Module path -> the processor that stood there before.

        Raises:
            NotImplementedError: The transformer is not served. Its modules have their default processors again.
        """
        try:
            binding = Binding(transformer, family_of(transformer), self, wrapped)
        except NotImplementedError:
            _restore_defaults(transformer, self)
            raise
        self._bindings.append(binding)
        for module, layer in binding.layers.items():
            self._layers[module] = (binding, layer)
        return binding

    def release(self, transformer) -> None:
        """Gives a transformer's modules the processors that they had before this one."""
        for binding in list(self._bindings):
            if binding.transformer is transformer:
                self.forget(binding)
                binding.release()
                return
        _restore_defaults(transformer, self)

    def forget(self, binding: Binding) -> None:
        """Drops a binding (its transformer no longer uses this processor)."""
        self._bindings = [other for other in self._bindings if other is not binding]
        for module in binding.layers:
            self._layers.pop(module, None)

    # diffusers writes these two on whatever processor a module holds
    @property
    def _attention_backend(self):
        return self._backend

    @_attention_backend.setter
    def _attention_backend(self, backend):
        self._backend = backend

    @property
    def _parallel_config(self):
        return None

    @_parallel_config.setter
    def _parallel_config(self, parallel_config):
        if parallel_config is not None:
            raise NotImplementedError(interception.PARALLEL_CONFIG_MESSAGE)

    def _bind_running(self, attn) -> tuple[Binding, Layer]:
        forward = running_forward()
        if forward is None:
            raise ValueError(
                f"{type(attn).__name__} was called outside a diffusers transformer's forward, so the video's shape is "
                "not known: call the transformer itself"
            )
        for binding in self._bindings:
            if binding.transformer is forward.model:
                self._layers[attn] = (binding, binding.adopt(attn))
                if binding.state is None:
                    binding.begin_forward(forward.model, forward.args, forward.kwargs)
                return self._layers[attn]
        binding = self.bind(forward.model)
        if attn not in binding.layers:
            raise NotImplementedError(f"{type(attn).__name__} is not a module of {type(forward.model).__name__}")
        binding.begin_forward(forward.model, forward.args, forward.kwargs)
        return self._layers[attn]

    def _densities(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Pair and tile density of every head kind of a plan."""
        pairs = [pair_density(pattern, plan.grid) for pattern in plan.patterns]
        blocks = self._blocks(plan)
        return pairs, pairs if blocks is None else [tile_density(plan, blocks, k) for k in range(len(plan.patterns))]

    def _blocks(self, plan: Plan) -> Blocks | None:
        """The block sizes that ran; None for the reference, where a query row meets its own keys and no others."""
        if self.record.implementation in (None, "reference"):
            return None
        if self.record.implementation == "xla":
            return small_blocks_for(plan.grid)
        return blocks_for(plan.grid, self.record.head_dim)

    def _run_video(self, binding: Binding, layer: Layer, core, attn, hidden_states, args, kwargs):
        """Video self-attention: the layer's processor around ``core``, which gets the video first and then the rest
        (or the text first), and ``(query, key, value, text_lengths, scale, plan)``."""
        family, state = binding.family, binding.state
        plan, leading = state.plan_of(layer), state.leading_tokens
        rotary = None
        if family.rotary_argument is not None and hidden_states.device.type == "xla":
            args, kwargs, rotary = _take_argument(layer.processor, family.rotary_argument, args, kwargs)
        text_mask = _TextMaskRows(layer, plan.grid)
        if family.text_mask is not None:
            args, kwargs = text_mask.take(family.text_mask, args, kwargs)

        def adapted(query, key, value, mask, scale):
            if rotary is not None:
                query, key = family.apply_rotary(query, rotary), family.apply_rotary(key, rotary)
            # queries of the generated tokens alone, against keys of all: give the others queries that nobody reads
            missing = key.shape[1] - query.shape[1]
            if missing and missing == (leading or plan.grid.video_start):
                query = F.pad(query, (0, 0, 0, 0, missing, 0))
            plan.grid.check_tokens(query.shape[1])
            plan.grid.check_tokens(key.shape[1])
            lengths = text_mask.lengths(mask, query)
            query, key, value = (_video_first(x, leading, plan.grid.video_tokens) for x in (query, key, value))
            out = _video_back(core(query, key, value, lengths, scale, plan), leading, plan.grid.video_tokens)
            return out[:, missing:] if missing else out

        with interception.intercept_core(layer.processor, adapted, causal_calls=family.causal_calls):
            return layer.processor(attn, hidden_states, *args, **kwargs)

    def _run_other(self, layer: Layer, attn, hidden_states, *args, **kwargs):
        """Attention that is not the video's: as it was, and in linear memory where the device has no such kernel."""
        processor = layer.processor
        if hidden_states.device.type != "xla":
            if self._backend is not None and hasattr(type(processor), "_attention_backend"):
                processor._attention_backend = self._backend
            return processor(attn, hidden_states, *args, **kwargs)

        def core(query, key, value, mask, scale):
            if mask is not None:
                # short masked attention (text refiners) stays what it was
                query, key, value = (x.transpose(1, 2) for x in (query, key, value))
                out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
                return out.transpose(1, 2)
            return attention.dense_attention(query, key, value, scale=scale)

        with interception.intercept_core(processor, core):
            return processor(attn, hidden_states, *args, **kwargs)

    def _sparse_core(self, plan: Plan, dense, query, key, value, text_lengths, scale):
        """The attention, its head kinds and probe errors; ``dense`` is a bool tensor: whether every head is."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        implementation = attention.choose_implementation(query.device, self.config.implementation)
        rows = sample_rows(plan.grid, self.config.sampled_rows)
        errors = attention.probe_patterns(
            query, key, value, text_lengths, plan=plan, rows=rows, scale=scale, implementation=implementation
        )
        kinds = choose_kinds(errors, plan)
        # dense steps and layers are data, so that one compiled graph serves the whole generation
        kinds = torch.where(dense, torch.full_like(kinds, DENSE_KIND), kinds)
        self.record.implementation, self.record.head_dim = implementation, query.shape[-1]
        out = attention.sparse_video_attention(
            query, key, value, kinds, text_lengths, plan=plan, scale=scale, implementation=implementation
        )
        return out, kinds, errors


# diffusers' Attention hands a processor only the keywords that its signature names, and drops the others: name those of
# every processor that may be wrapped
_KEYWORDS = (
    "encoder_hidden_states", "attention_mask", "temb", "image_rotary_emb", "rotary_emb", "query_rotary_emb",
    "key_rotary_emb", "perturbation_mask", "all_perturbed", "image_embed_seq_len", "original_context_length",
)
SparseVideoAttnProcessor.__call__.__signature__ = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "attn", "hidden_states")]
    + [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    + [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _KEYWORDS]
)


class _TextMaskRows:
    """The text lengths of a layer's call, whichever way its processor gives them."""

    def __init__(self, layer: Layer, grid: TokenGrid):
        self.layer = layer
        self.grid = grid
        self.all_lengths: torch.Tensor | None = None
        self.next_row = 0

    def take(self, text_mask: TextMask, args, kwargs):
        """Reads the mask from the arguments; returns them with its stand-in."""
        processor, name = self.layer.processor, text_mask.argument
        _, _, mask = _take_argument(processor, name, args, kwargs)
        if mask is None:
            raise ValueError(f"{self.layer.path} got no {name}: expected the text's padding mask (batch, text_tokens)")
        self.all_lengths = mask.bool().sum(dim=1, dtype=torch.int32)
        args, kwargs, _ = _take_argument(processor, name, args, kwargs, text_mask.stand_in(mask))
        return args, kwargs

    def lengths(self, mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        """(batch,) valid text tokens of the next call of the core, which has ``query``."""
        if self.all_lengths is None:
            return None if mask is None else _text_lengths(mask, query, self.grid, self.layer.path)
        start, self.next_row = self.next_row, self.next_row + query.shape[0]
        return self.all_lengths[start : self.next_row]


def _dense_core(query, key, value, text_lengths, scale, plan: Plan):
    """The video's attention where it stays dense, in linear memory."""
    key_lengths = None if text_lengths is None else text_lengths + plan.grid.video_tokens
    return attention.dense_attention(query, key, value, key_lengths, scale=scale)


def _video_first(x: torch.Tensor, leading: int, video_tokens: int) -> torch.Tensor:
    """(batch, tokens, ...) with ``leading`` tokens before the video moved to behind it."""
    if not leading:
        return x
    end = leading + video_tokens
    return torch.cat([x[:, leading:end], x[:, :leading], x[:, end:]], dim=1)


def _video_back(x: torch.Tensor, leading: int, video_tokens: int) -> torch.Tensor:
    """Undoes ``_video_first``."""
    if not leading:
        return x
    end = leading + video_tokens
    return torch.cat([x[:, video_tokens:end], x[:, :video_tokens], x[:, end:]], dim=1)


def _text_lengths(mask: torch.Tensor, query: torch.Tensor, grid: TokenGrid, path: str) -> torch.Tensor:
    """(batch,) valid text tokens from a model's key padding mask, which keeps the video and a prefix of the text."""
    expected = (query.shape[0], 1, 1, grid.tokens)
    if mask.dtype != torch.bool or mask.shape != expected or not grid.text_tokens or grid.text_first:
        raise NotImplementedError(
            f"{path} got an attention mask of shape {tuple(mask.shape)} and dtype {mask.dtype}; served is none, or a "
            f"bool mask (batch, 1, 1, tokens) = {expected} that keeps the video and a "
            "prefix of the text"
        )
    return mask[:, 0, 0].sum(dim=1, dtype=torch.int32) - grid.video_tokens


def _take_argument(processor, name: str, args, kwargs, replacement=None):
    """Replaces one argument of a processor's call; returns the new arguments, and its value."""
    place = _argument_place(type(processor), name)
    if place < len(args):
        return (*args[:place], replacement, *args[place + 1 :]), kwargs, args[place]
    return args, {**kwargs, name: replacement}, kwargs.get(name)


@functools.cache
def _argument_place(processor_class: type, name: str) -> int:
    """Where an argument stands among a processor's arguments after self, attn and hidden_states."""
    return list(inspect.signature(processor_class.__call__).parameters).index(name) - 3


def _restore_defaults(transformer, processor) -> None:
    for module in transformer.modules():
        if getattr(module, "processor", None) is processor:
            default = getattr(module, "_default_processor_cls", None)
            if default is not None:
                set_processor(module, default())
