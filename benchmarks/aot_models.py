"""Compiles a layer of every released video transformer, at its own size, for a TPU that is not there.

    python -m benchmarks.aot_models [--only NAME ...] [--chip v6e] [--json | --markdown]

The real diffusers class is traced through torch_xla with placeholders for its weights, so that it costs no memory here,
with the sparse kernel in its video self-attention, and libtpu compiles the whole graph. What comes out is what that
compiler plans (HBM, arrays, kernels): nothing is executed, and nothing is measured but the compile itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass

if __name__ == "__main__":
    # on a machine without a TPU nothing should look for one; the compiler needs none
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch

from benchmarks.released import RELEASED, Released
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig, aot, bridge, enable
from torch_svg.families import family_of

# sparse in every layer, also where a clip is so short that the default stays dense
CONFIG = SparseVideoConfig(density=0.3, warmup_steps=0, dense_layers=0)

_ARRAY = re.compile(r"\b(?:pred|[suf]\d+|bf16|f8\w+)\[([\d,]+)\]")


@dataclass(frozen=True)
class ModelCompile:
    """What the compiler says of one released transformer, one layer of each kind; memory in bytes of one chip.

    Args:
        name: Key of ``RELEASED``.
        checkpoint: The checkpoint.
        transformer: diffusers class.
        family: Name of the family that serves it.
        grid: (frames, height, width) in tokens.
        tokens: Tokens of the video self-attention's sequence, text and others included.
        batch: Rows of the batch.
        video_layers: Video self-attention layers that were compiled.
        arguments: Weights and inputs.
        temporaries: Everything that lives between operations.
        total: All of the HBM that the program needs.
        largest_array: (bytes, shape) of the largest array in HBM.
        square_arrays: Shapes of arrays with two sides as long as the sequence: there must be none.
        kernels: Pallas kernels in the program.
        trace_seconds: Tracing through diffusers and torch_xla.
        compile_seconds: libtpu's compile.
    """

    name: str
    checkpoint: str
    transformer: str
    family: str
    grid: tuple[int, int, int]
    tokens: int
    batch: int
    video_layers: int
    arguments: int
    temporaries: int
    total: int
    largest_array: tuple[int, str]
    square_arrays: list[str]
    kernels: int
    trace_seconds: float
    compile_seconds: float


class Placeholders:
    """Inputs of a traced forward: shapes without memory, and real tensors where the values matter."""

    def __init__(self, device: torch.device):
        self.device = device

    def noise(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        import torch_xla.core.xla_builder as xla_builder

        return xla_builder.create_placeholder_tensor(tuple(shape), dtype)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


def build(released: Released, make: Placeholders) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The transformer on the meta device, one layer of each kind, and placeholders for all its weights and buffers.

    Weights are bf16 but for those that diffusers keeps in f32; buffers (rotary tables) stay as the class makes them.
    """
    import diffusers

    transformer_class = getattr(diffusers, released.transformer)
    with torch.device("meta"):
        model = transformer_class(**{**released.config, **released.cut}).eval()
    kept_in_f32 = getattr(transformer_class, "_keep_in_fp32_modules", None) or ()
    for name, weight in model.named_parameters():
        kept = any(part in name.split(".") for part in kept_in_f32)
        # modules ask their weights for the dtype to compute in
        weight.data = weight.data.to(torch.float32 if kept else torch.bfloat16)
    weights = {
        name: make.values(torch.eye(*weight.shape)) if name in released.real_weights
        else make.noise(*weight.shape, dtype=weight.dtype)
        for name, weight in model.named_parameters()
    }  # fmt: skip
    for module in model.modules():
        # some keep a table as a plain attribute, which is no buffer
        for name, table in list(vars(module).items()):
            if isinstance(table, torch.Tensor):
                setattr(module, name, make.noise(*table.shape, dtype=table.dtype))
    buffers = {name: make.noise(*buffer.shape, dtype=buffer.dtype) for name, buffer in model.named_buffers()}
    return model, {**weights, **buffers}


def compile_released(name: str, chip: str = "v6e") -> ModelCompile:
    """Traces and compiles one entry of ``RELEASED``.

    Args:
        name: Key of ``RELEASED``.
        chip: Key of ``aot.CHIPS``.

    Raises:
        ValueError: Unknown name or chip.
        aot.CompileError: libtpu refused the program, as when it needs more HBM than the chip has.
    """
    try:
        return _compile_released(name, chip)
    finally:
        # model and processor hold one another: a placeholder left alive would be run by the process's next mark_step
        gc.collect()


def _compile_released(name: str, chip: str = "v6e") -> ModelCompile:
    import torch_xla

    from torch_svg import patches

    if name not in RELEASED:
        raise ValueError(f"got {name=!r}, expected one of {sorted(RELEASED)}")
    released = RELEASED[name]
    make = Placeholders(torch_xla.device())
    start = time.perf_counter()
    model, tensors = build(released, make)
    inputs = released.inputs(make)
    already = [patch.name for patch in patches.list_patches() if patch.applied]
    patches.apply(names=released.patches)
    try:
        with bridge.lowering_for("tpu"), torch.no_grad():
            # on set_attn_processor, cross-attention too runs on the kernel; enable() leaves it as it was
            if hasattr(model, "set_attn_processor"):
                model.set_attn_processor(processor := SparseVideoAttnProcessor(CONFIG))
            else:
                processor = enable(model, CONFIG)
            outputs = torch.func.functional_call(model, tensors, (), {**inputs, "return_dict": False}, strict=False)
            traced = time.perf_counter() - start
            compiled = aot.compile_pending(_tensors(outputs), chip=chip)
    finally:
        patches.revert([patch for patch in released.patches if patch not in already])
    grid = processor.record.plan.grid
    weight_sides = {side for tensor in tensors.values() for side in tensor.shape}
    size, shape, _ = compiled.largest_array()
    return ModelCompile(
        name=name,
        checkpoint=released.checkpoint,
        transformer=released.transformer,
        family=family_of(model).name,
        grid=(grid.frames, grid.height, grid.width),
        tokens=grid.tokens,
        batch=released.batch,
        video_layers=len(family_of(model).video_attention_modules(model)),
        arguments=compiled.memory.arguments,
        temporaries=compiled.memory.temporaries,
        total=compiled.memory.total,
        largest_array=(size, shape),
        square_arrays=square_arrays(compiled.text, grid.video_tokens, grid.tokens, weight_sides),
        kernels=sum(op.kind == "kernel" for op in compiled.operations()),
        trace_seconds=traced,
        compile_seconds=compiled.compile_seconds,
    )


def square_arrays(text: str, video_tokens: int, tokens: int, weight_sides: set[int]) -> list[str]:
    """Shapes in an HLO text with two sides about as long as the sequence.

    Args:
        text: Optimised HLO.
        video_tokens, tokens: Length of the video, and of the whole sequence.
        weight_sides: Sides of the model's weights: an activation has such a side too, and is no attention matrix.
    """
    longest = tokens + max(tokens // 8, 1024)
    found = set()
    for sides in _ARRAY.findall(text):
        long = [side for side in map(int, sides.split(",")) if video_tokens <= side <= longest]
        if len([side for side in long if side not in weight_sides]) >= 2:
            found.add(f"[{sides}]")
    return sorted(found)


def _tensors(outputs) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for part in outputs or () for tensor in _tensors(part)]


HEADER = ("released transformer", "batch", "tokens", "HBM GiB", "of it temporary", "largest array", "kernels",
          "compile s")  # fmt: skip


def row(result: ModelCompile) -> tuple[str, ...]:
    gib = 2**30
    grid = " x ".join(map(str, result.grid))
    others = result.tokens - result.grid[0] * result.grid[1] * result.grid[2]
    return (
        result.checkpoint,
        str(result.batch),
        f"{grid}{f' + {others}' if others else ''} = {result.tokens:,}",
        f"{result.total / gib:.2f}",
        f"{result.temporaries / gib:.2f}",
        f"{re.sub(r'{.*?}', '', result.largest_array[1])}, {result.largest_array[0] / 2**20:,.0f} MiB",
        str(result.kernels),
        f"{result.compile_seconds:.0f}",
    )


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_models", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of: {', '.join(RELEASED)}; or family names")
    parser.add_argument("--chip", default="v6e", choices=sorted(aot.CHIPS))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line")
    form.add_argument("--markdown", action="store_true", help="the table of the docs")
    options = parser.parse_args(arguments)
    if reason := aot.available():
        parser.error(reason)
    names = _chosen(options.only, parser)
    failed = False
    if not options.json:
        print(_line(HEADER, options.markdown), flush=True)
        if options.markdown:
            print(_line(["---"] * len(HEADER), True), flush=True)
    for name in names:
        try:
            result = compile_released(name, options.chip)
        except aot.CompileError as error:
            failed = True
            problem = {"name": name, "checkpoint": RELEASED[name].checkpoint, "error": str(error)}
            print(json.dumps(problem) if options.json else f"{name}: {error}", flush=True)
            continue
        failed |= bool(result.square_arrays)
        print(json.dumps(asdict(result)) if options.json else _line(row(result), options.markdown), flush=True)
    return int(failed)


def _chosen(only, parser) -> list[str]:
    if not only:
        return list(RELEASED)
    from torch_svg.families import FAMILIES

    classes = {family.name: family.transformers for family in FAMILIES}
    names = []
    for asked in only:
        served = classes.get(asked, ())
        found = [name for name, entry in RELEASED.items() if asked == name or entry.transformer in served]
        if not found:
            parser.error(f"--only got {asked!r}, expected some of {', '.join([*RELEASED, *classes])}")
        names += found
    return names


def _line(cells, markdown: bool) -> str:
    return f"| {' | '.join(cells)} |" if markdown else "  ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
