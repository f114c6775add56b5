"""Dense attention on TPU by the kernel of ``block_kernel``: cross-attention, text queries, any lengths."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..worktable import FIRST_FULL, Item, encode
from .block_kernel import call
from .kernel_shape import LANES, TEXT_UNIT, Inputs, KernelShape, Place, Tables
from .rows import move_rows

_UNIT = 16
# rows of a granule of keys, and of a query block
_KEY_ROWS = 384
_QUERY_ROWS = 2048
# rows of keys of the largest body
_FULL_ROWS = 2048


class Text(NamedTuple):
    """Keys and values beside the video's, as the kernel wants them: (batch, units, 16, lanes)."""

    key: Array
    value: Array
    flags: Array


def text_operands(keys, values, lengths) -> Text:
    """Text (batch, text tokens, lanes) with ``lengths`` (batch,) valid tokens, or None when all are valid."""
    batch, tokens, _ = keys.shape
    rows = math.ceil(tokens / TEXT_UNIT) * TEXT_UNIT
    lengths = jnp.full((batch,), tokens) if lengths is None else lengths
    flags = _length_flags(rows, lengths, keys.dtype)
    padded = (_padded(keys, rows), _padded(values, rows), flags)
    return Text(*(x.reshape(batch, -1, TEXT_UNIT, x.shape[-1]) for x in padded))


def no_text(dtype) -> Text:
    """What stands in for text where there is none."""
    return Text(*[jnp.zeros((1, 1, TEXT_UNIT, LANES), dtype)] * 3)


def _length_flags(rows: int, lengths, dtype):
    """(batch, rows, 128): the flag lanes of keys of which the first ``lengths`` are valid, see ``block_kernel``."""
    invalid = jnp.arange(rows)[None] >= lengths[:, None]
    flags = jnp.stack([jnp.ones_like(invalid), invalid], axis=-1).astype(dtype)
    return jnp.pad(flags, ((0, 0), (0, 0), (0, LANES - 2)))


def dense_attention(query, key, value, key_lengths=None, *, scale=None, softmax="auto", interpret=False):
    """Dense attention in linear memory, with query and key lengths of their own.

    Args:
        query: (batch, query_tokens, heads, head_dim), bf16 or f32.
        key, value: (batch, key_tokens, heads, head_dim), the dtype of ``query``.
        key_lengths: (batch,) int32 valid keys, at least 1 each, or None when all are valid.
        scale: Factor on the scores. Default: ``head_dim ** -0.5``.
        softmax: As in ``block_sparse_attention``.
        interpret: Run in Pallas' interpreter.

    Returns:
        (batch, query_tokens, heads, head_dim), the dtype of ``query``.

    Raises:
        ValueError: The dtype is neither bf16 nor f32.
        NotImplementedError: head_dim above 256.
    """
    from .block_sparse import check_arrays, from_lane_tiles, lane_tiles

    check_arrays(query, key, value, softmax)
    batch, key_tokens, heads, head_dim = key.shape
    units = math.ceil(key_tokens / _UNIT)
    granules = max(1, math.ceil(units * _UNIT / _KEY_ROWS))
    key_rows = granules * math.ceil(units / granules) * _UNIT
    keys, values = (_padded(lane_tiles(x), key_rows) for x in (key, value))
    flags = None
    if key_lengths is not None or key_rows != key_tokens:
        lengths = jnp.full((batch,), key_tokens) if key_lengths is None else key_lengths
        flags = _length_flags(key_rows, lengths, query.dtype)
    output = attend_dense(
        lane_tiles(query),
        keys,
        values,
        flags,
        None,
        heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        softmax=softmax,
        interpret=interpret,
        key_rows=key_rows,
        granule_units=key_rows // granules // _UNIT,
    )
    return from_lane_tiles(output, heads, head_dim)


def attend_dense(
    query,
    key,
    value,
    flags,
    text: Text | None,
    *,
    heads,
    head_dim,
    scale,
    softmax,
    interpret,
    key_rows,
    first_key_row=0,
    granule_units=None,
):
    """Dense attention over ``key_rows`` rows, and text, of arrays that are in lane tiles already.

    Args:
        query: (batch, query_tokens, lanes).
        key, value: (batch, rows, lanes), ``rows``, ``key_rows`` and ``first_key_row`` multiples of 16.
        flags: (batch, rows, 128) key flags, or None when every key is valid.
        text: More keys and values, with flags of their own.
        granule_units: 16-row units of a granule; default: the largest of good size that divides ``key_rows``.

    Returns:
        (batch, query_tokens, lanes), heads as in ``lane_tiles``.
    """
    from .block_sparse import output_lanes, padded_head_dim

    batch, query_tokens, _ = query.shape
    width = padded_head_dim(head_dim)
    lanes = max(width, LANES)
    if granule_units is None:
        units = key_rows // _UNIT
        granule_units = max(size for size in range(1, _KEY_ROWS // _UNIT + 1) if units % size == 0)
    query_units = math.ceil(query_tokens / _UNIT)
    block_units = min(query_units, _QUERY_ROWS // _UNIT)
    query = _padded(query, query_units * _UNIT)
    starts = [min(start, query_units - block_units) for start in range(0, query_units, block_units)]
    items, left = [], key_rows // _UNIT // granule_units
    # a copy of more granules than there are cannot even be traced
    most = min(left, max(1, _FULL_ROWS // (granule_units * _UNIT)))
    full_granules = tuple(sorted({most, max(1, most // 2), 1}, reverse=True))
    start = 0
    for body, size in enumerate(full_granules, FIRST_FULL):
        while left >= size:
            items.append(Item(start, size, body))
            start, left = start + size, left - size
    shape = KernelShape(
        batch=batch,
        heads=heads,
        query_heads_per_lanes=2 if width < LANES else 1,
        lanes=lanes,
        unit=_UNIT,
        key_units=granule_units,
        query_units=1,
        query_granules=block_units,
        query_blocks=len(starts),
        frame_units=query_units,
        query_place=Place(query_units),
        key_place=Place(key.shape[1] // _UNIT, first_key_row // _UNIT),
        output_place=Place(query_units),
        item_granules=max(item.granules for item in items),
        full_granules=full_granules,
        left_edges=(),
        right_edges=(),
        clipped=False,
        bodies=frozenset(item.body for item in items),
        tail_rows=0,
        text_units=0 if text is None else text.key.shape[1],
        any_temporal=False,
        any_prefix=False,
        ends_sink=False,
        keys_flagged=flags is not None,
        scale=scale * math.log2(math.e),
        dtype=jnp.dtype(query.dtype),
        online=softmax == "online",
    )
    blocks = np.zeros(len(starts), np.int32)
    tables = Tables(
        kinds=np.zeros(batch * heads, np.int32),
        offsets=blocks,
        counts=blocks + len(items),
        items=np.asarray([encode(item) for item in items], np.int32),
        starts=np.asarray(starts, np.int32),
        orders=np.zeros(1, np.int32),
        prefixes=np.zeros(1, np.int32),
    )
    if flags is None:
        flags = jnp.zeros((1, _UNIT, LANES), query.dtype)
    arrays = (x.reshape(-1, _UNIT, x.shape[-1]) for x in (query, key, value, flags))
    inputs = Inputs(*arrays, *(text or no_text(query.dtype)), jnp.zeros((1, 8, LANES), jnp.int32))
    output = call(shape, tables, inputs, output_lanes(heads, head_dim), interpret)
    output = output.reshape(batch, query_units * _UNIT, -1)
    if width < LANES:
        return move_rows(output, 0, query_tokens, halves=True, interpret=interpret)
    return output[:, :query_tokens]


def _padded(x, rows: int):
    return x if x.shape[1] == rows else jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)))
