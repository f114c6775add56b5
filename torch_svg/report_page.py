"""One self-contained HTML page for a run's report: its figures, and pictures drawn into the page. Needs no network."""

from __future__ import annotations

import base64
import io

import numpy as np
from jinja2 import Environment
from matplotlib.figure import Figure

from .pattern import keep
from .report import KIND_COLOURS, KIND_NAMES, RunReport

# sides of the pattern pictures, in sampled tokens
_PATTERN_SIDE = 480

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: .2rem 1.5rem .2rem 0; vertical-align: top; }
img { max-width: 100%; height: auto; }
h2 { margin-top: 2.5rem; }
figure { margin: 1rem 0; }
figcaption { color: #555; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<table>
{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% for heading, picture, caption in pictures %}<h2>{{ heading }}</h2>
<figure><img src="data:image/png;base64,{{ picture }}" alt="{{ heading }}">
<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}</body>
</html>
"""


def report_page(report: RunReport) -> str:
    """The page as HTML text."""
    pictures = []
    if report.kinds.size:
        pictures = [
            ("Routing", _png(report.routing_figure()), "What every head was, layer by layer and step by step."),
            (
                "Density over steps",
                _png(_density_figure(report)),
                "Share of the video's query-key pairs that a forward computed, mean over layers and heads.",
            ),
        ]
    if np.isfinite(report.probe_errors).any():
        caption = (
            "The probe computes some rows with each pattern and dense, and takes the pattern that comes nearest. The "
            "line is the median over layers, the shade its quartiles."
        )
        pictures.append(("Probe error over steps", _png(_error_figure(report)), caption))
    if report.plan is not None:
        caption = "Which keys (to the right) a video token (downwards) meets, tokens in the video's own order."
        pictures.append(("Patterns", _png(_pattern_figure(report)), caption))
    environment = Environment(autoescape=True)
    return environment.from_string(_PAGE).render(
        title="torch_svg: report of a run", facts=_facts(report), pictures=pictures
    )


def _facts(report: RunReport) -> list[tuple[str, str]]:
    heads = ", ".join(f"{count} {name}" for name, count in report.head_kinds.items())
    facts = [
        ("implementation", report.implementation or "none: nothing sparse ran"),
        ("grid", "unknown" if report.grid is None else " x ".join(map(str, report.grid)) + " tokens"),
        ("pairs computed", f"{report.pair_density:.1%}, in sparse calls {report.sparse_pair_density:.1%}"),
        ("pairs in the tiles that ran", f"{report.tile_density:.1%}"),
        ("heads", f"{heads} (over steps and layers)"),
        ("dense steps", _listed(report.dense_steps)),
        ("dense layers", _listed(report.dense_layers)),
    ]
    if report.blocks:
        facts.append(("kernel blocks", ", ".join(f"{name} {value}" for name, value in report.blocks.items())))
    if report.compiles is not None:
        facts.append(("graphs compiled", f"{report.compiles}, in {report.compile_seconds:.1f} s"))
    calls = "; ".join(f"{count} calls: {reason}" for reason, count in report.fallbacks.items())
    return [*facts, ("dense for another reason", calls or "none")]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _density_figure(report: RunReport) -> Figure:
    figure = Figure(figsize=(9, 3), dpi=110)
    axes = figure.add_subplot()
    axes.step(np.arange(len(report.steps)), report.density_by_forward, where="mid", color=KIND_COLOURS[0])
    axes.set_ylim(0, 1.05)
    _step_axis(axes, report)
    axes.set_ylabel("pair density")
    return figure


def _error_figure(report: RunReport) -> Figure:
    figure = Figure(figsize=(9, 3.4), dpi=110)
    axes = figure.add_subplot()
    rows = np.arange(len(report.steps))
    for column, (name, colour) in enumerate((("chosen pattern", KIND_COLOURS[0]), ("other pattern", KIND_COLOURS[1]))):
        low, middle, high = np.nanpercentile(report.probe_errors[..., column], (25, 50, 75), axis=1)
        axes.plot(rows, middle, color=colour, label=name)
        axes.fill_between(rows, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_yscale("log")
    axes.set_ylabel("squared error, mean over rows")
    axes.legend()
    _step_axis(axes, report)
    return figure


def _pattern_figure(report: RunReport) -> Figure:
    grid = report.plan.grid
    sampled = grid.video_start + np.linspace(0, grid.video_tokens - 1, min(_PATTERN_SIDE, grid.video_tokens)).astype(
        int
    )
    sparse = [(kind, pattern) for kind, pattern in enumerate(report.plan.patterns) if pattern.half_width is not None]
    figure = Figure(figsize=(4.5 * max(1, len(sparse)), 4.6), dpi=110)
    for place, (kind, pattern) in enumerate(sparse, 1):
        axes = figure.add_subplot(1, len(sparse), place)
        axes.imshow(~keep(pattern, grid, sampled, sampled), cmap="gray", interpolation="nearest", vmin=0, vmax=1.2)
        axes.set_title(f"{KIND_NAMES[kind]}, sink: {pattern.sink.replace('_', ' ')}", color=KIND_COLOURS[kind])
        frames = np.arange(grid.frames + 1) * len(sampled) / grid.frames - 0.5
        shown = slice(None, None, max(1, grid.frames // 8))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(frames[shown], [str(frame) for frame in range(grid.frames + 1)][shown])
        axes.set_xlabel("key, frame")
        axes.set_ylabel("query, frame")
    return figure


def _step_axis(axes, report: RunReport) -> None:
    ticks = np.linspace(0, len(report.steps) - 1, min(len(report.steps), 12)).round().astype(int)
    axes.set_xticks(ticks, [str(report.steps[tick]) for tick in ticks])
    axes.set_xlabel("denoising step (a place for each guidance branch)")


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return base64.b64encode(buffer.getvalue()).decode()
