"""Second stage: the training clips as latents, encoded once and kept."""

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from tqdm import tqdm

from tools.tiny_vae import encode_clip, whole_clip_at_once

# clips of the transformer's data; the VAE has seen lower seeds, and tests draw from much higher ones
FIRST_SEED = 1_000_000


@torch.no_grad()
def cached_latents(
    run: Path, vae: AutoencoderKLWan, source: str, clip_of_seed: Callable, size: int, count: int
) -> tuple[list[str], torch.Tensor]:
    """Captions and latent means of `count` clips of size x size pixels, from the cache if it is complete.

    Args:
        source: Names the cache.
        clip_of_seed: (seed, size) -> caption and frames.

    Returns:
        The captions, and float16 latents (count, z_dim, 9, size / 8, size / 8), not yet normalised.
    """
    path = run / f"latents_{source}_{size}.pt"
    captions, parts = [], []
    if path.exists():
        stored = torch.load(path, weights_only=True)
        captions, parts = stored["captions"], list(stored["latents"].split(1))
    batch = max(1, 4 * 64 * 64 // size**2)
    with whole_clip_at_once():
        for first in tqdm(range(len(captions), count, batch), desc=f"latents {source} {size}"):
            clips = [clip_of_seed(FIRST_SEED + size * 10_000 + index, size) for index in range(first, first + batch)]
            captions += [caption for caption, _ in clips]
            # torch.cat of float16 below does not work under autocast
            with torch.autocast("cpu", torch.bfloat16):
                latents = encode_clip(vae, torch.stack([clip for _, clip in clips]))[0]
            parts.append(latents.half())
            if len(captions) % 200 == 0 or first + batch >= count:
                torch.save({"captions": captions, "latents": torch.cat(parts)}, path)
    return captions[:count], torch.cat(parts)[:count]


def latent_statistics(run: Path, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel, over clips, frames and places, as the VAE's config states them.

    Kept once computed: a transformer half trained on one normalisation must not go on with another.
    """
    path = run / "latent_statistics.pt"
    if not path.exists():
        by_channel = latents.float().transpose(0, 1).flatten(1)
        torch.save((by_channel.mean(1), by_channel.std(1)), path)
    return torch.load(path, weights_only=True)
