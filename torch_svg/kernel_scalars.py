"""The scalar-prefetch operands of the Pallas kernels inside a JAX function, without running the function.

What a kernel does is decided by small tables, which a function builds from constants and from small arguments. Given
those arguments as arrays, and everything large as shapes, this module evaluates just what the tables need.
"""

from __future__ import annotations

import functools

import numpy as np

_KINDS = {"i": "s", "u": "u", "f": "f"}
# primitives that only call a jaxpr
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def kernel_scalars(function, *arguments, **static) -> dict[tuple[str, ...], list[np.ndarray | None]]:
    """Scalar-prefetch operands of every kernel, by the shapes of all its operands.

    Shapes are what tells kernels apart in a compiled program: XLA names them after the surrounding function.

    Args:
        function: A JAX function with Pallas kernels in it.
        arguments: Its positional arguments: an array where the value matters, a `jax.ShapeDtypeStruct` (or None for a
            missing argument) where only the shape does.
        static: Keyword arguments of the function.

    Returns:
        One entry per kernel, e.g. ``{("s32[10]", "bf16[75600,1280]"): [kinds]}``; an operand that depends on an
        argument given as a shape is None.

    Raises:
        ValueError: Two kernels with operands of the same shapes have different scalars.
    """
    import jax

    shapes = [
        argument if argument is None else jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments
    ]
    closed = jax.make_jaxpr(functools.partial(function, **static))(*shapes)
    known = [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in jax.tree.leaves(arguments)]
    found: dict[tuple[str, ...], list[np.ndarray | None]] = {}
    _evaluate(closed.jaxpr, closed.consts, known, found)
    return found


def _evaluate(jaxpr, constants, arguments, found):
    """Evaluates what is known; None stands for what is not. Returns the outputs."""
    from jax.extend.core import Literal

    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values.get(variable)

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        if equation.primitive.name == "pallas_call":
            _record(equation, inputs, found)
            continue
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if inner is not None and equation.primitive.name in _CALLS:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs, found)
        elif any(value is None for value in inputs):
            continue
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _record(equation, inputs, found):
    shapes = tuple(hlo_shape(variable.aval) for variable in equation.invars)
    count = equation.params["grid_mapping"].num_index_operands
    operands = [None if value is None else np.asarray(value) for value in inputs[:count]]
    if shapes in found:
        pairs = list(zip(found[shapes], operands, strict=True))
        if any((a is None) != (b is None) or (a is not None and not np.array_equal(a, b)) for a, b in pairs):
            raise ValueError(f"two kernels with operands {shapes} have different scalars: compile them one by one")
    found[shapes] = operands


def hlo_shape(array) -> str:
    """Shape and dtype as HLO writes them, such as ``bf16[2,128]``."""
    dtype = np.dtype(array.dtype)
    if dtype.name in ("bool", "bfloat16"):
        name = {"bool": "pred", "bfloat16": "bf16"}[dtype.name]
    else:
        name = f"{_KINDS[dtype.kind]}{8 * dtype.itemsize}"
    return f"{name}[{','.join(map(str, array.shape))}]"
