"""What a user can set, and the defaults that a model and a size suggest."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

# below about this many video tokens attention is too small a share of a step for sparsity to pay: the published gain
# at 32,760 tokens (Wan 480p) is 1.2x to 1.3x on a GPU, and every smaller default size is under it (SVG paper, README)
MIN_PAYING_TOKENS = 30_000

DENSITY_RULES = ("pairs", "svg")
SINKS = ("first_frame", "svg", "none")
IMPLEMENTATIONS = ("pallas", "pallas_interpret", "xla", "reference")


@dataclass(frozen=True)
class SparseVideoConfig:
    """How sparse, when, and by which implementation.

    All fields are optional; ``SparseVideoConfig()`` takes density, warm-up steps and dense layers from the model
    family's preset, and stays dense (saying so once) below ``min_tokens`` video tokens, where sparsity cannot pay.

    Args:
        density: Share of the video query-key pairs that are computed in a sparse call, sink included, in (0, 1].
            ``None``: the family's preset. Giving a density switches the size rule off.
        warmup_steps: Denoising steps at the start that stay dense: a whole number of steps, or a fraction of the
            steps in [0, 1) (rounded up). Steps, not scheduler timesteps, whatever the scheduler's shift.
            ``None``: the family's preset.
        dense_layers: Transformer layers at the start that stay dense: a whole number, or a fraction in [0, 1)
            (rounded down, as the reference SVG does). ``None``: the family's preset.
        density_rule: What ``density`` counts. ``"pairs"``: all computed video pairs, the sink included. ``"svg"``: the
            band of the reference SVG, whose sink comes on top (see ``from_svg``).
        sink: Which video keys every query sees besides its band. ``"first_frame"``: the first frame, for both
            orders. ``"svg"``: the first ``height * width`` positions of the head's own order, as the reference SVG
            has it (for a temporal head that is not the first frame). ``"none"``.
        sampled_rows: Query rows that the probe samples over the whole clip to choose each head's kind.
        implementation: ``None`` picks the best that applies to the device and records it. A name runs or raises:
            ``"pallas"`` (the TPU kernel), ``"pallas_interpret"`` (the same kernel, interpreted, for tests on
            XLA:CPU), ``"xla"`` (the same work table with ordinary XLA operations), ``"reference"`` (f32, any device).
        min_tokens: Video tokens below which a config without ``density`` stays dense.

    Raises:
        ValueError: A field is outside its range; the message gives got and expected.
    """

    density: float | None = None
    warmup_steps: int | float | None = None
    dense_layers: int | float | None = None
    density_rule: str = "pairs"
    sink: str = "first_frame"
    sampled_rows: int = 64
    implementation: str | None = None
    min_tokens: int = MIN_PAYING_TOKENS

    def __post_init__(self):
        if self.density is not None and not (_is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(f"density is a share of query-key pairs in (0, 1], got {self.density!r}")
        for name in ("warmup_steps", "dense_layers"):
            _check_count_or_fraction(name, getattr(self, name))
        if self.density_rule not in DENSITY_RULES:
            raise ValueError(f"density_rule must be 'pairs' or 'svg', got {self.density_rule!r}")
        if self.sink not in SINKS:
            raise ValueError(f"sink must be one of {', '.join(map(repr, SINKS))}, got {self.sink!r}")
        if not isinstance(self.sampled_rows, Integral) or self.sampled_rows < 1:
            raise ValueError(f"sampled_rows must be a whole number of rows >= 1, got {self.sampled_rows!r}")
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            names = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"implementation must be None or one of {names}, got {self.implementation!r}")
        if not isinstance(self.min_tokens, Integral) or self.min_tokens < 0:
            raise ValueError(f"min_tokens must be a whole number of tokens >= 0, got {self.min_tokens!r}")

    @classmethod
    def from_svg(cls, sparsity: float, **fields) -> SparseVideoConfig:
        """The config that computes what the reference SVG computes at its ``sparsity`` knob.

        SVG's knob is the share that is *kept* by a band of half width ``N * (1 - sqrt(1 - s))``, with
        ``s = sparsity - 2 * text tokens / N``; its sink comes on top. Here ``density`` counts all pairs, so the same
        work has a larger number: 0.30 with the first-frame sink on 21 x 45 x 80 tokens is a pair density of 0.340.
        The report of a run gives the realised number (SVG, arXiv 2502.01776, and its code).

        Args:
            sparsity: SVG's knob, in (0, 1].
            **fields: Any other field, e.g. ``sink="svg"`` for the reference's permuted sink.
        """
        return cls(density=sparsity, density_rule="svg", **fields)

    def replace(self, **fields) -> SparseVideoConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def save(self, path) -> None:
        """Writes the config as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path) -> SparseVideoConfig:
        """Reads a config that ``save`` wrote.

        Raises:
            ValueError: The file is not such a JSON; names the file and the unknown fields.
        """
        try:
            fields = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a saved SparseVideoConfig: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"{path} has unknown fields {unknown}; known: {sorted(known)}")
        return cls(**fields)

    def resolve(self, preset: Preset, video_tokens: int) -> ResolvedConfig:
        """Fills what was left open from a family's preset; dense when the clip is too small to gain."""
        reason = None
        density = self.density
        if density is None:
            density = preset.density
            if video_tokens < self.min_tokens:
                reason = (
                    f"{video_tokens:,} video tokens are below {self.min_tokens:,}, where sparse attention does not "
                    "pay; give a density to use it anyway"
                )
        return ResolvedConfig(
            density=float(density),
            warmup_steps=preset.warmup_steps if self.warmup_steps is None else self.warmup_steps,
            dense_layers=preset.dense_layers if self.dense_layers is None else self.dense_layers,
            dense_reason=reason,
        )


@dataclass(frozen=True)
class Preset:
    """Published settings for a model family, used where a config leaves a field open."""

    density: float
    warmup_steps: int | float
    dense_layers: int | float
    source: str


@dataclass(frozen=True)
class ResolvedConfig:
    """A config with its open fields filled for one model and one size."""

    density: float
    warmup_steps: int | float
    dense_layers: int | float
    dense_reason: str | None

    def warmup_count(self, num_steps: int | None) -> int:
        """Dense steps at the start of a generation of ``num_steps`` denoising steps.

        Raises:
            ValueError: A fraction without a known number of steps, or more warm-up steps than steps.
        """
        if isinstance(self.warmup_steps, Integral):
            if num_steps is not None and self.warmup_steps > num_steps:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps}, but the generation has {num_steps} steps: "
                    "give at most that many, or a fraction"
                )
            return int(self.warmup_steps)
        if self.warmup_steps == 0:
            return 0
        if num_steps is None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is a fraction, but the number of denoising steps is not known when "
                "the transformer is called outside a pipeline: give warmup_steps as a whole number of steps"
            )
        return math.ceil(self.warmup_steps * num_steps - 1e-9)

    def dense_layer_count(self, num_layers: int) -> int:
        """Dense layers at the start of a transformer of ``num_layers`` layers.

        Raises:
            ValueError: More dense layers than layers.
        """
        if isinstance(self.dense_layers, Integral):
            if self.dense_layers > num_layers:
                raise ValueError(f"dense_layers={self.dense_layers}, but the transformer has {num_layers} layers")
            return int(self.dense_layers)
        return math.floor(self.dense_layers * num_layers + 1e-9)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_count_or_fraction(name: str, value) -> None:
    if value is None:
        return
    whole = isinstance(value, Integral) and not isinstance(value, bool) and value >= 0
    fraction = _is_number(value) and not isinstance(value, Integral) and 0 <= value < 1
    if not (whole or fraction):
        raise ValueError(f"{name} is a whole number >= 0 or a fraction in [0, 1), got {value!r}")
