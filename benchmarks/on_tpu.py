"""The ladder on a real TPU, beside its predictions: `python -m benchmarks.on_tpu [--prediction ladder.json]`.

Every case runs through the product's own bridge on torch_xla. It is timed only after a check of its output: sampled
query rows against f32 attention with the case's own mask on the host. Predictions come from `python -m
benchmarks.ladder --output ladder.json`, made on any machine; without one the column stays empty.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from torch_svg import bridge

WARM_UP, REPEATS = 2, 10
CHECKED_ROWS, TOLERANCE = 32, 0.01


def random_inputs(shapes, seed: int = 0) -> list[torch.Tensor]:
    """Host tensors for a program's arguments; head kinds and other real arrays stay what they are."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for argument in shapes:
        if isinstance(argument, np.ndarray):
            tensors.append(torch.from_numpy(argument.copy()))
        else:
            values = torch.randn(tuple(argument.shape), generator=generator, dtype=torch.float32)
            tensors.append(values.to(torch.bfloat16 if str(argument.dtype) == "bfloat16" else torch.float32))
    return tensors


def expected_rows(tensors, plan, heads: int, rows: np.ndarray) -> torch.Tensor:
    """(rows, heads, head_dim) f32: exact masked attention of sampled memory rows, on the host."""
    from torch_svg.pattern import keep

    query, key, value = (x[0].reshape(x.shape[1], heads, -1).float() for x in tensors[:3])
    kinds = tensors[3].reshape(-1).tolist()
    everything = np.arange(plan.grid.tokens)
    masks = {kind: torch.from_numpy(keep(plan.patterns[kind], plan.grid, rows, everything)) for kind in set(kinds)}
    output = torch.empty(len(rows), heads, query.shape[-1])
    for head, kind in enumerate(kinds):
        scores = query[rows, head] @ key[:, head].T * query.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(~masks[kind], -math.inf), dim=-1)
        output[:, head] = weights @ value[:, head]
    return output


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).square().mean() / want.square().mean()).sqrt())


def check(case, program, tensors, output) -> float | None:
    """Relative RMS of sampled rows; None for cases that are inexact by design or no attention of ours.

    Raises:
        ArithmeticError: The output is wrong; such a case is not timed.
    """
    if case.plan is None or not case.exact or "heads" not in program.static or len(tensors) < 4:
        return None
    rows = np.unique(np.linspace(0, case.plan.grid.tokens - 1, CHECKED_ROWS).astype(int))
    heads = program.static["heads"]
    got = output[0].reshape(output.shape[1], heads, -1)[rows].float().cpu()
    error = relative_rms(got, expected_rows(tensors, case.plan, heads, rows))
    if not error <= TOLERANCE:
        raise ArithmeticError(f"{case.name}: relative RMS {error:.3%}, allowed {TOLERANCE:.0%}")
    return error


def timed(function, inputs, static) -> tuple[float, object]:
    """Median milliseconds of one call, waiting for the device after each; and the output."""
    import torch_xla

    output, times = None, []
    for turn in range(WARM_UP + REPEATS):
        torch_xla.sync(wait=True)
        start = time.perf_counter()
        output = bridge.call(function, *inputs, **static)
        torch_xla.sync(wait=True)
        if turn >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times)), output


def measure(case, device) -> dict:
    """One line: measured milliseconds of the case's calls, and the check's error."""
    row = {"case": case.name, "measured_ms": 0.0, "relative_rms": None}
    for program in case.programs:
        tensors = random_inputs(program.arguments)
        inputs = [tensor.to(device) for tensor in tensors]
        output = bridge.call(program.function, *inputs, **program.static)
        row["relative_rms"] = check(case, program, tensors, output)
        milliseconds, _ = timed(program.function, inputs, program.static)
        row["measured_ms"] += milliseconds
    return row


def table(rows: list[dict], predictions: dict[str, float]) -> str:
    """Measured beside predicted, each over its own Splash."""
    measured = {row["case"]: row.get("measured_ms") for row in rows}

    def over(times, name):
        base = times.get("splash_dense")
        return f"{base / times[name]:6.2f}x" if base and times.get(name) else f"{'-':>7}"

    lines = [f"{'case':19} {'measured':>9} {'predicted':>9} {'ratio':>6} {'measured x':>10} {'predicted x':>11}  check"]
    for row in rows:
        name, found, said = row["case"], row.get("measured_ms"), predictions.get(row["case"])
        if found is None:
            lines.append(f"{name:19} failed: {row['error']}")
            continue
        said_text = f"{said:9.2f}" if said else f"{'-':>9}"
        ratio = f"{found / said:6.2f}" if said else f"{'-':>6}"
        checked = f"{row['relative_rms']:.2%}" if row["relative_rms"] is not None else "-"
        gains = f"{over(measured, name):>10} {over(predictions, name):>11}"
        lines.append(f"{name:19} {found:9.2f} {said_text} {ratio} {gains}  {checked}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_tpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--prediction", type=Path, metavar="JSON", help="written by benchmarks.ladder --output")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case (may be given more than once)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="also write the rows to a file")
    options = parser.parse_args(arguments)
    if bridge.platform() != "tpu":
        print("no TPU here: got PJRT_DEVICE=CPU. Predictions need none: python -m benchmarks.ladder", file=sys.stderr)
        return 1
    import torch_xla

    from benchmarks.cases import ladder
    from torch_svg.kernels import tuning

    predictions = {}
    if options.prediction:
        predicted = json.loads(options.prediction.read_text())
        predictions = {row["case"]: row["ms"] for row in predicted["rows"]}
    rows = []
    for case in ladder(tuning.chip_here()):
        if options.case and case.name not in options.case:
            continue
        try:
            rows.append(measure(case, torch_xla.device()))
        except (ArithmeticError, RuntimeError) as failure:
            rows.append({"case": case.name, "measured_ms": None, "error": str(failure)[:300]})
        print(table(rows[-1:], predictions).splitlines()[-1], file=sys.stderr)
    print("MEASURED here, PREDICTED by the compiler's schedule")
    print(table(rows, predictions))
    if options.output:
        options.output.write_text(json.dumps({"rows": rows, "predictions": predictions}, indent=1) + "\n")
    return 0 if all(row["measured_ms"] is not None for row in rows) else 2


if __name__ == "__main__":
    sys.exit(main())
