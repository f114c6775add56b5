"""First stage: an AutoencoderKLWan that compresses 4 frames x 8 x 8 pixels, small enough to train on a laptop.

The stock VAE walks a clip in chunks with a cache of features, for memory's sake. On short clips the same function is
computed several times faster over the whole clip at once, so training swaps the one layer that depends on the walk.
"""

import contextlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from tqdm import tqdm

from tools.checkpoints import load_checkpoint, log_line, save_checkpoint
from tools.tiny_scenes import CLIP_FRAMES, clip_of_seed

# a patch of 2 x 2 pixels enters the first convolution, as in Wan2.2's VAE: a quarter of the work at the finest level
VAE_CONFIG = {
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
CROP_FRAMES = 13
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
    return unpatchify(vae.decoder(vae.post_quant_conv(latents)), vae.config.patch_size)


def reconstruction_loss(output: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
    """L1 of pixels and of their differences (edges in space, motion in time), heavier where something moves."""
    moving = 1 + 3 * ((clip - clip.mean(2, keepdim=True)).abs().amax(1, keepdim=True) * 4).clamp(max=1)
    loss = ((output - clip).abs() * moving).mean()
    for axis, weight in ((2, 0.5), (3, 1.0), (4, 1.0)):
        loss = loss + weight * (output.diff(dim=axis) - clip.diff(dim=axis)).abs().mean()
    return loss


def _batch(step: int, batch: int, size: int) -> torch.Tensor:
    clips = []
    for index in range(batch):
        seed = step * batch + index
        first = (seed * 7) % (CLIP_FRAMES - CROP_FRAMES + 1)
        clips.append(clip_of_seed(seed, size, frames=CROP_FRAMES, first_frame=first)[1])
    return torch.stack(clips)


def train_vae(run: Path, steps: int, batch: int = 4, size: int = 64, peak_rate: float = 2e-3) -> AutoencoderKLWan:
    """Train the VAE or take it up at its last checkpoint; returns it with the averaged weights."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**VAE_CONFIG, latents_mean=[0.0] * 12, latents_std=[1.0] * 12)
    average = AutoencoderKLWan(**VAE_CONFIG, latents_mean=[0.0] * 12, latents_std=[1.0] * 12).requires_grad_(False)
    average.load_state_dict(vae.state_dict())
    optimizer = torch.optim.AdamW(vae.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=1e-4)
    first = load_checkpoint(run / "vae.pt", vae, average, optimizer)
    with whole_clip_at_once():
        for step in (bar := tqdm(range(first, steps), initial=first, total=steps, desc="vae")):
            rate = peak_rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            clip = _batch(step, batch, size)
            with torch.autocast("cpu", torch.bfloat16):
                mean, log_variance = encode_clip(vae, clip)
                latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                output = decode_clip(vae, latents)
            mean, log_variance = mean.float(), log_variance.float()
            divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
            loss = reconstruction_loss(output.float(), clip) + KL_WEIGHT * divergence
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            decay = min(0.995, (step + 1) / (step + 10))
            for slow, fast in zip(average.parameters(), vae.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - decay)
            error = F.mse_loss(output.float().clamp(-1, 1), clip).item() / 4
            psnr = -10 * math.log10(max(error, 1e-9))
            bar.set_postfix(loss=f"{loss.item():.4f}", psnr=f"{psnr:.2f}")
            if (step + 1) % 20 == 0:
                log_line(run / "vae.log", step=step + 1, loss=loss.item(), psnr=psnr, kl=divergence.item())
            if (step + 1) % 200 == 0 or step + 1 == steps:
                save_checkpoint(run / "vae.pt", step + 1, vae, average, optimizer)
    return average
