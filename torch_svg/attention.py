"""The front door: sparse attention over a video sequence on torch tensors, by the implementation that applies.

Both operations are torch custom ops with fake implementations, so they stand in lazily traced XLA graphs, under
``torch.compile`` and on meta tensors alike. Head kinds are an ordinary tensor; the plan is static.
"""

from __future__ import annotations

import functools

import torch

from . import bridge
from .config import IMPLEMENTATIONS
from .kernels.reference import reference_attention, reference_dense
from .pattern import Plan
from .routing import probe_errors

# sampled rows that the probe kernel has lanes for; more are probed with plain operations
MAX_KERNEL_ROWS = 128


# plans cross the custom op boundary by name; a plan is tiny and a process sees a handful
_PLANS: dict[str, Plan] = {}


def choose_implementation(device: torch.device, requested: str | None = None) -> str:
    """The implementation that runs on a device.

    Args:
        device: Where query, key and value are.
        requested: ``None`` for the best that applies, or one of ``IMPLEMENTATIONS``.

    Returns:
        The implementation's name.

    Raises:
        ValueError: ``requested`` is unknown, or cannot run on this device.
    """
    if requested is not None and requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {requested!r}")
    if device.type == "meta":
        return requested or "reference"
    if device.type != "xla":
        if requested not in (None, "reference"):
            raise ValueError(
                f"implementation {requested!r} needs tensors on an XLA device, got {device.type!r}: move the pipeline "
                "with pipe.to(torch_xla.device()), or use implementation='reference'"
            )
        return "reference"
    on_tpu = bridge.platform() == "tpu"
    if requested is None:
        return "pallas" if on_tpu else "xla"
    if requested == "pallas" and not on_tpu:
        raise ValueError(
            "implementation 'pallas' needs a TPU, and this XLA device is a CPU: use None, 'xla' or 'pallas_interpret'"
        )
    if requested == "pallas_interpret" and on_tpu:
        raise ValueError("implementation 'pallas_interpret' is for XLA:CPU; on a TPU use None or 'pallas'")
    return requested


def sparse_video_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kinds: torch.Tensor,
    text_lengths: torch.Tensor | None = None,
    *,
    plan: Plan,
    scale: float | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention in which every head computes the pattern that its kind names.

    Args:
        query, key, value: (batch, tokens, heads, head_dim), bf16 or f32, in the grid's memory order.
        kinds: (batch, heads) int32, an index into ``plan.patterns`` per head. Data: no recompile when it changes.
        text_lengths: (batch,) int32, the valid prefix of the text tokens; padded text keys get no weight. ``None``:
            all text tokens are valid.
        plan: Grid and patterns; static.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        implementation: ``None`` or a name of ``IMPLEMENTATIONS``.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of ``query``.

    Raises:
        ValueError: Shapes, the plan and the implementation do not fit each other.
    """
    _check_inputs(query, key, value, kinds, plan)
    implementation = choose_implementation(query.device, implementation)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if implementation == "reference" and _needs_gradient(query, key, value):
        # plain torch operations have gradients, the custom op has none
        return reference_attention(query, key, value, kinds, text_lengths, plan=plan, scale=scale)
    return torch.ops.torch_svg.sparse_attention(
        query,
        key,
        value,
        kinds.to(torch.int32),
        None if text_lengths is None else text_lengths.to(torch.int32),
        plan_name(plan),
        scale,
        implementation,
    )


def probe_patterns(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_lengths: torch.Tensor | None = None,
    *,
    plan: Plan,
    rows: tuple[int, ...],
    scale: float,
    implementation: str,
) -> torch.Tensor:
    """The error of every pattern on sampled query rows, by a kernel where the implementation has one.

    Args:
        query, key, value, text_lengths, plan, scale: As in ``sparse_video_attention``.
        rows: Memory rows of the sampled video queries.
        implementation: The name that ``choose_implementation`` gave.

    Returns:
        (batch, heads, patterns) f32, see ``routing.probe_errors``.
    """
    if implementation not in ("pallas", "pallas_interpret") or len(rows) > MAX_KERNEL_ROWS:
        return probe_errors(query, key, value, text_lengths, plan=plan, rows=rows, scale=scale)
    if text_lengths is not None:
        text_lengths = text_lengths.to(torch.int32)
    return torch.ops.torch_svg.probe(
        query, key, value, text_lengths, plan_name(plan), list(rows), scale, implementation
    )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Dense attention in linear memory, for cross-attention and everything that is not video self-attention.

    Args:
        query: (batch, query_tokens, heads, head_dim), bf16 or f32.
        key, value: (batch, key_tokens, heads, head_dim).
        key_lengths: (batch,) int32, the valid prefix of the keys, or ``None``.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        implementation: As in ``sparse_video_attention``.

    Returns:
        (batch, query_tokens, heads, head_dim), the dtype of ``query``.

    Raises:
        ValueError: The shapes do not fit each other.
    """
    fitting = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not fitting or key.shape != value.shape:
        raise ValueError(
            "dense attention needs query (batch, query_tokens, heads, head_dim) and key, value "
            f"(batch, key_tokens, heads, head_dim), got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    return torch.ops.torch_svg.dense_attention(
        query,
        key,
        value,
        None if key_lengths is None else key_lengths.to(torch.int32),
        float(query.shape[-1] ** -0.5 if scale is None else scale),
        choose_implementation(query.device, implementation),
    )


def plan_name(plan: Plan) -> str:
    """Registers a plan and returns the name under which the custom op finds it."""
    name = repr(plan)
    _PLANS.setdefault(name, plan)
    return name


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_inputs(query, key, value, kinds, plan):
    if query.ndim != 4 or query.shape != key.shape or query.shape != value.shape:
        raise ValueError(
            "sparse attention needs query, key and value of one shape (batch, tokens, heads, head_dim), got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    plan.grid.check_tokens(query.shape[1])
    if tuple(kinds.shape) != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"kinds must be (batch, heads) = {(query.shape[0], query.shape[2])}, got {tuple(kinds.shape)}"
        )
    if kinds.is_floating_point():
        raise ValueError(f"kinds must be integers, indices into plan.patterns, got {kinds.dtype}")


@torch.library.custom_op("torch_svg::sparse_attention", mutates_args=())
def _sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kinds: torch.Tensor,
    text_lengths: torch.Tensor | None,
    plan: str,
    scale: float,
    implementation: str,
) -> torch.Tensor:
    plan = _PLANS[plan]
    if implementation == "reference":
        return reference_attention(query, key, value, kinds, text_lengths, plan=plan, scale=scale)
    arguments = (query, key, value, kinds) if text_lengths is None else (query, key, value, kinds, text_lengths)
    return bridge.call(_sparse_function(implementation), *arguments, plan=plan, scale=scale)


@_sparse_attention.register_fake
def _(query, key, value, kinds, text_lengths, plan, scale, implementation):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("torch_svg::probe", mutates_args=())
def _probe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_lengths: torch.Tensor | None,
    plan: str,
    rows: list[int],
    scale: float,
    implementation: str,
) -> torch.Tensor:
    arguments = (query, key, value) if text_lengths is None else (query, key, value, text_lengths)
    return bridge.call(
        _probe_function(implementation), *arguments, plan=_PLANS[plan], rows=tuple(rows), scale=scale
    )


@_probe.register_fake
def _(query, key, value, text_lengths, plan, rows, scale, implementation):
    shape = (query.shape[0], query.shape[2], len(_PLANS[plan].patterns))
    return query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("torch_svg::dense_attention", mutates_args=())
def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None,
    scale: float,
    implementation: str,
) -> torch.Tensor:
    if implementation == "reference":
        return reference_dense(query, key, value, key_lengths, scale=scale)
    arguments = (query, key, value) if key_lengths is None else (query, key, value, key_lengths)
    return bridge.call(_dense_function(implementation), *arguments, scale=scale)


@_dense_attention.register_fake
def _(query, key, value, key_lengths, scale, implementation):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


# one long-lived function object per implementation: the bridge's trace cache is keyed by it
@functools.cache
def _sparse_function(implementation: str):
    if implementation == "xla":
        from .kernels.xla import work_table_attention

        return work_table_attention
    from .kernels.block_sparse import block_sparse_attention

    if implementation == "pallas":
        return block_sparse_attention
    return _named(functools.partial(block_sparse_attention, interpret=True), "block_sparse_attention_interpret")


@functools.cache
def _dense_function(implementation: str):
    if implementation == "xla":
        from .kernels.xla import chunked_dense_attention

        return chunked_dense_attention
    from .kernels.dense import dense_attention as kernel

    if implementation == "pallas":
        return kernel
    return _named(functools.partial(kernel, interpret=True), "dense_attention_interpret")


@functools.cache
def _probe_function(implementation: str):
    from .kernels.profiling import probe_errors as kernel

    if implementation == "pallas":
        return kernel
    return _named(functools.partial(kernel, interpret=True), "probe_errors_interpret")


def _named(function, name: str):
    function.__name__ = name
    return function
