"""Reading the optimised HLO of a compiled TPU program: what XLA put around the kernels, and its own cost estimates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|c64|c128)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}[,}]")
_BODY = re.compile(r'"custom_call_config":\{"body":"([^"]+)"')
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")

_SHUFFLES = {
    "copy", "copy-start", "transpose", "gather", "scatter", "pad", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "reshape", "reverse", "broadcast", "convert", "select",
}  # fmt: skip
# these move no data, or say nothing about movement
_FREE = {"parameter", "bitcast", "constant", "tuple", "get-tuple-element", "copy-done", "iota", "compare", "after-all"}
_NARROW = {"pred": 1, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class HloOp:
    """One instruction of the optimised HLO.

    Args:
        name: Instruction name, without the percent sign.
        opcode: HLO opcode.
        kind: "kernel" (a Pallas kernel), "movement" (it only moves, pads, converts or selects data) or "compute".
        bytes: Size of the result.
        shape: The result as HLO writes it.
        cycles: XLA's `estimated_cycles` of one run, None where XLA gives none (kernels, collectives, loops).
        runs: Times that it runs in one call, by known trip counts of loops.
    """

    name: str
    opcode: str
    kind: str
    bytes: int
    shape: str
    cycles: int | None
    runs: int


@dataclass(frozen=True)
class _Line:
    name: str
    shape: str
    opcode: str
    rest: str


def array_bytes(shape: str) -> int:
    """Bytes of an HLO shape, tuples summed, tiling padding not counted."""
    total = 0
    for dtype, sides in _ARRAY.findall(shape):
        size = _NARROW.get(dtype) or (1 if dtype.startswith("f8") else int(re.search(r"\d+", dtype)[0]) / 8)
        total += math.ceil(size * math.prod(int(side) for side in sides.split(",") if side))
    return total


def _computations(text):
    """{name: lines} and the entry's name; of several modules the last entry counts (the others are its helpers)."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_Line(*match.groups()))
    if entry is None:
        raise ValueError("this text holds no HLO entry computation: give the optimised HLO of a compiled program")
    return computations, entry


def operations(text: str) -> list[HloOp]:
    """The instructions that run in one call, in order; loop bodies and called computations in place, fusions as one."""
    computations, entry = _computations(text)
    found = []

    def visit(name, runs):
        for line in computations.get(name, ()):
            called = [part.strip(" %") for match in _CALLED.findall(line.rest) for part in match.split(",")]
            if line.opcode in _FREE:
                continue
            if line.opcode in ("while", "call", "conditional", "async-start"):
                trips = _TRIPS.search(line.rest)
                for part in called:
                    visit(part, runs * (int(trips[1]) if trips else 1))
                continue
            cycles = _CYCLES.search(line.rest)
            found.append(
                HloOp(
                    line.name,
                    line.opcode,
                    _kind(line, called, computations),
                    array_bytes(line.shape),
                    line.shape,
                    int(cycles[1]) if cycles else None,
                    runs,
                )
            )

    visit(entry, 1)
    return found


def _kind(line, called, computations):
    if line.opcode == "custom-call":
        return "kernel" if 'custom_call_target="tpu_custom_call"' in line.rest else "compute"
    if line.opcode == "fusion":
        inner = {part.opcode for name in called for part in computations.get(name, ())} - _FREE
        return "movement" if inner <= _SHUFFLES | {"fusion"} else "compute"
    return "movement" if line.opcode in _SHUFFLES else "compute"


def kernels(text: str) -> list[str]:
    """Instruction names of the Pallas kernels that one call runs."""
    return [op.name for op in operations(text) if op.kind == "kernel"]


def kernel_operands(text: str) -> dict[str, tuple[str, ...]]:
    """Kernel instruction -> the shapes of its operands, such as ``("s32[10]", "bf16[75600,1280]")``."""
    computations, _ = _computations(text)
    found = {}
    for lines in computations.values():
        for line in lines:
            if line.opcode == "custom-call" and (match := _OPERANDS.search(line.rest)):
                found[line.name] = tuple(f"{dtype}[{sides}]" for dtype, sides in _ARRAY.findall(match[1]))
    return found


def same_kernels(text: str) -> dict[str, str]:
    """Kernel instruction -> the first kernel with the same program and shapes, itself if it is the first."""
    computations, _ = _computations(text)
    first, found = {}, {}
    for lines in computations.values():
        for line in lines:
            if body := line.opcode == "custom-call" and _BODY.search(line.rest):
                key = line.shape, body[1]
                found[line.name] = first.setdefault(key, line.name)
    return found


def kernel_bytes(text: str) -> dict[str, int]:
    """Kernel instruction -> bytes of its results and of its distinct operands: what it reads and writes at least."""
    computations, _ = _computations(text)
    found, operands = {}, kernel_operands(text)
    for lines in computations.values():
        for line in lines:
            if line.name in operands:
                names = re.findall(r"%[\w.\-]+", line.rest.split("custom_call_target")[0])
                distinct = dict(zip(names, operands[line.name], strict=False))
                found[line.name] = array_bytes(line.shape) + sum(array_bytes(shape) for shape in distinct.values())
    return found


def movements(text: str, least_bytes: int = 2**20) -> list[HloOp]:
    """Copies, transposes, gathers, pads and casts of at least ``least_bytes`` that XLA put around the kernels."""
    return [op for op in operations(text) if op.kind == "movement" and op.bytes >= least_bytes]


def largest_array(text: str) -> tuple[int, str, str]:
    """(bytes, shape, instruction) of the largest single array that the program holds in HBM, parameters included."""
    computations, _ = _computations(text)
    fused = {
        part.strip(" %")
        for lines in computations.values()
        for line in lines
        if line.opcode == "fusion"
        for match in _CALLED.findall(line.rest)
        for part in match.split(",")
    }
    best = (0, "", "")
    for name, lines in computations.items():
        if name in fused:
            continue
        for line in lines:
            for match in _ARRAY.finditer(line.shape):
                size = array_bytes(match[0])
                if size > best[0]:
                    best = (size, match[0], line.name)
    return best
