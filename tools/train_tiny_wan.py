"""Train the small text-to-video pipeline that ships with torch_svg, from clips that it draws and one real film.

    python tools/train_tiny_wan.py

Three stages, each taken up at its last checkpoint when the command is run again: the VAE, the latents of the training
clips, the transformer with its text encoder. Then the whole `WanPipeline` folder is written in half precision. With one
process for each core the transformer trains about twice as fast:

    torchrun --nproc-per-node 2 tools/train_tiny_wan.py --threads 1
"""

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.real_clips import REAL_CAPTION, real_clip_of_seed  # noqa: E402
from tools.tiny_latents import cached_latents, latent_statistics  # noqa: E402
from tools.tiny_scenes import SCENES, clip_of_seed  # noqa: E402
from tools.tiny_transformer import Phase, TextToVideo, train_transformer  # noqa: E402
from tools.tiny_vae import VAE_CONFIG, VAE_PHASES, reconstruction_psnr, train_vae  # noqa: E402
from torch_svg.testing import word_tokenizer  # noqa: E402

# how many clips of each size are drawn, and how many are cut from the real film
SOURCES = {"drawn": clip_of_seed, "real": real_clip_of_seed}
CLIPS = {"drawn": {32: 8000, 64: 4000, 128: 1000}, "real": {64: 300, 128: 75}}
# 512 is what WanPipeline pads to unless told otherwise, 226 what its examples ask for
PHASES = (
    Phase(size=32, steps=1500, batch=24, shift=3.0, place=0.2, padded=(16,)),
    Phase(size=64, steps=1500, batch=6, shift=3.0, place=0.1, padded=(16, 32, 64)),
    Phase(size=128, steps=1500, batch=2, shift=4.0, place=0.05, padded=(32, 64, 128, 226, 512)),
)
HELD_OUT_SEEDS = range(9_000_000, 9_000_004)


def scene_tokenizer():
    """One token for each word that a caption can hold."""
    drawn = sorted({word for scene in SCENES for word in scene.caption.split()})
    return word_tokenizer((*drawn, *sorted(set(REAL_CAPTION.split()) - set(drawn))))


def assemble(
    vae: AutoencoderKLWan, model: TextToVideo, tokenizer, mean: torch.Tensor, deviation: torch.Tensor
) -> WanPipeline:
    """The trained parts as a pipeline of stock classes."""
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    # fresh modules carry stock processors and whatever config the loader will see
    transformer = WanTransformer3DModel.from_config(model.transformer.config)
    transformer.load_state_dict(model.transformer.state_dict())
    text_encoder = UMT5EncoderModel(model.text_encoder.config)
    text_encoder.load_state_dict(model.text_encoder.state_dict())
    final_vae = AutoencoderKLWan(**VAE_CONFIG, latents_mean=mean.tolist(), latents_std=deviation.tolist())
    final_vae.load_state_dict(vae.state_dict())
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=final_vae.eval(),
        scheduler=scheduler,
        transformer=transformer.eval(),
    )


def last_losses(path: Path, lines: int = 50) -> dict[str, float]:
    """Means over the end of a stage's log."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[-lines:]]
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if key not in ("time", "step", "size")}


def model_card(run: Path, vae: AutoencoderKLWan) -> str:
    """The README of the folder, with the figures of this run."""
    psnr = reconstruction_psnr(vae, HELD_OUT_SEEDS)
    vae_end = last_losses(run / "vae.log", 10)
    transformer_loss = last_losses(run / "transformer.log", 100)["loss"]
    trained_on = "\n".join(
        f"  {number}. {phase.steps} steps of {phase.batch} clips of {phase.size} x {phase.size}"
        for number, phase in enumerate(PHASES, 1)
    )
    template = (ROOT / "tools" / "tiny_wan_card.md").read_text(encoding="utf-8")
    clips = {
        source: ", ".join(f"{count:,} of {size} x {size}" for size, count in counts.items())
        for source, counts in CLIPS.items()
    }
    return template.format(
        scenes=len(SCENES),
        drawn_clips=clips["drawn"],
        real_clips=clips["real"],
        vae_steps=sum(phase.steps for phase in VAE_PHASES),
        vae_loss=vae_end["loss"],
        psnr_mean=sum(psnr) / len(psnr),
        psnr_least=min(psnr),
        psnr_clips=len(psnr),
        trained_on=trained_on,
        transformer_loss=transformer_loss,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run all stages that are not done yet and write the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=ROOT / "outputs" / "tiny_wan", help="checkpoints, latents, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "torch_svg" / "assets" / "tiny_wan", help="pipeline folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    rank = 0
    if "RANK" in os.environ:
        # the others wait for the first two stages, which are one process's work
        dist.init_process_group("gloo", timeout=timedelta(hours=12))
        rank = dist.get_rank()
    if rank > 0:
        dist.barrier()
    vae = train_vae(options.run)
    data = {}
    for source, counts in CLIPS.items():
        for size, count in counts.items():
            captions, latents = cached_latents(options.run, vae, source, SOURCES[source], size, count)
            before = data.get(size, ([], latents[:0]))
            data[size] = (before[0] + captions, torch.cat([before[1], latents]))
    mean, deviation = latent_statistics(options.run, data[64][1])
    if dist.is_initialized() and rank == 0:
        dist.barrier()
    shape = (1, -1, 1, 1, 1)
    data = {
        size: (captions, ((latents.float() - mean.view(shape)) / deviation.view(shape)).half())
        for size, (captions, latents) in data.items()
    }
    tokenizer = scene_tokenizer()
    model = train_transformer(options.run, tokenizer, data, PHASES)
    if rank > 0:
        return

    pipe = assemble(vae, model, tokenizer, mean, deviation)
    # the loader keeps in float32 what diffusers wants there; on disk half precision is enough
    pipe.to(torch.float16)
    pipe.save_pretrained(options.out, safe_serialization=True)
    (options.out / "README.md").write_text(model_card(options.run, vae), encoding="utf-8")
    print(f"wrote {options.out}: {sum(f.stat().st_size for f in options.out.rglob('*')) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
