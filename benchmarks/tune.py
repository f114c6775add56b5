"""Finds block sizes with the compiler's cycles as the cost: `python -m benchmarks.tune --chip v6e --tokens 21x45x80`.

Candidates are screened by a rough cost of their work tables, the best few are compiled for the chip, and the winner
is checked against the reference in the interpreter. `--write` puts it into the table that the kernels read; `--tokens`
takes several grids and names, and `all` for all of `benchmarks/shapes.py`. Nothing runs on a TPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
import torch

from benchmarks.cases import KNOBS, Program, kinds_of, own_attention, plan_of
from benchmarks.ladder import FAILURES, Ruler
from benchmarks.shapes import SHAPES, knob_half_width
from torch_svg import aot
from torch_svg.grid import TokenGrid
from torch_svg.kernels import block_sparse, tuned_blocks, tuning
from torch_svg.kernels.reference import reference_attention
from torch_svg.pattern import SPATIAL, TEMPORAL, Plan
from torch_svg.worktable import FIRST_FULL, PARTIAL, Blocks, work_table

TABLE = Path(tuned_blocks.__file__)
# rough cycles on v6e, fitted to compiled bodies: per pair, per key row, per query row, per item
PER_PAIR, PER_KEY, PER_QUERY, PER_ITEM = 1.55e-3, 0.116, 0.016, 530
EDGE_FACTOR, PARTIAL_FACTOR = 1.3, 2.0
# largest relative RMS against the f32 reference in bf16
TOLERANCE = 0.01
# what fetching code again costs is in no schedule: of candidates this close, the one with the fewest overlays wins
OVERLAY_MARGIN = 0.03


@dataclass(frozen=True)
class Result:
    """A candidate, its predicted time and the pieces of its code."""

    blocks: Blocks
    milliseconds: float
    code_overlays: int


def parse_tokens(text: str) -> TokenGrid:
    """``FRAMESxHEIGHTxWIDTH``, or a name of `benchmarks.shapes`."""
    if text in SHAPES:
        return SHAPES[text].grid
    try:
        return TokenGrid(*map(int, text.split("x")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"got tokens {text!r}, expected FRAMESxHEIGHTxWIDTH or one of {sorted(SHAPES)}") from error


def candidates(grid: TokenGrid, chip: str) -> list[Blocks]:
    """Block sizes worth a thought, the rule's own among them."""
    limits, found = tuning.limits_of(chip), {tuning.rule(grid, chip)}
    for unit in range(16, 129, 16):
        padded = -(-grid.tokens_per_frame // unit) * unit
        rows, granules = unit * grid.frames, padded // unit
        if padded > 1.03 * grid.tokens_per_frame or not 96 <= rows <= 1024:
            continue
        for query in range(1, granules + 1):
            if not limits.query / 3 <= query * rows <= 1.1 * limits.query:
                continue
            for largest in {query, max(1, limits.full // rows), max(1, 4 * limits.full // (5 * rows))}:
                for parts in ((2,), (3,), (2, 4), (2, 5)):
                    sizes = tuple(sorted({largest, 1, *(max(1, largest // part) for part in parts)}, reverse=True))
                    for edge in {0, max(1, limits.edge // rows), query}:
                        if edge == 0 or granules > 3 * query:
                            found.add(Blocks(unit, query, sizes, edge))
    return list(found)


def rough_cycles(plan: Plan, blocks: Blocks) -> float:
    """Cycles of one spatial and one temporal head by the fitted cost: only good enough to rank."""
    table = work_table(plan, blocks)
    total = 0.0
    for pattern in (SPATIAL, TEMPORAL):
        for block in range(table.query_blocks):
            total += 1500
            for item in table.items_of(pattern, block):
                cycles = PER_PAIR * table.pairs_of(item) + PER_QUERY * table.query_rows
                cycles += PER_KEY * item.granules * table.layout.granule_rows + PER_ITEM
                if item.body == PARTIAL:
                    cycles = PARTIAL_FACTOR * cycles
                elif item.body >= FIRST_FULL + len(blocks.full_granules):
                    cycles = EDGE_FACTOR * cycles
                total += cycles
    return total


def measure(ruler: Ruler, grid: TokenGrid, heads: int, head_dim: int, blocks: Blocks) -> Result:
    """Compiles one candidate; half the heads spatial and half temporal."""
    array = jax.ShapeDtypeStruct((1, grid.tokens, heads * head_dim), jax.numpy.bfloat16)
    plan = plan_of(grid, knob_half_width(grid, KNOBS["svg30"]))
    static = {"plan": plan, "heads": heads, "blocks": blocks}
    program = Program(own_attention, (array, array, array, kinds_of(heads, "both")), static)
    return Result(blocks, ruler.predict(program).milliseconds, ruler.compile(program).overlays.count)


def check_numerics(grid: TokenGrid, head_dim: int, blocks: Blocks) -> float:
    """Relative RMS against the reference in the interpreter, on a small grid that uses the same bodies."""
    granules = 2 * blocks.query_granules + 1
    small = TokenGrid(grid.frames, 1, granules * blocks.unit - 3)
    plan = plan_of(small, small.video_tokens // 5)
    generator = torch.Generator().manual_seed(0)
    shape = (1, small.tokens, 2, head_dim)
    arrays = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
    kinds = torch.tensor([[SPATIAL, TEMPORAL]], dtype=torch.int32)
    want = reference_attention(*arrays, kinds, plan=plan).float().numpy()
    inputs = [jax.numpy.asarray(x.float().numpy(), jax.numpy.bfloat16) for x in arrays]
    got = block_sparse.block_sparse_attention(*inputs, kinds.numpy(), plan=plan, blocks=blocks, interpret=True)
    got = np.asarray(got, np.float32)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def tune(chip: str, grid: TokenGrid, heads: int, head_dim: int, compiles: int) -> list[Result]:
    """The compiled candidates, best first."""
    plan = plan_of(grid, knob_half_width(grid, KNOBS["svg30"]))
    chosen, sizes = [tuning.rule(grid, chip)], set()
    for blocks in sorted(candidates(grid, chip), key=lambda blocks: rough_cycles(plan, blocks)):
        # the rough cost hardly tells variants of one query block apart: one of each is compiled
        size = blocks.unit, blocks.query_granules, blocks.full_granules[0]
        if len(chosen) < compiles and blocks not in chosen and size not in sizes:
            chosen.append(blocks)
            sizes.add(size)
    ruler, results = Ruler(chip), []
    for blocks in chosen:
        try:
            result = measure(ruler, grid, heads, head_dim, blocks)
        except FAILURES as failure:
            print(f"{blocks}: {type(failure).__name__} {str(failure)[:120]}", file=sys.stderr)
            continue
        print(f"{result.milliseconds:8.2f} ms, {result.code_overlays} code overlays  {blocks}", file=sys.stderr)
        results.append(result)
    if not results:
        raise RuntimeError(f"none of {len(chosen)} candidates compiles for {chip}; see the messages above")
    return ranked(results)


def ranked(results: list[Result]) -> list[Result]:
    """Best first: quickest, but the fewest code overlays among those nearly as quick as the quickest."""
    bound = (1 + OVERLAY_MARGIN) * min(result.milliseconds for result in results)
    return sorted(
        results,
        key=lambda result: (
            result.milliseconds > bound,
            result.code_overlays if result.milliseconds <= bound else 0,
            result.milliseconds,
        ),
    )


def write(chip: str, grid: TokenGrid, head_dim: int, blocks: Blocks) -> None:
    """Adds an entry to the shipped table, or replaces it."""
    entries = dict(tuned_blocks.TABLE)
    sizes = (blocks.unit, blocks.query_granules, blocks.full_granules, blocks.edge_granules)
    entries[chip, head_dim, grid.frames, grid.tokens_per_frame] = sizes
    rows = [
        f'    ("{name}", {dim}, {frames}, {places}): {value},'
        for (name, dim, frames, places), value in sorted(entries.items())
    ]
    lines = [f'"""{tuned_blocks.__doc__}"""', "", "TABLE = {", *rows]
    TABLE.write_text("\n".join([*lines, "}", ""]))
    tuned_blocks.TABLE = entries


def tune_grid(options: argparse.Namespace, name: str) -> dict:
    """Tunes one grid, checks and perhaps writes its winner; a summary for ``--json``."""
    grid, named = parse_tokens(name), SHAPES.get(name)
    head_dim = options.head_dim or (named.head_dim if named else 128)
    results = tune(options.chip, grid, options.heads, head_dim, options.compiles)
    best = results[0].blocks
    error = check_numerics(grid, head_dim, best)
    if error > TOLERANCE:
        raise RuntimeError(f"{best} is off by {error:.3%} in the interpreter, allowed {TOLERANCE:.0%}")
    if options.write:
        write(options.chip, grid, head_dim, best)
    rows = [
        {**asdict(result.blocks), "ms": result.milliseconds, "code_overlays": result.code_overlays}
        for result in results
    ]
    return {"chip": options.chip, "grid": name, "head_dim": head_dim, "relative_rms": error, "rows": rows}


def distinct_shapes() -> list[str]:
    """Names of shapes, one for each grid and head_dim."""
    return list({(shape.grid, shape.head_dim): name for name, shape in reversed(SHAPES.items())}.values())[::-1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n\n")[0])
    parser.add_argument("--chip", default="v6e", choices=sorted(n for n, c in aot.CHIPS.items() if c.clock_ghz))
    parser.add_argument("--tokens", required=True, nargs="+", metavar="FxHxW", help="grids, names of shapes, or all")
    parser.add_argument("--heads", type=int, default=8, help="heads of the compiled call; times scale with it")
    parser.add_argument("--head-dim", type=int, help="default: 128, or that of the named shape")
    parser.add_argument("--compiles", type=int, default=6, help="candidates to compile, after screening")
    parser.add_argument("--write", action="store_true", help="put the winner into the shipped table")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if reason := aot.available():
        print(reason, file=sys.stderr)
        return 1
    jax.config.update("jax_platforms", "cpu")
    names = distinct_shapes() if options.tokens == ["all"] else options.tokens
    summaries, failed = [], False
    for name in names:
        print(f"{options.chip} {name}", file=sys.stderr)
        try:
            summary = tune_grid(options, name)
        except RuntimeError as failure:
            failed = True
            print(f"{name}: {failure}", file=sys.stderr)
            continue
        summaries.append(summary)
        best = summary["rows"][0]
        if not options.json:
            print(f"PREDICTED for {options.chip}, {name}: {best}; interpreter off by {summary['relative_rms']:.2%}")
    if options.json:
        print(json.dumps(summaries, indent=1))
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
