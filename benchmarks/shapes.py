"""Real attention shapes by name, shared by benchmarks and tests.

Grids are latent frames x height x width after patching, from each model's VAE and patch factors at the setting named.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_svg.grid import TokenGrid


@dataclass(frozen=True)
class Shape:
    """The self-attention of one pipeline setting.

    Args:
        grid: Tokens of one sequence.
        heads: Heads of the whole model; a slice of n chips has heads / n of them.
        head_dim: Channels of a head.
        layers: Self-attention layers.
    """

    grid: TokenGrid
    heads: int
    head_dim: int
    layers: int


SHAPES = {
    "wan-14b-480p-81f": Shape(TokenGrid(21, 30, 52), 40, 128, 40),
    "wan-14b-720p-81f": Shape(TokenGrid(21, 45, 80), 40, 128, 40),
    "wan-14b-1080p-81f": Shape(TokenGrid(21, 68, 120), 40, 128, 40),
    "wan-14b-1440p-81f": Shape(TokenGrid(21, 90, 160), 40, 128, 40),
    "wan-1.3b-480p-81f": Shape(TokenGrid(21, 30, 52), 12, 128, 30),
    "wan-5b-704p-121f": Shape(TokenGrid(31, 22, 40), 24, 128, 30),
    "hunyuan-720p-129f": Shape(TokenGrid(33, 45, 80, text_tokens=256), 24, 128, 60),
    "cogvideox1.5-768p-81f": Shape(TokenGrid(11, 48, 85, text_tokens=226, text_first=True), 48, 64, 42),
    "cogvideox-480p-49f": Shape(TokenGrid(13, 30, 45, text_tokens=226, text_first=True), 48, 64, 42),
    "ltx-704p-161f": Shape(TokenGrid(21, 22, 38), 32, 64, 28),
    "ltx2-512p-121f": Shape(TokenGrid(16, 16, 24), 32, 128, 48),
    "mochi-480p-163f": Shape(TokenGrid(28, 30, 53, text_tokens=256), 24, 128, 48),
    "cosmos1-7b-704p-121f": Shape(TokenGrid(16, 44, 80), 32, 128, 28),
    "cosmos2-14b-704p-93f": Shape(TokenGrid(24, 44, 80), 40, 128, 36),
    "skyreels2-14b-544p-97f": Shape(TokenGrid(25, 34, 60), 40, 128, 40),
}

# one chip's share of Wan 14B at 720p in Google's published ladder: 40 heads over 4 chips
LADDER = SHAPES["wan-14b-720p-81f"]
LADDER_HEADS = 10


def knob_half_width(grid: TokenGrid, knob: float) -> int:
    """Sparse VideoGen's density knob as a band half width, rounded up to 128.

    ``tokens * (1 - sqrt(1 - s))`` with ``s = knob - 2 * text tokens / tokens`` (arXiv 2502.01776, and its code).
    """
    tokens = grid.video_tokens
    kept = knob - 2 * grid.text_tokens / tokens
    return -(-int(tokens * (1 - (1 - kept) ** 0.5)) // 128) * 128
