"""Sparse against dense on the trained pipeline that ships with the package: pictures, attention, routing.

    python -m benchmarks.quality --json outputs/quality.json

Every figure is measured on this machine, on plain PyTorch tensors (the f32 reference of the masks that the TPU kernel
executes). Rows are appended to the output's `.rows` file as they come, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.attention_structure import AttentionStructure, observed
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.grid import TokenGrid
from torch_svg.quality import generate, measure
from torch_svg.testing import tiny_wan_pipeline, tiny_wan_settings

PROMPTS = (
    "a red ball moves left over grass",
    "a blue box moves right over sand",
    "a yellow triangle spins in the sky",
    "a white ball bounces at night",
    "a pink box moves up over grass",
    "a red triangle moves down over sand",
    "a yellow ball moves right in the sky",
    "a pink triangle bounces at night",
)
DENSITIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
METRICS = ("psnr", "psnr_yuv", "ssim", "perceptual")
# steps that stay dense in every sparse run
WARMUP_STEPS = 3


def structure_of(pipe, prompts, seed: int) -> dict:
    """Attention masses of every head in dense runs, beside the uniform shares."""
    settings = tiny_wan_settings()
    scale = pipe.vae.config.scale_factor_spatial
    frames = (settings["num_frames"] - 1) // pipe.vae.config.scale_factor_temporal + 1
    grid = TokenGrid(frames, settings["height"] // scale, settings["width"] // scale)
    by_prompt = []
    for prompt in tqdm(prompts, desc="attention"):
        with observed(pipe.transformer, AttentionStructure(grid)) as structure:
            generate(pipe, prompt, seed, **settings)
        by_prompt.append(structure.by_layer())
    masses = torch.stack(by_prompt)
    return {
        "uniform": dict(zip(("near_frames", "same_place"), structure.uniform.tolist(), strict=True)),
        "heads": [
            {
                "layer": layer,
                "head": head,
                "near_frames": masses[:, layer, head, 0].mean().item(),
                "same_place": masses[:, layer, head, 1].mean().item(),
            }
            for layer in range(masses.shape[1])
            for head in range(masses.shape[2])
        ],
    }


def majority_share(kinds: np.ndarray) -> float:
    """Mean over heads of the share of runs that agree with the head's most frequent kind; kinds is (runs, heads)."""
    return float(np.mean([np.bincount(column).max() / len(column) for column in kinds.T]))


def routing_summary(kinds_by_run: dict[tuple[float, str, int], np.ndarray], density: float) -> dict:
    """How often a head is spatial or temporal at a density, and how steady that is over steps and over runs.

    Args:
        kinds_by_run: (density, prompt, seed) -> (sparse forwards, layers x heads) kinds.
    """
    runs = [kinds for (at, _, _), kinds in kinds_by_run.items() if at == density]
    everything = np.concatenate(runs)
    modes = np.stack([[np.bincount(column).argmax() for column in kinds.T] for kinds in runs])
    return {
        "density": density,
        "spatial": float((everything == 0).mean()),
        "temporal": float((everything == 1).mean()),
        "steady_over_steps": float(np.mean([majority_share(kinds) for kinds in runs])),
        "steady_over_runs": majority_share(modes),
        "runs": len(runs),
    }


def summarise(rows: list[dict]) -> list[dict]:
    """Median and quartiles of every metric by method and density."""
    summary = []
    for method, density in sorted({(row["method"], row["density"]) for row in rows}):
        chosen = [row for row in rows if (row["method"], row["density"]) == (method, density)]
        line = {"method": method, "density": density, "videos": len(chosen)}
        for metric in METRICS:
            low, median, high = np.percentile([row[metric] for row in chosen], (25, 50, 75))
            line |= {metric: float(median), f"{metric}_quartiles": [float(low), float(high)]}
        summary.append(line)
    return summary


def table(summary: list[dict]) -> str:
    """The summary as Markdown."""
    lines = ["| method | density | videos | PSNR, dB | PSNR of YUV, dB | SSIM | VIF |", "|---|---|---|---|---|---|---|"]
    for line in summary:
        cells = [
            f"{line[metric]:.{digits}f} ({line[f'{metric}_quartiles'][0]:.{digits}f} to "
            f"{line[f'{metric}_quartiles'][1]:.{digits}f})"
            for metric, digits in zip(METRICS, (1, 1, 3, 3), strict=True)
        ]
        lines.append(f"| {line['method']} | {line['density']} | {line['videos']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(options, rows_path: Path) -> tuple[list[dict], list[dict]]:
    """Generate what is not in the rows file yet; returns all rows and the routing summaries."""
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()] if rows_path.exists() else []
    done = {(row["method"], row["density"], row["prompt"], row["seed"]) for row in rows}
    pipe = tiny_wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    stock = pipe.transformer.attn_processors
    jobs = [(prompt, seed) for seed in range(options.seeds) for prompt in PROMPTS[: options.prompts]]
    settings = [(sink, density) for density in options.densities for sink in options.sinks]
    for prompt, seed in tqdm(jobs, desc="prompts x seeds"):
        missing = [(sink, density) for sink, density in settings if (sink, density, prompt, seed) not in done]
        if not missing:
            continue
        reference = generate(pipe, prompt, seed, **tiny_wan_settings())[0]
        for sink, density in missing:
            processor = SparseVideoAttnProcessor(
                SparseVideoConfig(density=density, sink=sink, warmup_steps=WARMUP_STEPS, dense_layers=0)
            )
            pipe.transformer.set_attn_processor(processor)
            try:
                video = generate(pipe, prompt, seed, **tiny_wan_settings())[0]
            finally:
                # diffusers empties the dict that it is given
                pipe.transformer.set_attn_processor(dict(stock))
            report = processor.report()
            sparse = report.kinds[report.steps >= WARMUP_STEPS]
            row = {"method": sink, "density": density, "prompt": prompt, "seed": seed, **measure(video, reference)}
            del row["psnr_by_frame"]
            row["pair_density"] = report.sparse_pair_density
            row["kinds"] = sparse.reshape(len(sparse), -1).tolist()
            rows.append(row)
            with rows_path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    routing = []
    for sink, density in settings:
        chosen = {
            (row["density"], row["prompt"], row["seed"]): np.array(row["kinds"])
            for row in rows
            if (row["method"], row["density"]) == (sink, density)
        }
        routing.append({"method": sink, **routing_summary(chosen, density)})
    return rows, routing


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), help="write JSON to a file, or print it")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES))
    parser.add_argument("--sinks", nargs="+", default=["first_frame", "none"], help="methods: where the sink is")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)

    to_file = options.json is not None and str(options.json) != "-"
    rows_path = options.json.with_suffix(".rows") if to_file else Path("outputs/quality.rows")
    rows_path.parent.mkdir(parents=True, exist_ok=True)
    rows, routing = run(options, rows_path)
    pipe = tiny_wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    result = {
        "rung": "reference on CPU, measured",
        "settings": {**tiny_wan_settings(), "warmup_steps": WARMUP_STEPS},
        "rows": [{key: value for key, value in row.items() if key != "kinds"} for row in rows],
        "summary": summarise(rows),
        "routing": routing,
        "structure": structure_of(pipe, PROMPTS[: min(2, options.prompts)], seed=0),
    }
    text = json.dumps(result, indent=1)
    if to_file:
        options.json.write_text(text + "\n")
    elif options.json is not None:
        print(text)
    if options.json is None or to_file:
        print(table(result["summary"]))


if __name__ == "__main__":
    main()
