"""The scalar-prefetch operands of the Pallas kernels inside a JAX function, without running the function.

What a kernel does is decided by small tables, which a function builds from constants and from small arguments. Given those
arguments as arrays, and everything large as shapes, this module evaluates just the operations that the tables need.
"""

from __future__ import annotations

import functools

import numpy as np

# primitives that only call a jaxpr
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def kernel_scalars(function, *arguments, **static) -> dict[str, list[np.ndarray | None]]:
    """Kernel name -> its scalar-prefetch operands in order.

    Args:
        function: A JAX function with Pallas kernels in it.
        arguments: Its positional arguments: an array where the value matters, a `jax.ShapeDtypeStruct` (or None for a
            missing argument) where only the shape does.
        static: Keyword arguments of the function.

    Returns:
        One entry per kernel name; an operand that depends on an argument given as a shape is None.

    Raises:
        ValueError: Two kernels of one name have different operands.
    """
    import jax

    shapes = [
        argument if argument is None else jax.ShapeDtypeStruct(argument.shape, argument.dtype) for argument in arguments
    ]
    closed = jax.make_jaxpr(functools.partial(function, **static))(*shapes)
    known = [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in jax.tree.leaves(arguments)]
    found: dict[str, list[np.ndarray | None]] = {}
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
    name = equation.params["jaxpr"].debug_info.func_name
    count = equation.params["grid_mapping"].num_index_operands
    operands = [None if value is None else np.asarray(value) for value in inputs[:count]]
    if name in found:
        same = all(
            (old is None and new is None) or (old is not None and new is not None and np.array_equal(old, new))
            for old, new in zip(found[name], operands, strict=True)
        )
        if not same:
            raise ValueError(f"two kernels named {name!r} have different scalar operands: give them names of their own")
    found[name] = operands
