"""Generates one short video dense and sparse with the same seed, on the XLA device that is there, and compares.

    python examples/demo.py [--prompt "a red ball moves left over grass"] [--density 0.4]

A stock diffusers WanPipeline, moved with ``pipe.to(torch_xla.device())``; the sparse run differs by one line. Writes
dense.mp4, sparse.mp4, frames.png, routing.png and report.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch_xla
from diffusers.utils import export_to_video, logging

import torch_svg.patches
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig, bridge
from torch_svg.quality import video_psnr, video_ssim
from torch_svg.testing import tiny_wan_pipeline, tiny_wan_settings


def main():
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()

    pipe = tiny_wan_pipeline()
    pipe.to(torch_xla.device())
    patched = torch_svg.patches.apply(pipe)
    default_processors = pipe.transformer.attn_processors
    processor = SparseVideoAttnProcessor(
        SparseVideoConfig(
            density=args.density, warmup_steps=args.warmup_steps, dense_layers=0, implementation=args.implementation
        )
    )

    dense = Run("dense", pipe, args)
    pipe.transformer.set_attn_processor(processor)
    sparse = Run("sparse", pipe, args)
    report = processor.report()
    again = Run("sparse again", pipe, args)
    pipe.transformer.set_attn_processor(default_processors)

    for run in (dense, sparse):
        export_to_video(run.frames, str(args.output / f"{run.name}.mp4"), fps=16)
    save_frames(args.output / "frames.png", dense.frames, sparse.frames)
    report.save_routing_map(args.output / "routing.png")
    facts = {
        "prompt": args.prompt,
        "seed": args.seed,
        "steps": args.steps,
        "psnr_db": video_psnr(sparse.frames, dense.frames),
        "ssim": video_ssim(sparse.frames, dense.frames),
        "pair_density": report.pair_density,
        "sparse_pair_density": report.sparse_pair_density,
        "tile_density": report.tile_density,
        "grid": report.grid,
        "head_kinds": report.head_kinds,
        "dense_steps": report.dense_steps,
        "compiles_dense": dense.compiles,
        "compiles_first": sparse.compiles,
        "compiles_second": again.compiles,
        "fallbacks": {**report.fallbacks, **sparse.fallbacks},
        "implementation": report.implementation,
        "device": bridge.platform(),
        "seconds": {run.name: round(run.seconds, 2) for run in (dense, sparse, again)},
        "patches": [str(patch) for patch in patched],
        "versions": bridge.versions(),
        "report": report.to_dict(),
    }
    (args.output / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(summary(facts, args.output))


class Run:
    """One generation, with what it cost."""

    def __init__(self, name, pipe, args):
        self.name = name
        print(f"{name}: {args.steps} steps; the first step of a new graph compiles", flush=True)
        before, start = bridge.metrics(), time.perf_counter()
        settings = {**tiny_wan_settings(), "num_inference_steps": args.steps}
        for option in ("height", "width", "num_frames"):
            if getattr(args, option):
                settings[option] = getattr(args, option)
        # a CPU generator: torch_xla has none of its own, and the seed then means the same on every device
        generator = torch.Generator().manual_seed(args.seed)
        self.frames = pipe(args.prompt, generator=generator, **settings).frames[0]
        self.seconds = time.perf_counter() - start
        after = bridge.metrics()
        self.compiles = after.compiles - before.compiles
        self.fallbacks = {
            name: count - before.fallbacks.get(name, 0)
            for name, count in after.fallbacks.items()
            if count > before.fallbacks.get(name, 0)
        }


def save_frames(path, dense, sparse, count=6):
    """Frames of both videos, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * count, 4.4), dpi=100)
    axes = figure.subplots(2, count)
    for row, (name, frames) in enumerate((("dense", dense), ("sparse", sparse))):
        for column in range(count):
            frame = round(column * (len(frames) - 1) / (count - 1))
            axes[row, column].imshow(frames[frame].clip(0, 1), interpolation="nearest")
            axes[row, column].set_title(f"{name}, frame {frame}", fontsize=9)
            axes[row, column].axis("off")
    figure.tight_layout()
    figure.savefig(path)


def summary(facts, folder):
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["head_kinds"].items())
    fallbacks = ", ".join(f"{name} x{count}" for name, count in facts["fallbacks"].items()) or "none"
    seconds = ", ".join(f"{name} {value}" for name, value in facts["seconds"].items())
    return "\n".join(
        [
            "",
            f'"{facts["prompt"]}", seed {facts["seed"]}, {facts["steps"]} steps on XLA:{facts["device"].upper()}',
            f"  grid            {' x '.join(map(str, facts['grid']))} tokens",
            f"  against dense   PSNR {facts['psnr_db']:.2f} dB, SSIM {facts['ssim']:.4f}",
            f"  pair density    {facts['pair_density']:.3f}, in sparse calls {facts['sparse_pair_density']:.3f}",
            f"  tile density    {facts['tile_density']:.3f}",
            f"  head kinds      {kinds} (steps x layers x heads)",
            f"  dense steps     {facts['dense_steps']}",
            f"  implementation  {facts['implementation']}",
            f"  compiles        dense {facts['compiles_dense']}, sparse {facts['compiles_first']}, "
            f"sparse again {facts['compiles_second']}",
            f"  fallbacks       {fallbacks}",
            f"  seconds         {seconds}",
            "  (a CPU run shows that it works and how good it is, not how fast: see docs/performance.md)",
            f"  written         {folder}/dense.mp4, sparse.mp4, frames.png, routing.png, report.json",
        ]
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="a red ball moves left over grass")
    parser.add_argument("--density", type=float, default=0.4, help="share of the query-key pairs, in (0, 1]")
    parser.add_argument("--steps", type=int, default=tiny_wan_settings()["num_inference_steps"])
    parser.add_argument("--warmup-steps", type=int, default=2, help="dense steps at the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int)
    parser.add_argument("--implementation", help="default: the best that applies to the device")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
