"""Rows of an array moved up or down, at the speed of memory: what a text in front of the video costs.

A text of 226 tokens puts every video token in the middle of a tile of 16 rows, where no copy of the attention kernel
can begin. XLA's own slice takes about five times as long as the memory needs.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_BLOCK_ROWS = 512
_BLOCK_LANES = 1024


def move_rows(x, first: int, rows: int, *, halves: bool = False, interpret=False):
    """``out[:, r] = x[:, r + first]``.

    Args:
        x: (batch, x rows, lanes), lanes a multiple of 128 (of 256 with ``halves``).
        first: Row of ``x`` that comes first; negative to leave room in front.
        rows: Rows of the result. Those that are not in ``x`` hold anything.
        halves: Two lane tiles become one: lanes below 64 from the first half of the lanes, the others from the second.

    Returns:
        (batch, rows, lanes), or half as many lanes.
    """
    batch, given, lanes = x.shape
    lanes //= 2 if halves else 1
    tiles = lanes // _LANES
    width = _LANES * max(size for size in range(1, _BLOCK_LANES // _LANES + 1) if tiles % size == 0)
    block = min(_BLOCK_ROWS, math.ceil(rows / 16) * 16)
    last_block = math.ceil(given / block) - 1
    # block o of the result is the end of block o + skipped of x and the beginning of the next
    skipped, split = divmod(first, block)

    def source(half, b, lane, step):
        return b, jnp.clip(step + skipped, 0, last_block), lane + half * (lanes // width)

    shape = (None, block, width)
    return pl.pallas_call(
        functools.partial(_move, split=split),
        grid=(batch, lanes // width, math.ceil(rows / block) + 1),
        in_specs=[pl.BlockSpec(shape, functools.partial(source, half)) for half in range(2 if halves else 1)],
        out_specs=pl.BlockSpec(shape, lambda b, lane, step: (b, jnp.maximum(step - 1, 0), lane)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, lanes), x.dtype),
        # 32-bit rows can be read from any row on, packed ones cannot
        scratch_shapes=[pltpu.VMEM((2 * block, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="move_rows",
    )(*[x] * (2 if halves else 1))


def _move(*refs, split: int):
    *sources, target, both = refs
    block = target.shape[0]
    rows = sources[0][...]
    if len(sources) > 1:
        lane = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        rows = jnp.where(lane % _LANES < _LANES // 2, rows, sources[1][...])
    both[:block] = both[block:]
    both[block:] = rows.astype(jnp.float32)
    target[...] = both[split : split + block].astype(target.dtype)
