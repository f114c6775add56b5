"""What really happened in a generation: head kinds by step and layer, densities, dense steps and fallbacks.

Recording keeps small device tensors and fetches nothing: the host reads them once, in ``RunRecord.report``, after the
last step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import bridge

KIND_NAMES = ("spatial", "temporal", "dense")
KIND_COLOURS = ("#4c78a8", "#f2a93b", "#c9c9c9")

# forwards kept of one generation; a longer run keeps its last ones
MAX_FORWARDS = 2048


@dataclass
class ForwardRecord:
    """One forward of the transformer: where it stands, and each video layer's kinds and probe errors."""

    step: int
    call: int
    kinds: dict[int, torch.Tensor] = field(default_factory=dict)
    errors: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class RunReport:
    """What a generation computed.

    Attributes:
        implementation: The implementation that ran, or None when nothing sparse ran.
        grid: (frames, height, width) in tokens.
        pair_density: Share of the video query-key pairs computed, over all heads, layers and steps (dense ones
            included).
        sparse_pair_density: The same over the sparse calls alone.
        tile_density: Share of the video pairs that the work table's tiles cover, over all calls.
        kinds: (forwards, layers, heads) int, -1 where a layer has none; the heads of a batch stand side by side.
        steps: (forwards,) the denoising step of every forward.
        head_kinds: Number of heads of each kind, over forwards and layers.
        dense_steps: Steps that were dense by the warm-up rule.
        dense_layers: Layers that were dense by rule.
        probe_errors: (forwards, layers, 2) median over heads of the probe's error, best and worst pattern; NaN where
            there is none.
        fallbacks: Reason -> number of attention calls that ran dense for it.
        density_by_forward: (forwards,) pair density of every forward, mean over layers and heads.
        plan: The grid and the mask of every kind, in the order of `KIND_NAMES`; None when nothing sparse ran.
        blocks: Block sizes of the kernel, None where there are no blocks.
        compiles, compile_seconds: XLA graphs compiled since the generation's first forward, and their time; None
            where no XLA device ran.
    """

    implementation: str | None
    grid: tuple[int, int, int] | None
    pair_density: float
    sparse_pair_density: float
    tile_density: float
    kinds: np.ndarray
    steps: np.ndarray
    head_kinds: dict[str, int]
    dense_steps: list[int]
    dense_layers: list[int]
    probe_errors: np.ndarray
    fallbacks: dict[str, int]
    density_by_forward: np.ndarray
    # a pattern.Plan; this module stands below that one
    plan: object | None = None
    blocks: dict[str, object] | None = None
    compiles: int | None = None
    compile_seconds: float | None = None

    def to_dict(self) -> dict:
        """Plain JSON types; arrays become lists."""
        fields = asdict(self)
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                # JSON has no NaN
                fields[name] = (np.where(np.isnan(value), None, value) if value.dtype.kind == "f" else value).tolist()
        return fields

    def save(self, folder) -> None:
        """Writes ``report.json``, ``routing.png`` and ``report.html``, a page that needs nothing else, into a folder
        (made if missing)."""
        from .report_page import report_page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        self.save_routing_map(folder / "routing.png")
        (folder / "report.html").write_text(report_page(self), encoding="utf-8")

    def save_routing_map(self, path) -> None:
        """Draws the kind of every head, layers downwards with their heads, forwards to the right, in three colours."""
        self.routing_figure().savefig(path, bbox_inches="tight")

    def routing_figure(self):
        """The routing map as a matplotlib figure."""
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        forwards, layers, heads = self.kinds.shape
        image = self.kinds.transpose(1, 2, 0).reshape(layers * heads, forwards)
        figure = Figure(figsize=(max(6.0, 1.8 + 0.28 * forwards), max(3.0, 1.2 + 0.16 * layers * heads)), dpi=110)
        axes = figure.add_subplot()
        colours = ListedColormap(("#ffffff", *KIND_COLOURS))
        axes.imshow(image, cmap=colours, norm=BoundaryNorm([-1.5, -0.5, 0.5, 1.5, 2.5], 4), aspect="auto")
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="black", linewidth=0.8)
        axes.set_yticks([layer * heads + (heads - 1) / 2 for layer in range(layers)], [f"{i}" for i in range(layers)])
        ticks = np.linspace(0, forwards - 1, min(forwards, 12)).round().astype(int)
        axes.set_xticks(ticks, [str(self.steps[i]) for i in ticks])
        axes.set_xlabel("denoising step (a column for each guidance branch)")
        axes.set_ylabel("layer (a row for each head)")
        axes.set_title(f"head kinds, pair density {self.pair_density:.2f}")
        legend = [Patch(color=colour, label=name) for name, colour in zip(KIND_NAMES, KIND_COLOURS, strict=True)]
        axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        return figure


class RunRecord:
    """Collects one generation; ``start_generation`` forgets the one before."""

    def __init__(self):
        self.start_generation()

    def start_generation(self) -> None:
        self.forwards: list[ForwardRecord] = []
        self.fallbacks: Counter[str] = Counter()
        self.dense_steps: set[int] = set()
        self.dense_layers: set[int] = set()
        self.implementation: str | None = None
        self.head_dim: int = 128
        self.plan = None
        # plans of layers whose sequence is another one
        self.layer_plans: dict[int, object] = {}
        # only a process that has torch_xla can compile with it
        self._metrics_before = bridge.metrics() if "torch_xla" in sys.modules else None

    @property
    def num_layers(self) -> int:
        """Video layers that ran with a plan, up to the last one."""
        return 1 + max((index for forward in self.forwards for index in forward.kinds), default=-1)

    def start_forward(self, step: int) -> None:
        call = self.forwards[-1].call + 1 if self.forwards and self.forwards[-1].step == step else 0
        self.forwards.append(ForwardRecord(step, call))
        del self.forwards[:-MAX_FORWARDS]

    def layer(self, index: int, kinds: torch.Tensor, errors: torch.Tensor) -> None:
        forward = self.forwards[-1]
        forward.kinds[index] = kinds.detach()
        forward.errors[index] = errors.detach()

    def report(self, densities, tile_densities, blocks: dict[str, object] | None = None) -> RunReport:
        """Fetches what was recorded.

        Args:
            densities: (kinds,) pair density of every head kind; (layers, kinds) where layers differ.
            tile_densities: Tile densities, in the same form.
            blocks: Block sizes of the kernel.
        """
        compiles, compile_seconds = self._compiles()
        layers = self.num_layers
        heads = max((k.numel() for f in self.forwards for k in f.kinds.values()), default=0)
        kinds = np.full((len(self.forwards), layers, heads), -1, dtype=np.int8)
        errors = np.full((len(self.forwards), layers, 2), np.nan, dtype=np.float32)
        fetched = _fetch(self.forwards)
        for row, (kinds_by_layer, errors_by_layer) in enumerate(fetched):
            for layer, values in kinds_by_layer.items():
                kinds[row, layer, : values.size] = values.reshape(-1)
            for layer, values in errors_by_layer.items():
                sparse = values.reshape(-1, values.shape[-1])[:, :2]
                errors[row, layer] = np.median(sparse.min(1)), np.median(sparse.max(1))
        # (forwards, layers, kinds), then (layers, kinds)
        counts_by_forward = (kinds[..., None] == np.arange(len(KIND_NAMES))).sum(axis=2)
        counts = counts_by_forward.sum(axis=0)
        densities, tile_densities = (np.broadcast_to(shares, counts.shape) for shares in (densities, tile_densities))
        sparse_counts = np.where(densities >= 1, 0, counts)
        return RunReport(
            implementation=self.implementation,
            grid=None if self.plan is None else (self.plan.grid.frames, self.plan.grid.height, self.plan.grid.width),
            pair_density=_weighted(counts, densities),
            sparse_pair_density=_weighted(sparse_counts, densities),
            tile_density=_weighted(counts, tile_densities),
            kinds=kinds,
            steps=np.array([forward.step for forward in self.forwards], dtype=np.int32),
            head_kinds=dict(zip(KIND_NAMES, counts.sum(axis=0).tolist(), strict=True)),
            dense_steps=sorted(self.dense_steps),
            dense_layers=sorted(self.dense_layers),
            probe_errors=errors,
            fallbacks=dict(self.fallbacks),
            density_by_forward=np.array([_weighted(one, densities) for one in counts_by_forward], dtype=np.float32),
            plan=self.plan,
            blocks=blocks,
            compiles=compiles,
            compile_seconds=compile_seconds,
        )

    def _compiles(self) -> tuple[int | None, float | None]:
        """Graphs compiled since the generation began, and the seconds that took."""
        tensors = (tensor for forward in self.forwards for tensor in forward.kinds.values())
        if self._metrics_before is None or not any(tensor.device.type == "xla" for tensor in tensors):
            return None, None
        now, before = bridge.metrics(), self._metrics_before
        return now.compiles - before.compiles, now.compile_seconds - before.compile_seconds


def _weighted(counts, densities) -> float:
    return float((counts * densities).sum() / counts.sum()) if counts.any() else 1.0


def _fetch(forwards):
    """Every recorded tensor as numpy, in two transfers: one for all kinds, one for all errors."""
    parts = []
    for attribute, dtype in (("kinds", np.int32), ("errors", np.float32)):
        tensors = [t for forward in forwards for t in getattr(forward, attribute).values()]
        flat = torch.cat([t.reshape(-1) for t in tensors]).cpu().numpy() if tensors else np.empty(0, dtype)
        parts.append(iter(np.split(flat, np.cumsum([t.numel() for t in tensors])[:-1]) if tensors else []))
    fetched = []
    for forward in forwards:
        kinds = {i: next(parts[0]).reshape(tuple(t.shape)) for i, t in forward.kinds.items()}
        errors = {i: next(parts[1]).reshape(tuple(t.shape)) for i, t in forward.errors.items()}
        fetched.append((kinds, errors))
    return fetched
