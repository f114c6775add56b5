"""Values of scalar instructions, known or not, and what instructions make of them.

An integer or a bool is a value. None is a value that hangs on data, which a schedule does not hold. `Unread` is a value
that an instruction made which is not understood here. Both go through whatever is computed from them, so that a branch
that depends on one of them is noticed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch_svg.schedule import UnknownScheduleFormat

# how each opcode is computed: a function of `NAMES`
OPCODES = {
    "smov": "{0}",
    "pmov": "{0}",
    "sadd": "add({0}, {1})",
    "ssub": "sub({0}, {1})",
    "smul": "mul({0}, {1})",
    "sand": "bitand({0}, {1})",
    "sor": "bitor({0}, {1})",
    "sxor": "bitxor({0}, {1})",
    "smin": "least({0}, {1})",
    "smax": "most({0}, {1})",
    "sshll": "left({0}, {1})",
    "sshra": "right({0}, {1})",
    "sshrl": "right_logical({0}, {1})",
    "scalar_select": "select({0}, {1}, {2})",
    "pand": "both({0}, {1})",
    "por": "negate(both(negate({0}), negate({1})))",
    "pnand": "negate(both({0}, {1}))",
    "pnor": "both(negate({0}), negate({1}))",
    "pneg": "negate({0})",
}


class DataDependentBranch(RuntimeError):
    """A branch hangs on values that a schedule does not hold: vector results, or tables that were not given."""


@dataclass(frozen=True)
class Unread:
    """A value that the walk cannot compute, and the opcode to blame."""

    opcode: str


def _wrap(value):
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _unread(opcode, *values):
    # what is computed from data hangs on data, whatever the operation
    return None if any(value is None for value in values) else Unread(opcode)


def _blame(*values):
    """What an operation on unknown values gives: the first one that is not understood, else data."""
    return next((value for value in values if isinstance(value, Unread)), None)


def _computed(function):
    def apply(left, right):
        try:
            return function(left, right)
        except TypeError:
            return _blame(left, right)

    return apply


def _compared(function):
    def apply(left, right, unsigned):
        if not isinstance(left, int) or not isinstance(right, int):
            return _blame(left, right)
        return function(left & 0xFFFFFFFF, right & 0xFFFFFFFF) if unsigned else function(left, right)

    return apply


def _both(left, right):
    if left is False or right is False:
        return False
    return True if left is True and right is True else _blame(left, right)


def _negate(value):
    return not value if isinstance(value, bool) else value


def _select(condition, chosen, otherwise):
    if isinstance(condition, bool):
        return chosen if condition else otherwise
    return condition


def _look(table, index):
    # a speculated load may point outside: its value is never used
    if not isinstance(index, int):
        return index
    return table[index] if 0 <= index < len(table) else 0


def _decide(condition, goal, following, over, told):
    """The next block of a branch: ``goal`` when the condition holds."""
    if isinstance(condition, bool):
        return goal if condition else following
    if isinstance(condition, Unread):
        raise UnknownScheduleFormat(
            f"a branch over region {over} depends on {condition.opcode}, which is not understood"
        )
    if over is None:
        raise DataDependentBranch("the trips of a loop depend on data that the schedule does not hold")
    if told is None:
        raise DataDependentBranch(
            f"whether region {over} runs depends on data that the schedule does not hold: give the scalar-prefetch "
            f"operands, or say assume=False, or assume={{{over}: True}}"
        )
    return following if told else goal


NAMES = {
    "Unread": Unread,
    "unread": _unread,
    "add": _computed(lambda a, b: _wrap(a + b)),
    "sub": _computed(lambda a, b: _wrap(a - b)),
    "mul": _computed(lambda a, b: _wrap(a * b)),
    "bitand": _computed(operator.and_),
    "bitor": _computed(operator.or_),
    "bitxor": _computed(operator.xor),
    "least": _computed(min),
    "most": _computed(max),
    "left": _computed(lambda a, b: _wrap(a << (b & 31))),
    "right": _computed(lambda a, b: a >> (b & 31)),
    "right_logical": _computed(lambda a, b: _wrap((a & 0xFFFFFFFF) >> (b & 31))),
    **{f"compare_{name}": _compared(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "both": _both,
    "negate": _negate,
    "select": _select,
    "look": _look,
    "decide": _decide,
}
