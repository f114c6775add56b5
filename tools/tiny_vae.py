"""First stage: an AutoencoderKLWan that compresses 4 frames x 8 x 8 pixels, small enough to train on a laptop.

The stock VAE walks a clip in chunks with a cache of features, for memory's sake. On short clips the same function is
computed several times faster over the whole clip at once, so training swaps the one layer that depends on the walk.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)
from tqdm import tqdm

from tools.checkpoints import load_checkpoint, log_line, save_checkpoint
from tools.muon import Muon, Together, split_parameters
from tools.real_clips import real_clip_of_seed
from tools.tiny_scenes import CLIP_FRAMES, clip_of_seed

# a patch of 2 x 2 pixels enters the first convolution, as in Wan2.2's VAE: a quarter of the work at the finest level
VAE_CONFIG = {
    "is_residual": True,
    "base_dim": 32,
    "z_dim": 12,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}


@dataclass(frozen=True)
class Crops:
    """A stretch of training on crops of one size; without `encoder`, that part is settled and the decoder learns.
    `real` is the share of crops from the real film."""

    steps: int
    batch: int
    size: int
    frames: int
    encoder: bool = True
    real: float = 0.0


# single pictures teach colours and edges at a tenth of the price of clips; once the encoder is settled, latents can be
# cached and the decoder goes on learning
VAE_PHASES = (
    Crops(steps=150, batch=16, size=32, frames=1),
    Crops(steps=300, batch=8, size=32, frames=9),
    Crops(steps=310, batch=6, size=32, frames=13, encoder=False),
    Crops(steps=60, batch=2, size=64, frames=13, encoder=False),
    Crops(steps=130, batch=2, size=64, frames=13, encoder=False, real=0.25),
)
KL_WEIGHT = 1e-5


def _resample_whole_clip(self, x, feat_cache=None, feat_idx=None):
    """WanResample.forward for a whole clip: the first frame stands alone, the others go through time in pairs."""
    if self.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], self.time_conv(x[:, :, 1:])
        batch, channels, frames, height, width = rest.shape
        rest = rest.reshape(batch, 2, channels // 2, frames, height, width).permute(0, 2, 3, 1, 4, 5)
        x = torch.cat([first, rest.reshape(batch, channels // 2, 2 * frames, height, width)], 2)
    batch, channels, frames, height, width = x.shape
    x = self.resample(x.transpose(1, 2).flatten(0, 1))
    x = x.unflatten(0, (batch, frames)).transpose(1, 2)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x


@contextlib.contextmanager
def whole_clip_at_once():
    """Inside, WanResample works on whole clips; outside, diffusers is as it was."""
    stock = WanResample.forward
    WanResample.forward = _resample_whole_clip
    try:
        yield
    finally:
        WanResample.forward = stock


def encode_clip(vae: AutoencoderKLWan, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance of the latents, (batch, z_dim, latent frames, height / 8, width / 8). Call it inside
    `whole_clip_at_once`."""
    moments = vae.quant_conv(vae.encoder(patchify(clip, vae.config.patch_size)))
    mean, log_variance = moments.chunk(2, 1)
    return mean, log_variance.clamp(-30, 20)


def decode_clip(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Frames of the latents, not clamped. Call it inside `whole_clip_at_once`."""
    return unpatchify(vae.decoder(vae.post_quant_conv(latents), first_chunk=True), vae.config.patch_size)


def start_as_shortcuts(vae: AutoencoderKLWan) -> None:
    """Silence every residual branch, so that training starts from the parameter-free shortcuts (averages down, copies
    up), and the noise of the latents, which at its stock unit variance drowns them. Both save hundreds of steps."""
    for module in vae.modules():
        silent = []
        if isinstance(module, WanResidualBlock):
            silent = [module.conv2]
        elif isinstance(module, WanResample):
            silent = [module.resample[1]]
        elif isinstance(module, WanAttentionBlock):
            silent = [module.proj]
        for layer in silent:
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    vae.quant_conv.bias.data[vae.config.z_dim :] = -5.0


def reconstruction_loss(output: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
    """L1 of pixels and of their differences (edges in space, motion in time), heavier where something moves."""
    moving = 1 + 3 * ((clip - clip.mean(2, keepdim=True)).abs().amax(1, keepdim=True) * 4).clamp(max=1)
    loss = ((output - clip).abs() * moving).mean()
    axes = ((2, 0.5), (3, 1.0), (4, 1.0)) if clip.shape[2] > 1 else ((3, 1.0), (4, 1.0))
    for axis, weight in axes:
        loss = loss + weight * (output.diff(dim=axis) - clip.diff(dim=axis)).abs().mean()
    return loss


def _batch(step: int, phase: Crops) -> torch.Tensor:
    """Random crops of clips, (batch, 3, frames, size, size); the same for the same step."""
    size, frames = phase.size, phase.frames
    crops = []
    for seed in range(step * 16, step * 16 + phase.batch):
        rng = np.random.default_rng(seed)
        if rng.random() < phase.real:
            crops.append(real_clip_of_seed(seed, size, frames)[1])
            continue
        whole = 64 if rng.random() < 0.7 else 96
        first, top, left = rng.integers((CLIP_FRAMES - frames + 1, whole - size + 1, whole - size + 1))
        clip = clip_of_seed(seed, whole, frames=frames, first_frame=int(first))[1]
        crops.append(clip[:, :, top : top + size, left : left + size])
    return torch.stack(crops)


def train_vae(run: Path, phases: tuple[Crops, ...] = VAE_PHASES) -> AutoencoderKLWan:
    """Train the VAE or take it up at its last checkpoint; returns it with the averaged weights.

    The encoder is settled at the end of the last phase that trains it, and stored by itself as `encoder.pt`.
    """
    torch.manual_seed(0)
    vae, average = new_vae(), new_vae().requires_grad_(False)
    start_as_shortcuts(vae)
    average.load_state_dict(vae.state_dict())
    matrices, others = split_parameters([vae])
    optimizer = Together(Muon(matrices, lr=4e-3), torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95)))
    first = load_checkpoint(run / "vae.pt", vae, average, optimizer)
    schedule = [phase for phase in phases for _ in range(phase.steps)]
    steps, settled = len(schedule), sum(phase.steps for phase in phases if phase.encoder)
    with whole_clip_at_once():
        for step in (bar := tqdm(range(first, steps), initial=first, total=steps, desc="vae")):
            phase = schedule[step]
            torch.manual_seed(step)
            if step == settled:
                settle_encoder(vae, average, run)
            clip = _batch(step, phase)
            with torch.autocast("cpu", torch.bfloat16):
                with torch.set_grad_enabled(phase.encoder):
                    mean, log_variance = encode_clip(vae, clip)
                latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                output = decode_clip(vae, latents)
            mean, log_variance = mean.float(), log_variance.float()
            divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
            loss = reconstruction_loss(output.float(), clip) + KL_WEIGHT * divergence
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step(min(1, (step + 1) / 10, 0.02 + 1.3 * (1 - step / steps)))
            decay = min(0.99, (step + 1) / (step + 10))
            for slow, fast in zip(average.parameters(), vae.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - decay)
            error = F.mse_loss(output.float().clamp(-1, 1), clip).item() / 4
            psnr = -10 * math.log10(max(error, 1e-9))
            bar.set_postfix(loss=f"{loss.item():.4f}", psnr=f"{psnr:.2f}")
            log_line(run / "vae.log", step=step + 1, loss=loss.item(), psnr=psnr, kl=divergence.item())
            if (step + 1) % 100 == 0 or step + 1 == steps:
                save_checkpoint(run / "vae.pt", step + 1, vae, average, optimizer)
    return average


def new_vae() -> AutoencoderKLWan:
    """A VAE of this module's shape with fresh weights; its latents are not normalised yet."""
    channels = VAE_CONFIG["z_dim"]
    return AutoencoderKLWan(**VAE_CONFIG, latents_mean=[0.0] * channels, latents_std=[1.0] * channels)


def settle_encoder(vae: AutoencoderKLWan, average: AutoencoderKLWan, run: Path) -> None:
    """From here on the encoder is its average, in both; it is written to `encoder.pt`."""
    state = {
        name: value for name, value in average.state_dict().items() if name.startswith(("encoder.", "quant_conv."))
    }
    vae.load_state_dict(state, strict=False)
    torch.save(state, run / "encoder.pt")


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKLWan, seeds, size: int = 128) -> list[float]:
    """PSNR in dB of whole clips through the stock encode and decode, one value for each seed."""
    values = []
    for seed in seeds:
        clip = clip_of_seed(seed, size)[1][None].to(vae.dtype)
        output = vae.decode(vae.encode(clip).latent_dist.mode()).sample
        values.append(-10 * math.log10(F.mse_loss(output.float(), clip.float()).item() / 4))
    return values
