"""How long a kernel runs: its static schedule, walked the way the scalar unit walks it.

A TPU kernel's control flow is decided by scalar instructions alone: grid counters and small tables in SMEM that
arrive by scalar prefetch. Given those tables, this module executes just the scalar instructions on which a branch
depends, counts how often every region runs, and adds up the regions' bundles. Nothing about the kernel has to be told
or guessed: the same walk serves stock Splash and our own kernels.

The sum is a lower bound for a chip: a bundle can wait for DMA or for instruction fetch, which a schedule does not
show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torch_svg.scalar_values import NAMES, OPCODES, Unread
from torch_svg.schedule import Schedule, UnknownScheduleFormat

_LABEL = re.compile(r"\s*\$region(\d+)(?: \(\w+\))?:")
_INSTRUCTION = re.compile(r"\s*(?:(%\w+)\s*=\s*)([\w.]+)(.*)")
_COMMENT = re.compile(r"/\*.*?\*/")
_PREDICATE = re.compile(r"\((!?%p\w+)(?:, (%\w+))?\),?")
_ADDRESS = re.compile(r"\[smem:\[(#\w+)(?: \+ ([^\]]+))?\]\]")
_PREFETCHED = re.compile(r"(#allocation\d+) \[.*size = (\w+), .*tag = 'prefetched SMEM operand (\d+)'")
_TARGET = re.compile(r"region = (\d+)")
_NUMBER = re.compile(r"-?(0x[0-9a-f]+|\d+)")
# the allocation that holds the core's index
_CORE = "#allocation0"
_MOST_STEPS = 200_000_000


@dataclass(frozen=True)
class Walk:
    """What a kernel does in one call.

    Args:
        cycles: Bundles executed, static delays included.
        counts: How often each region ran, by region number.
        unit_cycles: Cycles that each unit needs at least, by unit (slot-cycles in use / slots).
    """

    cycles: int
    counts: dict[int, int]
    unit_cycles: dict[str, float]

    def milliseconds(self, clock_ghz: float) -> float:
        return self.cycles / clock_ghz / 1e6


def walk(schedule: Schedule, scalars: Sequence[np.ndarray] = (), assume: bool | dict[int, bool] | None = None) -> Walk:
    """Executes a kernel's scalar control flow and adds up the bundles.

    Args:
        schedule: The kernel's schedule.
        scalars: The scalar-prefetch operands in their order, with the values of the call to be predicted. Integer
            arrays are read as they lie in SMEM; a float array may be given as None, no branch can read it.
        assume: Whether branches that hang on data are taken: for all of them, or by region number. False is right for
            a kernel whose only such branches are ways out for unusual data.

    Raises:
        DataDependentBranch: A branch hangs on data and is not in ``assume``.
        UnknownScheduleFormat: The program has a form of branch that is not known.
    """
    program = _Program(schedule.program, scalars)
    counts = program.run({} if assume is None else assume)
    cycles, units = 0, Counter()
    for region in schedule.regions:
        times = 1 if region.kind == "program" else counts.get(region.number, 0)
        cycles += times * region.own_bundles
        for unit, used in region.own_units.items():
            units[unit] += times * used
    executed = {region.number: counts.get(region.number, 0) for region in schedule.regions[1:]}
    return Walk(cycles, executed, {unit: used / schedule.slots[unit] for unit, used in units.items()})


@dataclass
class _Instruction:
    target: str | None
    opcode: str
    operands: list[str]
    predicate: str | None
    otherwise: str | None
    address: tuple[str, list[str]] | None
    jump: int | None


def _parse(line):
    match = _INSTRUCTION.match(line)
    if not match or not (match[2][0] in "sp" or match[2].startswith("vpop")):
        return None
    rest = _COMMENT.sub("", match[3])
    opcode = match[2]
    jump = None
    if opcode.startswith("sbr"):
        found = _TARGET.search(rest)
        if opcode != "sbr.rel" or not found:
            raise UnknownScheduleFormat(f"a branch of an unknown form: {line.strip()[:120]}")
        jump = int(found[1])
        rest = rest.split("target")[0]
    predicate = otherwise = None
    if found := _PREDICATE.search(rest):
        predicate, otherwise = found.groups()
        rest = rest[: found.start()] + rest[found.end() :]
    address = None
    if found := _ADDRESS.search(rest):
        address = found[1], [part.strip().lstrip("$") for part in (found[2] or "0").split("+")]
        rest = rest[: found.start()] + rest[found.end() :]
    operands = [part.strip() for part in rest.split(",") if part.strip()]
    return _Instruction(match[1], opcode, operands, predicate, otherwise, address, jump)


def _words(array, allocated_bytes):
    """An integer array as the 32-bit words that it takes in SMEM; None where the layout is not known.

    One-dimensional 32-bit arrays lie as they are. Of others the last two dimensions are cut into tiles of 8 x 128, and
    narrow elements of neighbouring rows share a word.
    """
    if array is None or np.asarray(array).dtype.kind not in "iu":
        return None
    array = np.asarray(array)
    packed = 4 // array.dtype.itemsize
    if array.ndim == 1:
        return array.view(np.int32).tolist() if packed == 1 and array.nbytes <= allocated_bytes else None
    planes = array.reshape(-1, *array.shape[-2:])
    rows = max(packed, min(8, 1 << (planes.shape[1] - 1).bit_length()))
    planes = np.pad(planes, ((0, 0), (0, -planes.shape[1] % rows), (0, -planes.shape[2] % 128)))
    if planes.nbytes != allocated_bytes:
        return None
    tiles = planes.reshape(len(planes), -1, rows // packed, packed, planes.shape[2] // 128, 128)
    ordered = np.ascontiguousarray(tiles.transpose(0, 1, 4, 2, 5, 3))
    return ordered.reshape(-1).view(np.int32).tolist()


class _Program:
    """The scalar instructions that decide branches, turned into one small Python function per basic block."""

    def __init__(self, lines, scalars):
        self.tables = {}
        self.entries = []  # region number or _Instruction, in program order
        for line in lines:
            if match := _LABEL.match(line):
                self.entries.append(int(match[1]))
            elif match := _PREFETCHED.search(line):
                index = int(match[3])
                given = scalars[index] if index < len(scalars) else None
                self.tables[match[1]] = _words(given, int(match[2], 0))
            elif (instruction := _parse(line)) is not None:
                self.entries.append(instruction)
        self.instructions = [entry for entry in self.entries if isinstance(entry, _Instruction)]
        self._merge_phis()
        self._slice()

    def _merge_phis(self):
        """Conventional phis: a phi and its operands never interfere, so they share one variable."""
        self.leader = {}

        def find(name):
            while self.leader.get(name, name) != name:
                name = self.leader[name]
            return name

        for instruction in self.instructions:
            if instruction.opcode == "sphi":
                for operand in instruction.operands:
                    self.leader[find(operand)] = find(instruction.target)
        self.find = find

    def _reads(self, instruction):
        names = list(instruction.operands)
        names += [name for name in (instruction.predicate, instruction.otherwise) if name]
        names += instruction.address[1] if instruction.address else []
        return {self.find(name.lstrip("!")) for name in names if name.lstrip("!").startswith("%")}

    def _slice(self):
        """Keeps the instructions that a branch depends on."""
        needed, places = set(), set()
        for instruction in self.instructions:
            if instruction.opcode == "sbr.rel":
                needed |= self._reads(instruction)
        kept, size = set(), -1
        while size != len(kept):
            size = len(kept)
            for index, instruction in enumerate(self.instructions):
                base = instruction.opcode.split(".")[0]
                if index in kept or base == "sbr":
                    continue
                if base == "sst":
                    wanted = instruction.address is not None and instruction.address[0] in places
                else:
                    wanted = self.find(instruction.target) in needed
                if wanted:
                    kept.add(index)
                    needed |= self._reads(instruction)
                    if base == "sld" and instruction.address:
                        places.add(instruction.address[0])
        self.kept = {id(self.instructions[index]) for index in kept}

    def _variable(self, name):
        if name.startswith("!"):
            return f"negate({self._variable(name[1:])})"
        if name.startswith("%"):
            return f"r[{self.registers.setdefault(self.find(name), len(self.registers))}]"
        return str(int(name, 0)) if _NUMBER.fullmatch(name) else f"Unread({name!r})"

    def _value(self, instruction):
        """The Python expression of an instruction's result."""
        base, _, kind = instruction.opcode.partition(".")
        # what the vector unit hands over hangs on data
        if base in ("vpop", "spop"):
            return "None"
        if base == "sld" and instruction.address:
            name, offset = instruction.address[0], self._sum(instruction.address[1])
            if self.tables.get(name) is not None:
                return f"look(t[{name!r}], {offset})"
            return "0" if name == _CORE else f"m.get(({name!r}, {offset}))"
        values = [self._variable(operand) for operand in instruction.operands]
        if base == "scmp" and ".f32" not in kind:
            comparison, sign = kind.split(".")[:2]
            return f"compare_{comparison}({', '.join(values)}, {sign.startswith('u')})"
        if base in OPCODES and ".f32" not in kind:
            return OPCODES[base].format(*values)
        return f"unread({instruction.opcode!r}, {', '.join(values)})"

    def _sum(self, parts):
        text = self._variable(parts[0])
        for part in parts[1:]:
            text = f"add({text}, {self._variable(part)})"
        return text

    def _source(self, instruction):
        """The Python statement of an instruction, None where phis share a variable anyway."""
        if instruction.opcode == "sphi":
            return None
        if instruction.opcode.startswith("sst"):
            target = f"m[{instruction.address[0]!r}, {self._sum(instruction.address[1])}]"
            value, otherwise = self._variable(instruction.operands[-1]), f"m.get(({target[2:-1]}))"
        else:
            target, value = self._variable(instruction.target), self._value(instruction)
            otherwise = self._variable(instruction.otherwise) if instruction.otherwise else target
        if instruction.predicate:
            value = f"select({self._variable(instruction.predicate)}, {value}, {otherwise})"
        return f"{target} = {value}"

    def run(self, assume):
        """{region number: times entered}."""
        self.registers = {}
        starts, blocks = {}, [[]]
        for entry in self.entries:
            if isinstance(entry, int):
                # a block of its own even where no scalar instruction is left: its entries are counted
                blocks.append([])
                starts[entry] = len(blocks) - 1
            else:
                blocks[-1].append(entry)
                if entry.opcode == "sbr.rel":
                    blocks.append([])
        blocks.append([])
        source = []
        for index, block in enumerate(blocks):
            lines = []
            after = str(index + 1)
            for instruction in block:
                if instruction.opcode != "sbr.rel":
                    if id(instruction) in self.kept and (line := self._source(instruction)):
                        lines.append(line)
                    continue
                goal = starts[instruction.jump]
                after = self._branch(instruction, goal, index, starts, assume)
            body = "".join(f"    {line}\n" for line in lines)
            source.append(f"def block{index}(r, m, t):\n{body}    return {after}\n")
        names = dict(NAMES)
        exec(compile("\n".join(source), "<scalar program>", "exec"), names)
        functions = [names[f"block{index}"] for index in range(len(blocks))]
        entered = self._execute(functions)
        return {region: entered[block] for region, block in starts.items() if block < len(blocks)}

    def _branch(self, instruction, goal, index, starts, assume):
        following = index + 1
        condition = instruction.predicate or (instruction.operands[0] if instruction.operands else None)
        if condition is None:
            return str(goal)
        # a branch jumps over what follows; a loop jumps back
        over = next((region for region, block in starts.items() if block >= following), None) if goal > index else None
        told = assume.get(over) if isinstance(assume, dict) else assume
        return f"decide({self._variable(condition)}, {goal}, {following}, {over}, {told})"

    def _execute(self, functions):
        registers, memory = [Unread("a value that is never set")] * (len(self.registers) + 1), {}
        entered = [0] * (len(functions) + 1)
        block, steps, end = 0, 0, len(functions)
        while block < end:
            entered[block] += 1
            block = functions[block](registers, memory, self.tables)
            steps += 1
            if steps > _MOST_STEPS:
                raise UnknownScheduleFormat("the walk does not end: the program was not understood")
        return entered
