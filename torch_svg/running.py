"""Runs a diffusers script as its author wrote it, on the XLA device where it says "cuda"."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
import types
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import bridge, patches
from .config import SparseVideoConfig
from .cuda_names import Replacements, cuda_names
from .enabling import disable, enable
from .placements import device_of, modules_of, placements
from .processor import SparseVideoAttnProcessor
from .report import RunReport

PRESETS = ("auto", "published")


def note_on_stderr(text: str) -> None:
    """One line for the user, apart from what the script prints."""
    print(f"torch-svg: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def as_tpu(config: SparseVideoConfig | None = None, *, dry_run: bool = False, note=note_on_stderr):
    """Within the block, code written for CUDA runs on the XLA device, and pipelines that it makes attend sparsely.

    "cuda" devices and generators, ``torch.cuda``, autocast, device maps, offload calls, attention backends and
    ``torch.compile`` are served or passed over with a note; patches and sparse attention come on at the first call of
    every pipeline that is created in the block. Everything is as before after it, pipelines included.

    Args:
        config: What to compute; see ``SparseVideoConfig``.
        dry_run: Stop at the first pipeline call, with a note of what would be done.
        note: ``note(text)`` is told once of each thing that is not done as asked, and of compiles.

    Yields:
        A ``Run``, which collects what happened.

    Raises:
        ImportError: torch_xla is missing or does not fit.
    """
    bridge.metrics()
    said = set()

    def note_once(text):
        if text not in said:
            said.add(text)
            note(text)

    already = {patch.name for patch in patches.list_patches() if patch.applied}
    run = Run(config or SparseVideoConfig(), dry_run, note_once)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: patches.revert([name for name in run.patches if name not in already]))
        stack.callback(run.release)
        stack.enter_context(cuda_names(note_once))
        stack.enter_context(placements(note_once))
        run.follow_pipelines()
        yield run


@dataclass
class PipelineCall:
    """One call of a pipeline.

    Attributes:
        pipeline: Its class.
        seconds: How long it took, compiles included.
        compiles, host_reads: Graphs compiled and tensors read from the device during it.
        fallbacks: Operations that ran on the host -> how often.
        report: What attention computed, None where it is the stock one.
    """

    pipeline: str
    seconds: float
    compiles: int
    host_reads: int
    fallbacks: dict[str, int]
    report: RunReport | None

    def to_dict(self) -> dict:
        """Plain JSON types."""
        fields = asdict(self)
        fields["report"] = self.report and self.report.to_dict()
        return fields


class Run:
    """What happened in an ``as_tpu`` block.

    Attributes:
        calls: One ``PipelineCall`` for every finished call of a pipeline on the device.
        patches: Names of the patches that were applied.
    """

    def __init__(self, config: SparseVideoConfig, dry_run: bool, note):
        self.calls: list[PipelineCall] = []
        self.patches: list[str] = []
        self._config, self._dry_run, self._note = config, dry_run, note
        self._replaced = Replacements()
        self._hooks = []
        self._enabled: weakref.WeakSet = weakref.WeakSet()
        self._watched: weakref.WeakSet = weakref.WeakSet()
        self._inside = False

    def follow_pipelines(self) -> None:
        """From here on every pipeline that is made is prepared when it is called."""
        import diffusers

        stock = diffusers.DiffusionPipeline.register_modules

        @functools.wraps(stock)
        def register_modules(pipe, **modules):
            stock(pipe, **modules)
            self._follow_class(type(pipe))

        self._replaced.set(diffusers.DiffusionPipeline, "register_modules", register_modules)

    def release(self) -> None:
        """Gives every pipeline back as it was."""
        self._replaced.restore()
        for hook in self._hooks:
            hook.remove()
        for pipe in list(self._enabled):
            disable(pipe)

    def save(self, folder) -> Path | None:
        """Writes run.json, and routing.png of the last call whose heads were routed; gives the path of run.json."""
        if not self.calls:
            return None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "versions": bridge.versions(),
            "config": self._config.to_dict(),
            "patches": self.patches,
            "calls": [call.to_dict() for call in self.calls],
        }
        (folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
        routed = [call.report for call in self.calls if call.report is not None and call.report.kinds.size]
        # drawing needs matplotlib, which only the demo's extra brings
        with contextlib.suppress(ImportError):
            for report in routed[-1:]:
                report.save_routing_map(folder / "routing.png")
        return folder / "run.json"

    def _follow_class(self, pipeline_class) -> None:
        owner = next((cls for cls in pipeline_class.__mro__ if "__call__" in cls.__dict__), None)
        stock = owner and owner.__dict__["__call__"]
        if stock is None or hasattr(stock, "_follows_pipelines"):
            return

        @functools.wraps(stock)
        def call(pipe, *args, **kwargs):
            # a pipeline may call its base class, or another one, which belongs to the same generation
            if self._inside:
                return stock(pipe, *args, **kwargs)
            self._inside = True
            try:
                return self._call(stock, pipe, args, kwargs)
            finally:
                self._inside = False

        call._follows_pipelines = True
        self._replaced.set(owner, "__call__", call)

    def _call(self, stock, pipe, args, kwargs):
        if all(device_of(module).type != "xla" for module in modules_of(pipe).values()):
            return stock(pipe, *args, **kwargs)
        self._prepare(pipe)
        if self._dry_run:
            self._tell_plan(pipe)
            raise SystemExit(0)
        before, began = bridge.metrics(), time.perf_counter()
        output = stock(pipe, *args, **kwargs)
        seconds, after = time.perf_counter() - began, bridge.metrics()
        processor = _processor_of(pipe)
        self.calls.append(
            PipelineCall(
                pipeline=type(pipe).__name__,
                seconds=seconds,
                compiles=after.compiles - before.compiles,
                host_reads=after.host_reads - before.host_reads,
                fallbacks={
                    name: count - before.fallbacks.get(name, 0)
                    for name, count in after.fallbacks.items()
                    if count > before.fallbacks.get(name, 0)
                },
                report=None if processor is None else processor.report(),
            )
        )
        return output

    def _prepare(self, pipe) -> None:
        try:
            self.patches += [name for name in patches.apply(pipe) if name not in self.patches]
        except NotImplementedError as error:
            self._note(str(error))
        for transformer in _transformers_of(pipe):
            if transformer not in self._watched:
                self._watched.add(transformer)
                self._hooks += FirstCompile(transformer, self._note).hooks
        if all(map(_has_sparse_attention, _transformers_of(pipe))):
            return
        try:
            enable(pipe, self._config)
        except NotImplementedError as error:
            self._note(f"attention stays as it is: {error}")
        else:
            self._enabled.add(pipe)

    def _tell_plan(self, pipe) -> None:
        devices = ", ".join(f"{name} on {device_of(module)}" for name, module in modules_of(pipe).items())
        processor = _processor_of(pipe)
        attention = "stock attention" if processor is None else f"sparse attention with {processor.config}"
        self._note(
            f"dry run: {type(pipe).__name__} would run with {devices}; {attention}; "
            f"patches {', '.join(self.patches) or 'none'}"
        )


class FirstCompile:
    """Says what the wait is when a transformer meets shapes for the first time.

    Attributes:
        hooks: Handles of the hooks on the transformer.
    """

    def __init__(self, transformer: torch.nn.Module, note):
        self._note = note
        self._seen: set = set()
        self._began: tuple[float, int] | None = None
        self.hooks = [
            transformer.register_forward_pre_hook(self._before, with_kwargs=True),
            transformer.register_forward_hook(self._after),
        ]

    def _before(self, module, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if shapes in self._seen or device_of(module).type != "xla":
            return
        self._seen.add(shapes)
        self._began = time.perf_counter(), bridge.metrics().compiles
        size = " x ".join(map(str, shapes[0][0])) if shapes else "these inputs"
        self._note(f"compiling {type(module).__name__} for {size}, {_minutes(module)} the first time")

    def _after(self, module, args, output):
        if self._began is None:
            return
        began, compiles = self._began
        self._began = None
        if bridge.metrics().compiles > compiles:
            self._note(f"compiled {type(module).__name__} in {time.perf_counter() - began:.0f} s")


def _minutes(transformer: torch.nn.Module) -> str:
    """About how long libtpu compiles a transformer: of Wan 14B 51 s with 1 block, 56 s with 2, 90 s with 8, 150 s with
    40 (ahead of time, for v6e)."""
    if bridge.platform() != "tpu":
        return "a moment"
    blocks = sum(len(child) for child in transformer.children() if isinstance(child, torch.nn.ModuleList))
    minutes = max(1, round((55 + 2.4 * blocks) / 60))
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"


def _transformers_of(pipe) -> list[torch.nn.Module]:
    found = [module for name, module in modules_of(pipe).items() if name.startswith("transformer")]
    return [module for module in found if device_of(module).type == "xla"]


def _has_sparse_attention(transformer) -> bool:
    return _sparse_processor(transformer) is not None


def _sparse_processor(transformer):
    for module in transformer.modules():
        if isinstance(getattr(module, "processor", None), SparseVideoAttnProcessor):
            return module.processor
    return None


def _processor_of(pipe):
    return next(filter(None, map(_sparse_processor, _transformers_of(pipe))), None)


def run_script(path, arguments=(), *, config: SparseVideoConfig | None = None, dry_run=False, report=None) -> int:
    """Runs a Python script as ``python SCRIPT arguments...`` would, within ``as_tpu``.

    Its standard output is its own alone. An exception ends it with its own traceback, which begins in the script.

    Args:
        path: The script.
        arguments: Its command-line arguments.
        config, dry_run: As for ``as_tpu``.
        report: Folder for run.json and routing.png; None writes nothing.

    Returns:
        The exit status: 0, or 1 after an exception. ``SystemExit`` passes through.

    Raises:
        OSError: The script cannot be read.
        ImportError: torch_xla is missing or does not fit.
    """
    source = Path(path).read_bytes()
    module = types.ModuleType("__main__")
    module.__file__ = os.fspath(path)
    before = sys.argv, sys.modules["__main__"]
    sys.argv, sys.modules["__main__"] = [os.fspath(path), *arguments], module
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        with as_tpu(config, dry_run=dry_run) as run:
            try:
                exec(compile(source, os.fspath(path), "exec"), module.__dict__)
            except (Exception, KeyboardInterrupt) as error:
                error.__traceback__ = _from_file(error.__traceback__, os.fspath(path))
                sys.excepthook(type(error), error, error.__traceback__)
                return 130 if isinstance(error, KeyboardInterrupt) else 1
            finally:
                sys.stdout.flush()
                written = run.save(report) if report is not None else None
                if written is not None:
                    note_on_stderr(f"report in {written}")
    finally:
        sys.argv, sys.modules["__main__"] = before
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return 0


def _from_file(trace, path: str):
    """The part of a traceback that begins in a file; None where the file is not in it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def add_command(commands) -> None:
    """Adds ``torch-svg run`` to the sub-commands of a parser."""
    run = commands.add_parser(
        "run",
        help="run a diffusers script written for CUDA, as it is, on the XLA device",
        description="Runs a diffusers script as its author wrote it, with the XLA device where it says cuda, patches "
        "and sparse attention on. What is not done as the script asks is told on stderr.",
    )
    run.add_argument("--dense", action="store_true", help="exact attention, on the same kernel")
    run.add_argument("--density", type=float, help="share of query-key pairs to compute (default: by model and size)")
    run.add_argument(
        "--preset",
        default="auto",
        help="auto (the default: the model's published settings where the clip is long enough to gain), published (at "
        "any length), or a JSON file that SparseVideoConfig.save wrote",
    )
    run.add_argument("--report", default="torch_svg_report", metavar="DIR", help="where run.json and routing.png go")
    run.add_argument("--dry-run", action="store_true", help="stop at the first pipeline call, and say what it would do")
    run.add_argument("script", metavar="SCRIPT", help="the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    run.set_defaults(run=lambda options: _run_command(run, options))


def _run_command(parser, options) -> int:
    try:
        config = _config(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        return run_script(
            options.script, options.arguments, config=config, dry_run=options.dry_run, report=options.report
        )
    except (OSError, ImportError) as error:
        # of torch_svg itself; the script's own are told where they happen
        parser.error(str(error))


def _config(options) -> SparseVideoConfig:
    if options.dense and (options.density is not None or options.preset != "auto"):
        raise ValueError("--dense goes with neither --density nor --preset")
    if options.dense:
        return SparseVideoConfig(density=1.0)
    if options.preset in PRESETS:
        config = SparseVideoConfig(**({} if options.preset == "auto" else {"min_tokens": 0}))
    else:
        config = SparseVideoConfig.load(options.preset)
    return config if options.density is None else config.replace(density=options.density)
