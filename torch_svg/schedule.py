"""The TPU compiler's static schedule of a kernel, read from libtpu's text dumps.

A TPU core executes one VLIW bundle per cycle, and the compiler fixes at compile time which bundle does what and how
long every delay is. Two dumps per kernel say it all:

* `*-post-delay-converter.txt`: the program as nested regions. Each region gives its range in bundles, static delays
  included, and its scalar instructions, which decide how often it runs.
* `*-pre-delay_hlo-static-per-bundle-utilization.txt`: one row per bundle (in the same numbering) with the slots of
  each unit in use.

What a schedule cannot know: waiting for DMA, bank conflicts in VMEM, and instruction fetch. The formats are those of
libtpu 0.0.20 to 0.0.23; anything else raises `UnknownScheduleFormat`: no number is reported that was not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROGRAM_DUMP = "post-delay-converter.txt"
UNITS_DUMP = "pre-delay_hlo-static-per-bundle-utilization.txt"
OVERLAY_DUMP = "overlay-graph.txt"
# the dumps above are a thousandth of what libtpu would write without this filter
DUMP_FILTER = ".*(post-delay-converter|pre-delay_hlo-static|overlay-graph).*"

_HEADER = re.compile(r"^\$region0: #\{(.*)\}$", re.MULTILINE)
_REGION = re.compile(
    r"\s*\$region(\d+)(?: \(\w+\))?: #\{.*?\}(?: parent=(\d+)(?: \(\w+\))?)?(?: // (\w+))?",
)
_RANGE = re.compile(r"\s*// region range: \[(\d+), (\d+)\)")
_VMEM = re.compile(r"#allocation\w+ \[shape = .*space=vmem, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+)")
_OVERLAY = re.compile(r'"#\d+:(\w+) def:\S+ size:(\d+)')


class UnknownScheduleFormat(RuntimeError):
    """libtpu wrote its schedule in a form that this reader does not know."""


@dataclass(frozen=True)
class Region:
    """A stretch of bundles that runs as a whole: the kernel, one trip of a loop, or a predicated branch.

    Args:
        number: The compiler's region number.
        kind: "program", "loop" (one trip) or "branch" (taken when its condition holds).
        start: First bundle.
        end: One past the last bundle, delay slots of the closing branch included.
        parent: Number of the enclosing region, None for the program.
        own_bundles: Bundles outside nested regions.
        own_units: Slot-cycles per unit outside nested regions.
    """

    number: int
    kind: str
    start: int
    end: int
    parent: int | None
    own_bundles: int
    own_units: dict[str, int]

    @property
    def bundles(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Schedule:
    """The static schedule of one kernel.

    Args:
        name: The kernel's instruction in the optimised HLO.
        bundles: Length of the program, each region once.
        slots: Slots of each unit in a bundle, e.g. ``{"MXU": 2, ...}``.
        regions: All regions, the program first, in program order.
        vmem_bytes: VMEM that the kernel's scratch and spills take.
        program: The lines that the walker reads (`torch_svg.schedule_walk`).
    """

    name: str
    bundles: int
    slots: dict[str, int]
    regions: tuple[Region, ...]
    vmem_bytes: int
    program: tuple[str, ...]

    @cached_property
    def units(self) -> dict[str, int]:
        """Slot-cycles in use by unit, each region once."""
        return {unit: sum(region.own_units[unit] for region in self.regions) for unit in self.slots}

    def largest(self, count: int = 12) -> list[Region]:
        """The regions with most bundles of their own."""
        return sorted(self.regions, key=lambda region: -region.own_bundles)[:count]

    def __str__(self) -> str:
        header = f"{self.name}: {self.bundles} bundles, {self.vmem_bytes / 2**20:.1f} MiB VMEM"
        rows = [f"{'region':>7} {'kind':8} {'bundles':>8} {'own':>8}  cycles that each unit needs for the own part"]
        for region in self.largest():
            units = " ".join(f"{unit} {count / self.slots[unit]:.0f}" for unit, count in region.own_units.items())
            rows.append(f"{region.number:>7} {region.kind:8} {region.bundles:>8} {region.own_bundles:>8}  {units}")
        return "\n".join([header, *rows])


@dataclass(frozen=True)
class Overlays:
    """How the code is cut for the instruction memory: one overlay is fetched once, several are fetched on the way."""

    count: int
    bundles: int


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS that make libtpu write the dumps into ``folder``. They count only before libtpu is loaded."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={DUMP_FILTER}"


def read_schedules(folder: Path, kernels: list[str]) -> dict[str, Schedule]:
    """Schedules by kernel name.

    Args:
        folder: Where libtpu wrote its dumps.
        kernels: Instruction names of custom calls in the optimised HLO. Identical kernels are compiled once by
            libtpu; such a name maps to no schedule of its own and is left out.

    Raises:
        UnknownScheduleFormat: No dump for any of the kernels, or a dump that this reader does not know.
    """
    schedules = {}
    for path in sorted(folder.glob(f"*{PROGRAM_DUMP}")):
        text = path.read_text()
        header = _HEADER.search(text)
        if header and header[1] in kernels:
            # long kernel names are cut in file names, each file in its own way; the time stamp is the kernel's
            stamp = path.name.split("-", 1)[0]
            units = list(folder.glob(f"{stamp}-*{UNITS_DUMP}"))
            if len(units) == 1:
                schedules[header[1]] = read_schedule(header[1], text, units[0].read_text())
    if kernels and not schedules:
        raise UnknownScheduleFormat(
            f"libtpu compiled {kernels} but wrote no schedule for them that this reader knows (files: "
            f"{sorted(path.name for path in folder.iterdir())[:8]}). Known are libtpu 0.0.20 to 0.0.23"
        )
    return schedules


def read_overlays(folder: Path) -> Overlays | None:
    """Code overlays of the whole program, None if libtpu wrote no overlay graph."""
    paths = sorted(folder.glob(f"*{OVERLAY_DUMP}"))
    if not paths:
        return None
    sizes = [int(size) for name, size in _OVERLAY.findall(paths[-1].read_text()) if name == "tlp"]
    if not sizes:
        raise UnknownScheduleFormat(f"no 'tlp' node in {paths[-1].name}")
    return Overlays(len(sizes), sum(sizes))


def read_units(text: str) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    """Slots by unit and one row of used slots per bundle."""
    match = re.search(r"== CAPAC\w+:\s*\n(.*)\n(.*)\n== UTILIZATION:\s*\n", text)
    if not match:
        raise UnknownScheduleFormat("the unit dump has no capacity and utilization headers")
    names = [name.strip() for name in match[1].split("|")]
    slots = dict(zip(names, map(int, match[2].split()), strict=True))
    rows = [tuple(map(int, line.split())) for line in text[match.end() :].splitlines() if line.strip()]
    if any(len(row) != len(slots) for row in rows):
        raise UnknownScheduleFormat(f"a row of the unit dump has not {len(slots)} numbers")
    return slots, rows


def read_schedule(name: str, program: str, units: str) -> Schedule:
    """A schedule from the text of its two dumps."""
    slots, rows = read_units(units)
    lines = tuple(program.splitlines())
    spans = _spans(lines)
    total = spans[0][3]
    # two-core chips end with a bundle outside all regions, where the idle core waits
    if len(rows) not in (total, total + 1):
        raise UnknownScheduleFormat(f"{name}: the program has {total} bundles, the unit dump {len(rows)} rows")
    # prefix sums: units in use before each bundle
    before = [(0,) * len(slots)]
    for row in rows:
        before.append(tuple(a + b for a, b in zip(before[-1], row, strict=True)))

    def used(start, end):
        return [b - a for a, b in zip(before[start], before[end], strict=True)]

    regions = []
    for number, kind, start, end, parent in spans:
        inner = [(a, b) for _, _, a, b, p in spans if p == number]
        own = used(start, end)
        for a, b in inner:
            own = [x - y for x, y in zip(own, used(a, b), strict=True)]
        own_bundles = end - start - sum(b - a for a, b in inner)
        if own_bundles < 0:
            raise UnknownScheduleFormat(f"{name}: regions inside region {number} overlap")
        regions.append(Region(number, kind, start, end, parent, own_bundles, dict(zip(slots, own, strict=True))))
    vmem = max((int(size, 0) + int(offset, 0) for size, offset in _VMEM.findall(program)), default=0)
    return Schedule(name, total, slots, tuple(regions), vmem, lines)


def _spans(lines):
    """[(number, kind, start, end, parent)] of the regions that can run a different number of times than their parent.

    The compiler writes a branch as check, check_branch, region, fallthru, and a loop as pre_header, body, ...,
    header_branch, exit. A branch runs from the end of check_branch (after its delay slots) to the fallthru; a trip of
    a loop from the start of the body to the end of header_branch. All other regions are only marks inside these.
    """
    raw = []
    for line in lines:
        if match := _REGION.match(line):
            raw.append([int(match[1]), match[3] or "block", None, None, match[2] and int(match[2])])
        elif (match := _RANGE.match(line)) and raw and raw[-1][2] is None:
            raw[-1][2:4] = int(match[1]), int(match[2])
    # an empty block at the very end has no range
    if not raw or any(region[2] is None and region[1] != "block" for region in raw):
        raise UnknownScheduleFormat("a region of the program dump has no range")
    spans = [(raw[0][0], "program", raw[0][2], raw[0][3], None)]
    open_branches, open_loops, check_end = [], [], None
    for number, kind, start, end, _ in raw[1:]:
        if kind == "pred_check_branch":
            check_end = end
        elif kind == "pred_region":
            open_branches.append((number, check_end))
        elif kind == "pred_fallthru":
            if not open_branches:
                raise UnknownScheduleFormat(f"region {number} ends a branch that never began")
            branch, begin = open_branches.pop()
            spans.append((branch, "branch", min(begin, start), start, None))
        elif kind == "loop_body":
            open_loops.append((number, start))
        elif kind == "loop_header_branch":
            if not open_loops:
                raise UnknownScheduleFormat(f"region {number} ends a loop that never began")
            loop, begin = open_loops.pop()
            spans.append((loop, "loop", begin, end, None))
        elif kind not in (
            "block",
            "pred_check",
            "loop_pre_header",
            "loop_footer",
            "loop_footer_branch",
            "loop_header",
            "loop_exit",
        ):
            raise UnknownScheduleFormat(f"region {number} is of an unknown kind: {kind}")
    if open_branches or open_loops:
        raise UnknownScheduleFormat("a branch or loop of the program dump has no end")
    parents = {region[0]: region[4] for region in raw}
    counted = {span[0] for span in spans}

    def enclosing(number):
        number = parents[number]
        while number not in counted:
            number = parents[number]
        return number

    inner = sorted(spans[1:], key=lambda span: (span[2], -span[3]))
    return [spans[0]] + [(number, kind, start, end, enclosing(number)) for number, kind, start, end, _ in inner]
