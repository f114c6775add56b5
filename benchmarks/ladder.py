"""The kernel's ladder, predicted by the TPU compiler: `python -m benchmarks.ladder [--chip v6e] [--json]`.

Every case is compiled by libtpu for the chip, on any x86 machine, and its time is read off the static schedule.
Nothing is executed and nothing is measured; stock Splash, compiled in the same run, is the yardstick at 1.00x. See
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.cases import Case, Program, densities, ladder
from torch_svg import aot, hlo
from torch_svg.kernel_scalars import kernel_scalars
from torch_svg.scalar_values import DataDependentBranch
from torch_svg.schedule import UnknownScheduleFormat

# what one case may fail with without taking the others along
FAILURES = (aot.CompileError, UnknownScheduleFormat, DataDependentBranch, NotImplementedError)


class Ruler:
    """Compiles programs for one chip, each once."""

    def __init__(self, chip: str):
        self.chip = chip
        self._compiled = {}

    def compile(self, program: Program) -> aot.Compiled:
        shapes = tuple((argument.shape, str(argument.dtype)) for argument in program.arguments)
        key = (program.function, shapes, repr(sorted(program.static.items())))
        if key not in self._compiled:
            self._compiled[key] = aot.compile_function(
                program.function, *program.arguments, chip=self.chip, schedule=True, **program.static
            )
        return self._compiled[key]

    def predict(self, program: Program) -> aot.Prediction:
        """The ways out of the kernel's softmax are assumed not taken: ordinary data do not take them."""
        scalars = kernel_scalars(program.function, *program.arguments, **program.static)
        return self.compile(program).predict(scalars, assume=False)


def row_of(case: Case, ruler: Ruler) -> dict:
    """One line of the ladder. Times in milliseconds, sizes in MiB, all predicted."""
    row = {"case": case.name, "what": case.what, "exact": case.exact, "published_ms": case.published_ms}
    try:
        compiled = [ruler.compile(program) for program in case.programs]
        predictions = [ruler.predict(program) for program in case.programs]
    except FAILURES as failure:
        return {**row, "ms": None, "error": f"{type(failure).__name__}: {failure}"[:500]}
    row["ms"] = sum(prediction.milliseconds for prediction in predictions)
    row["bundles"] = sum(schedule.bundles for one in compiled for schedule in one.schedules)
    row["executed_bundles"] = sum(prediction.cycles for prediction in predictions)
    row |= densities(case)
    clock = compiled[0].chip.clock_ghz
    around = sum(prediction.other_cycles for prediction in predictions)
    for one, prediction in zip(compiled, predictions, strict=True):
        # a kernel without a table, which only moves rows, is as much around the attention as XLA's copies are
        operands = hlo.kernel_operands(one.text)
        moving = [name for name in prediction.kernels if case.dense and not operands[name][0].startswith("s32")]
        around += sum(map(prediction.kernel_cycles, moving))
    row["around_kernel_ms"] = around / clock / 1e6
    row["movements"] = [op.name for one in compiled for op in one.movements()]
    units = [walk.unit_cycles for prediction in predictions for walk in prediction.kernels.values()]
    row["unit_ms"] = {unit: sum(cycles[unit] for cycles in units) / clock / 1e6 for unit in (units[0] if units else ())}
    row["ms_by_kind"] = {}
    for kind, values in case.variants.items():
        first = case.programs[0]
        varied = Program(first.function, (*first.arguments[:3], values, *first.arguments[4:]), first.static)
        row["ms_by_kind"][kind] = ruler.predict(varied).milliseconds
    row["extra_ms"] = {name: ruler.predict(program).milliseconds for name, program in case.extra.items()}
    row["code_overlays"] = max(one.overlays.count for one in compiled)
    row["vmem_mib"] = max((schedule.vmem_bytes for one in compiled for schedule in one.schedules), default=0) / 2**20
    row["hbm_temporaries_mib"] = max(one.memory.temporaries for one in compiled) / 2**20
    row["compile_seconds"] = sum(one.compile_seconds for one in compiled)
    return row


def compare(rows: list[dict], cases: list[Case]) -> None:
    """Adds the ratios to the yardsticks, in place."""
    times = {row["case"]: row["ms"] for row in rows}
    for row, case in zip(rows, cases, strict=True):

        def ratio(other, row=row):
            return times[other] / row["ms"] if times.get(other) and row["ms"] else None

        row["vs_splash"] = ratio("splash_dense") if case.over_splash else None
        row["vs_own_dense"] = ratio(case.dense)
        if case.name.endswith("_google"):
            row["vs_google_described"] = ratio("google_described")


def run(chip: str, names: list[str] | None = None, quiet: bool = False) -> dict:
    """The whole ladder as the JSON has it.

    Raises:
        ValueError: An unknown chip or case.
    """
    cases = ladder(chip)
    unknown = set(names or ()) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"got cases {sorted(unknown)}, expected some of {[case.name for case in cases]}")
    cases = [case for case in cases if not names or case.name in names]
    ruler = Ruler(chip)
    start = time.perf_counter()
    rows = []
    for case in (bar := tqdm(cases, file=sys.stderr, disable=quiet)):
        bar.set_description(case.name)
        rows.append(row_of(case, ruler))
    compare(rows, cases)
    return {
        "chip": chip,
        "clock_ghz": aot.CHIPS[chip].clock_ghz,
        "rung": "ahead of time: predicted from the compiler's static schedule, nothing measured",
        "versions": {name: version(name) for name in ("torch_svg", "jax", "jaxlib", "libtpu")},
        "command": f"python -m benchmarks.ladder --chip {chip}" + "".join(f" --case {name}" for name in names or ()),
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }


def table(result: dict) -> str:
    """The ladder as text."""
    lines = [
        f"PREDICTED for {result['chip']} at {result['clock_ghz']} GHz by libtpu {result['versions']['libtpu']}; "
        "nothing was measured",
        f"{'case':19} {'ms':>8} {'x splash':>8} {'x dense':>8} {'pairs':>6} {'exact':>5} {'around':>7} {'bundles':>8} "
        f"{'VMEM':>5}  what",
    ]
    for row in result["rows"]:
        if row["ms"] is None:
            lines.append(f"{row['case']:19} not available: {row['error']}")
            continue
        pairs = f"{row['pair_density']:.3f}" if "pair_density" in row else "-"
        lines.append(
            f"{row['case']:19} {row['ms']:8.2f} {_ratio(row['vs_splash'])} {_ratio(row['vs_own_dense'])} {pairs:>6} "
            f"{'yes' if row['exact'] else 'no':>5} {row['around_kernel_ms']:7.2f} {row['bundles']:8d} "
            f"{row['vmem_mib']:5.1f}  {row['what']}"
        )
        notes = [f"{kind} {ms:.2f} ms" for kind, ms in {**row["ms_by_kind"], **row["extra_ms"]}.items()]
        if row.get("vs_google_described"):
            notes.append(f"{row['vs_google_described']:.2f} x google_described")
        if row["published_ms"]:
            notes.append(f"measured on a v6e and published: {row['published_ms']:.2f} ms")
        if row["code_overlays"] > 1:
            notes.append(f"code in {row['code_overlays']} overlays")
        if notes:
            lines.append(" " * 20 + "; ".join(notes))
    lines.append(f"{result['command']}   ({result['seconds']:.0f} s)")
    return "\n".join(lines)


def markdown(result: dict) -> str:
    """The ladder as the table of docs/performance.md."""
    lines = ["| case | ms | x splash | x dense | pairs | exact | around, ms | |", "|---|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        if row["ms"] is None:
            lines.append(f"| `{row['case']}` | not available | | | | | | {row['what']} |")
            continue
        gains = [f"{row[key]:.2f}" if row[key] else "" for key in ("vs_splash", "vs_own_dense")]
        pairs = f"{row['pair_density']:.3f}" if "pair_density" in row else ""
        notes = [row["what"], *(f"{kind} heads {ms:.2f}" for kind, ms in row["ms_by_kind"].items())]
        notes += [f"{name} {ms:.2f} more" for name, ms in row["extra_ms"].items()]
        if row.get("vs_google_described"):
            notes.append(f"{row['vs_google_described']:.2f} x google_described")
        if row["code_overlays"] > 1:
            notes.append(f"code in {row['code_overlays']} overlays")
        exact = "yes" if row["exact"] else "no"
        cells = [f"`{row['case']}`", f"{row['ms']:.2f}", *gains, pairs, exact, f"{row['around_kernel_ms']:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {'; '.join(notes)} |")
    return "\n".join(lines)


def _ratio(value):
    return f"{value:7.2f}x" if value else f"{'-':>8}"


def chart(result: dict, path: Path) -> None:
    """A bar chart of the cases that have Splash as their yardstick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["vs_splash"]]
    colours = {"splash_dense": "#9aa0a6", "google_described": "#f29900"}
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(rows) + 1.4), layout="constrained")
    positions = range(len(rows), 0, -1)
    bars = axes.barh(
        positions, [row["ms"] for row in rows], color=[colours.get(row["case"], "#1a73e8") for row in rows]
    )
    for bar, row in zip(bars, rows, strict=True):
        bar.set_alpha(1.0 if row["exact"] else 0.55)
        label = f" {row['ms']:.1f} ms  {row['vs_splash']:.2f}x" + ("" if row["exact"] else "  (inexact)")
        axes.text(row["ms"], bar.get_y() + bar.get_height() / 2, label, va="center", fontsize=8)
    axes.set_yticks(positions, [row["case"] for row in rows], fontsize=8)
    axes.set_xlim(0, 1.3 * max(row["ms"] for row in rows))
    axes.set_xlabel(f"predicted ms per call, {result['chip']} at {result['clock_ghz']} GHz (static schedule)")
    axes.set_title("75,600 tokens, 10 heads of 128, bf16: predicted, not measured", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__.split("\n\n")[0])
    chips = sorted(name for name, chip in aot.CHIPS.items() if chip.clock_ghz)
    parser.add_argument("--chip", default="v6e", choices=chips)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case (may be given more than once)")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="also write a bar chart")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to a file")
    options = parser.parse_args(arguments)
    if reason := aot.available():
        print(reason, file=sys.stderr)
        return 1
    # tables of the kernels are evaluated on the host
    jax.config.update("jax_platforms", "cpu")
    result = run(options.chip, options.case)
    text = json.dumps(result, indent=1, default=_plain)
    print(text if options.json else markdown(result) if options.markdown else table(result))
    if options.output:
        options.output.write_text(text + "\n")
    if options.chart:
        chart(result, options.chart)
    return 0 if all(row["ms"] is not None and math.isfinite(row["ms"]) for row in result["rows"]) else 2


def _plain(value):
    return value.item()


if __name__ == "__main__":
    sys.exit(main())
