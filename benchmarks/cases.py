"""The cases of the ladder: each a JAX function at a real shape, told once for predictions and for measurements.

The base is one chip's share of Wan 14B at 720p in Google's published ladder: 21 x 45 x 80 tokens, 10 heads of 128,
bf16. Two sparsity points: Sparse VideoGen's knob 0.30 with a first-frame sink, and Google's knob 0.35 with the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from benchmarks import google_described
from benchmarks.shapes import LADDER, LADDER_HEADS, SHAPES, knob_half_width
from torch_svg.kernels import block_sparse, profiling
from torch_svg.kernels.kernel_shape import Place
from torch_svg.kernels.tuning import blocks_for, online_blocks_for
from torch_svg.pattern import DENSE, SPATIAL, TEMPORAL, Pattern, Plan, pair_density, sparse_plan
from torch_svg.worktable import PARTIAL, TAIL, Blocks, decode, encode, tile_density, work_table

# (query, key, keys per step); on v6e the quickest of those tried with the ruler, elsewhere what fits in VMEM
SPLASH_BLOCKS = {"v6e": (2368, 2048, 1024)}
SMALL_SPLASH_BLOCKS = (1024, 1024, 512)
PROBE_ROWS = 64
KNOBS = {"svg30": 0.30, "google": 0.35}


@dataclass(frozen=True)
class Program:
    """One call that is compiled and timed.

    Args:
        function: A module-level JAX function.
        arguments: Arrays where values matter (head kinds), `jax.ShapeDtypeStruct` elsewhere.
        static: Keyword arguments of the function.
    """

    function: Callable
    arguments: tuple
    static: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A line of the ladder.

    Args:
        name: As in the JSON.
        what: One line for the reader.
        programs: Calls that make up the case; their times add up.
        exact: Whether the result is the exact masked softmax.
        variants: Other head kinds of the first program, by name, to be timed beside it.
        over_splash: Whether a ratio to Splash says anything.
        dense: The case of the same shape with our kernel dense, None where that ratio says nothing.
        plan: The plan of the first program, None where it has none.
        published_ms: A published measurement of the same thing on one v6e.
        extra: Calls that are told apart from the case's own time, by name.
    """

    name: str
    what: str
    programs: tuple[Program, ...]
    exact: bool = True
    variants: dict[str, np.ndarray] = field(default_factory=dict)
    over_splash: bool = True
    dense: str | None = None
    plan: Plan | None = None
    published_ms: float | None = None
    extra: dict[str, Program] = field(default_factory=dict)


def plan_of(grid, half_width: int) -> Plan:
    """Spatial, temporal and dense heads, the sparse ones with a first-frame sink."""
    sparse = (Pattern(order, half_width, "first_frame") for order in ("spatial", "temporal"))
    return Plan(grid, (*sparse, Pattern("spatial", None, "none")))


def kinds_of(heads: int, kind: str) -> np.ndarray:
    """(1, heads) head kinds; "both" is half spatial, half temporal."""
    rows = {"spatial": [SPATIAL], "temporal": [TEMPORAL], "dense": [DENSE], "both": [SPATIAL, TEMPORAL]}[kind]
    return np.resize(np.array(rows, np.int32), (1, heads))


def _bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@functools.cache
def _splash_kernel(heads, query_tokens, key_tokens, blocks):
    query, key, step = blocks
    mask = splash_mask.MultiHeadMask([splash_mask.FullMask((query_tokens, key_tokens))] * heads)
    sizes = splash.BlockSizes(block_q=query, block_kv=key, block_kv_compute=step)
    # the mask's tables must be arrays, also when the first call is traced
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha_single_device(mask=mask, block_sizes=sizes)


def splash_dense(query, key, value, *, blocks: tuple[int, int, int]):
    """Stock Splash attention without a mask; (heads, padded tokens, head_dim), query scaled already."""
    return _splash_kernel(query.shape[0], query.shape[1], key.shape[1], blocks)(query, key, value)


def _splash_case(chip):
    tokens, head_dim = LADDER.grid.tokens, LADDER.head_dim
    blocks = SPLASH_BLOCKS.get(chip, SMALL_SPLASH_BLOCKS)
    query, key = (_bf16(LADDER_HEADS, math.ceil(tokens / block) * block, head_dim) for block in blocks[:2])
    program = Program(splash_dense, (query, key, key), {"blocks": blocks})
    return Case("splash_dense", "stock JAX Splash, dense", (program,), published_ms=78.70)


def _google_described_case():
    tokens, head_dim = LADDER.grid.tokens, LADDER.head_dim
    half_width = knob_half_width(LADDER.grid, KNOBS["google"])
    tiles = google_described.rounded_tiles(tokens, half_width, LADDER.grid.tokens_per_frame)
    sides = (google_described.QUERY_TILE, google_described.KEY_TILE)
    query, key = (_bf16(LADDER_HEADS, math.ceil(tokens / side) * side, head_dim) for side in sides)
    lse = jax.ShapeDtypeStruct((LADDER_HEADS, 8, query.shape[1]), jnp.float32)

    def part(table, keys):
        static = {"tiles": tuple(map(tuple, table.tolist())), "keys": keys}
        return Program(google_described.tile_attention, (query, key, key), static)

    merged = {"query_tiles": tuple(sorted(set(tiles.tail[:, 0].tolist())))}
    return Case(
        "google_described",
        "Google's rounded kernel, rebuilt from its description (inputs already in the head's order, merge apart)",
        (part(tiles.main, None), part(tiles.tail, tokens)),
        exact=False,
        published_ms=32.76,
        extra={"merge": Program(google_described.merge, (query, lse, query, lse), merged)},
    )


def own_attention(query, key, value, kinds, *, heads: int, **static):
    """Our kernel on what a projection makes: (batch, tokens, heads * head_dim), in and out."""
    split = (x.reshape(*x.shape[:2], heads, -1) for x in (query, key, value))
    return block_sparse.block_sparse_attention(*split, kinds, **static).reshape(query.shape)


def _own_program(shape, heads, kind, half_width, blocks, **static):
    array = _bf16(1, shape.grid.tokens, heads * shape.head_dim)
    arguments = (array, array, array, kinds_of(heads, kind))
    plan = plan_of(shape.grid, half_width)
    return Program(own_attention, arguments, {"plan": plan, "heads": heads, "blocks": blocks, **static})


def _own_case(chip, name, what, point, *, kind="both", rounded=False, **static):
    half_width = knob_half_width(LADDER.grid, KNOBS[point])
    blocks = blocks_for(LADDER.grid, LADDER.head_dim, chip)
    if static.get("softmax") == "online":
        blocks = online_blocks_for(LADDER.grid, chip)
    if rounded:
        blocks = replace(blocks, rounded=True, edge_granules=0)
    program = _own_program(LADDER, LADDER_HEADS, kind, half_width, blocks, **static)
    variants = {} if kind == "dense" else {key: kinds_of(LADDER_HEADS, key) for key in ("spatial", "temporal")}
    plan = program.static["plan"]
    return Case(name, what, (program,), exact=not rounded, variants=variants, dense="own_dense", plan=plan)


def naive_attention(query, key, value, kinds, *, heads: int, plan: Plan, blocks: Blocks, interpret: bool = False):
    """Our kernel with the mask computed on every granule that is visited, as if there were no other bodies."""
    head_dim = query.shape[-1] // heads
    table = work_table(plan, blocks)
    items = [decode(item) for item in table.items]
    # a temporal head's first frame is not in the head's order: the mask does not know it, and it is full anyway
    kept = [item.spatial or item.body == TAIL for item in items]
    masked = [
        item if keep else replace(item, body=PARTIAL, at_end=False) for item, keep in zip(items, kept, strict=True)
    ]
    codes = np.asarray([encode(item) for item in masked], np.int32)
    table = replace(table, items=codes, left_edges=(), right_edges=())
    place = Place(table.layout.rows // table.layout.unit)
    output = block_sparse.attend_video(
        query, key, value, None, None, kinds, table, place, heads, head_dim, head_dim**-0.5, "auto", interpret
    )
    return output.reshape(query.shape)


def _naive_case(chip):
    half_width = knob_half_width(LADDER.grid, KNOBS["svg30"])
    blocks = blocks_for(LADDER.grid, LADDER.head_dim, chip)
    own = _own_program(LADDER, LADDER_HEADS, "both", half_width, blocks)
    program = Program(naive_attention, own.arguments, own.static)
    what = "knob 0.30 + first frame, exact, mask on every granule"
    return Case("naive_svg30", what, (program,), dense="own_dense")


def _cogvideox_case(chip, name, what, kind, density=None):
    shape = SHAPES["cogvideox1.5-768p-81f"]
    blocks = blocks_for(shape.grid, shape.head_dim, chip)
    program = _own_program(shape, shape.heads, kind, knob_half_width(shape.grid, KNOBS["svg30"]), blocks)
    if density is not None:
        program = replace(program, static={**program.static, "plan": sparse_plan(shape.grid, density)})
    plan = program.static["plan"]
    return Case(name, what, (program,), over_splash=False, dense="cogvideox15_dense", plan=plan)


def layout_by_xla(kinds, query, key, value, output):
    """What a reorder pass costs: temporal heads' tokens reordered on the way in, and back on the way out.

    All (heads, tokens, head_dim). The usual form that keeps shapes static: both orders are made, one is selected.
    """
    frames, places = LADDER.grid.frames, LADDER.grid.tokens_per_frame
    temporal = (kinds == TEMPORAL)[:, None, None]

    def reordered(x, rows, columns):
        swapped = x.reshape(x.shape[0], rows, columns, x.shape[2]).swapaxes(1, 2).reshape(x.shape)
        return jnp.where(temporal, swapped, x)

    inputs = tuple(reordered(x, frames, places) for x in (query, key, value))
    return (*inputs, reordered(output, places, frames))


def _layout_case():
    array = _bf16(LADDER_HEADS, LADDER.grid.tokens, LADDER.head_dim)
    program = Program(layout_by_xla, (kinds_of(LADDER_HEADS, "both")[0], array, array, array, array))
    return Case("layout", "a reorder pass by XLA, which our kernel does not need", (program,), over_splash=False)


def own_probe(query, key, value, *, heads: int, **static):
    """Our probe on what a projection makes: (batch, tokens, heads * head_dim)."""
    return profiling.probe_errors(*(x.reshape(*x.shape[:2], heads, -1) for x in (query, key, value)), **static)


def _profiling_case():
    tokens = LADDER.grid.tokens
    array = _bf16(1, tokens, LADDER_HEADS * LADDER.head_dim)
    plan = plan_of(LADDER.grid, knob_half_width(LADDER.grid, KNOBS["svg30"]))
    rows = tuple(int(row) for row in np.linspace(0, tokens - 1, PROBE_ROWS).astype(int))
    static = {"plan": plan, "rows": rows, "heads": LADDER_HEADS}
    program = Program(own_probe, (array, array, array), static)
    return Case(
        "profiling", f"probe of {PROBE_ROWS} query rows, all patterns", (program,), over_splash=False, plan=plan
    )


def ladder(chip: str) -> list[Case]:
    """All cases in the order in which they are read, with the block sizes of a chip."""
    return [
        _splash_case(chip),
        _google_described_case(),
        _own_case(chip, "own_dense", "our kernel, every head dense (warm-up steps)", "svg30", kind="dense"),
        _naive_case(chip),
        _own_case(chip, "exact_svg30", "knob 0.30 + first frame, exact", "svg30"),
        _own_case(chip, "rounded_svg30", "knob 0.30 + first frame, rounded to granules", "svg30", rounded=True),
        _own_case(chip, "online_svg30", "knob 0.30 + first frame, exact, online softmax", "svg30", softmax="online"),
        _own_case(chip, "exact_google", "Google's point: knob 0.35 + first frame, exact", "google"),
        _own_case(chip, "rounded_google", "Google's point, rounded to granules", "google", rounded=True),
        _profiling_case(),
        _layout_case(),
        _cogvideox_case(chip, "cogvideox15_dense", "CogVideoX 1.5, 48 heads of 64, our kernel dense", "dense"),
        _cogvideox_case(chip, "cogvideox15_svg30", "CogVideoX 1.5, knob 0.30 + first frame", "both"),
        _cogvideox_case(chip, "cogvideox15_density30", "CogVideoX 1.5, density=0.30, sink counted in", "both", 0.30),
    ]


def densities(case: Case) -> dict[str, float]:
    """Pair density, and tile density of what is executed, averaged over the kinds of the case's heads."""
    if case.plan is None:
        return {}
    program = case.programs[0]
    if len(program.arguments) < 4:
        return {}
    kinds = np.asarray(program.arguments[3]).reshape(-1)
    blocks, patterns = program.static["blocks"], case.plan.patterns
    return {
        "pair_density": float(np.mean([pair_density(patterns[kind], case.plan.grid) for kind in kinds])),
        "tile_density": float(np.mean([tile_density(case.plan, blocks, int(kind)) for kind in kinds])),
    }
