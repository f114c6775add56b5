"""Dense attention on TPU by the kernel of ``block_kernel``: cross-attention, text queries, any lengths."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from ..worktable import FIRST_FULL, Item, encode
from .block_kernel import LANES, Inputs, KernelShape, Tables, call

_UNIT = 16
# rows of a granule of keys, and of a query block
_KEY_ROWS = 384
_QUERY_ROWS = 2048
# rows of keys of the largest body
_FULL_ROWS = 2048


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
        invalid = jnp.arange(key_rows)[None] >= lengths[:, None]
        flags = jnp.stack([jnp.ones_like(invalid), invalid], axis=-1).astype(query.dtype)
        flags = jnp.pad(flags, ((0, 0), (0, 0), (0, LANES - 2)))
    output = attend_dense(
        lane_tiles(query),
        keys,
        values,
        flags,
        heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        softmax=softmax,
        interpret=interpret,
        key_rows=key_rows,
        granule_units=key_rows // granules // _UNIT,
    )
    return from_lane_tiles(output, heads, head_dim)


def attend_dense(query, key, value, flags, *, heads, head_dim, scale, softmax, interpret, key_rows, granule_units=None):
    """Dense attention over the first ``key_rows`` rows of arrays that are in lane tiles already.

    Args:
        query: (batch, query_tokens, lanes).
        key, value: (batch, rows, lanes), ``key_rows`` a multiple of the granule.
        flags: (batch, rows, 128) key flags, or None when every key is valid.
        granule_units: 16-row units of a granule; default: the largest of good size that divides ``key_rows``.

    Returns:
        (batch, query_tokens, lanes), heads as in ``lane_tiles``.
    """
    from .block_sparse import joined, output_lanes, padded_head_dim

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
        query_frame_units=query_units,
        query_total_units=query_units,
        key_total_units=key.shape[1] // _UNIT,
        item_granules=max(item.granules for item in items),
        full_granules=full_granules,
        left_edges=(),
        right_edges=(),
        bodies=frozenset(item.body for item in items),
        tail_rows=0,
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
    arrays = [x.reshape(-1, _UNIT, x.shape[-1]) for x in (query, key, value, flags)]
    # nothing is read by frames here
    unused = [x.reshape(1, 1, *x.shape) for x in arrays]
    inputs = Inputs(
        *(x for pair in zip(arrays, unused, strict=True) for x in pair), bounds=jnp.zeros((1, 8, LANES), jnp.int32)
    )
    output = call(shape, tables, inputs, output_lanes(heads, head_dim), interpret)
    return joined(output.reshape(batch, query_units * _UNIT, -1)[:, :query_tokens], head_dim)


def _padded(x, rows: int):
    return x if x.shape[1] == rows else jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)))
