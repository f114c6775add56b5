"""Captioned clips of one moving shape over a textured background: the training data of the tiny Wan pipeline.

Every clip is drawn from a seed, so a data set is a range of integers and a held-out set is another range. The caption
names all that matters in the clip: "a red ball moves left over grass".
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

COLOURS = {
    "red": (0.90, 0.12, 0.10),
    "yellow": (0.98, 0.85, 0.10),
    "blue": (0.10, 0.20, 0.90),
    "pink": (1.00, 0.35, 0.75),
    "white": (0.97, 0.97, 0.97),
}
SHAPES = ("ball", "box", "triangle")
MOTIONS = ("moves left", "moves right", "moves up", "moves down", "bounces", "spins")
PLACES = ("over grass", "over sand", "in the sky", "at night")
CLIP_FRAMES = 33


@dataclass(frozen=True)
class Scene:
    """What a caption says. A ball that spins is left out: nothing in the picture would tell it from one at rest."""

    colour: str
    shape: str
    motion: str
    place: str

    @cached_property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} {self.motion} {self.place}"


SCENES = tuple(Scene(*words) for words in product(COLOURS, SHAPES, MOTIONS, PLACES) if words[1:3] != ("ball", "spins"))


def _noise(rng: np.random.Generator, size: int, cell_height: float, cell_width: float) -> np.ndarray:
    """Smooth noise of about unit deviation, (size, size)."""
    cells = (max(2, round(size / cell_height)), max(2, round(size / cell_width)))
    coarse = torch.from_numpy(rng.standard_normal((1, 1, *cells)).astype(np.float32))
    return F.interpolate(coarse, (size, size), mode="bicubic", align_corners=True)[0, 0].numpy()


def _background(rng: np.random.Generator, place: str, size: int) -> np.ndarray:
    """(size, size, 3) in 0..1."""
    down = np.linspace(0, 1, size, dtype=np.float32)[:, None]
    if place == "over grass":
        light = 1 + 0.12 * _noise(rng, size, 24, 24) + 0.10 * _noise(rng, size, 10, 4)
        return light[..., None] * np.array((0.25, 0.52, 0.18), np.float32)
    if place == "over sand":
        ripples = np.sin(down * size / 2.2 + 1.5 * _noise(rng, size, 32, 32) + rng.uniform(0, 6.28))
        light = 1 + 0.05 * ripples + 0.04 * _noise(rng, size, 20, 20)
        return light[..., None] * np.array((0.84, 0.72, 0.48), np.float32)
    if place == "in the sky":
        clear = (1 - down)[..., None] * np.array((0.28, 0.55, 0.92), np.float32) + down[..., None] * np.array(
            (0.62, 0.82, 0.98), np.float32
        )
        clouds = np.clip(_noise(rng, size, 20, 36) * 0.8 - 0.2, 0, 0.7)[..., None]
        return clear * np.ones((1, size, 1), np.float32) * (1 - clouds) + clouds * 0.93
    if place == "at night":
        dark = (1 - down)[..., None] * np.array((0.03, 0.04, 0.14), np.float32) + down[..., None] * np.array(
            (0.16, 0.10, 0.26), np.float32
        )
        picture = dark * np.ones((1, size, 1), np.float32)
        rows, columns = np.mgrid[:size, :size].astype(np.float32)
        for _ in range(max(4, size // 8)):
            row, column, glow = rng.uniform(0, size), rng.uniform(0, size), rng.uniform(0.4, 0.9)
            picture += glow * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 2.4)[..., None]
        return picture
    raise ValueError(f"unknown place: got {place!r}, expected one of {PLACES}")


def _path(
    rng: np.random.Generator, motion: str, size: int, radius: float, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre x, centre y (pixels, y down) and angle (radians) at times 0..1 of the clip."""
    low, high = radius + 2, size - radius - 2
    still = np.zeros_like(seconds)
    if motion.startswith("moves"):
        way = rng.uniform(0.75, 1.0) * (high - low)
        first = rng.uniform(low, high - way)
        along, across = first + way * seconds, rng.uniform(low, high)
        forward = motion in ("moves right", "moves down")
        along = along if forward else size - along
        if motion in ("moves left", "moves right"):
            return along, still + across, still
        return still + across, along, still
    if motion == "bounces":
        drop = rng.uniform(0.7, 1.0) * (high - low)
        phase = 2 * seconds + rng.uniform(0, 1)
        hop = np.abs(np.sin(np.pi * phase))
        return still + rng.uniform(low, high), high - drop * hop, still
    if motion == "spins":
        turn = rng.choice((-1, 1)) * rng.uniform(2.2, 3.2)
        return still + rng.uniform(low, high), still + rng.uniform(low, high), rng.uniform(0, 6.28) + turn * seconds
    raise ValueError(f"unknown motion: got {motion!r}, expected one of {MOTIONS}")


def _distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Signed distance to the edge in pixels, negative inside."""
    if shape == "ball":
        return np.hypot(x, y) - radius
    if shape == "box":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85 * radius
    if shape == "triangle":
        return np.maximum(np.abs(x) * 0.866 - y * 0.5, y) - 0.6 * radius
    raise ValueError(f"unknown shape: got {shape!r}, expected one of {SHAPES}")


def render(scene: Scene, seed: int, size: int = 128, frames: int = CLIP_FRAMES, first_frame: int = 0) -> np.ndarray:
    """Draw `frames` frames of a clip of 33, from `first_frame` on.

    Args:
        scene: What is seen.
        seed: Where it is seen: place, speed, size, texture. The same seed gives the same clip.
        size: Height and width in pixels.

    Returns:
        (frames, size, size, 3) float32 in 0..1.
    """
    rng = np.random.default_rng(seed)
    radius = rng.uniform(0.8, 1.2) * (0.115 * size + 4)
    seconds = np.arange(first_frame, first_frame + frames, dtype=np.float32) / (CLIP_FRAMES - 1)
    centre_x, centre_y, angle = (
        np.asarray(v, np.float32)[:, None, None] for v in _path(rng, scene.motion, size, radius, seconds)
    )
    background = np.clip(_background(rng, scene.place, size), 0, 1).astype(np.float32)

    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    right, down = columns - centre_x, rows - centre_y
    x = np.cos(angle) * right + np.sin(angle) * down
    y = np.cos(angle) * down - np.sin(angle) * right
    distance = _distance(scene.shape, x, y, radius)
    inside = np.clip(0.5 - distance, 0, 1)[..., None]
    # lit from the upper left, with a dark rim: it tells a white shape from a cloud
    rim = np.clip(distance + 2.5, 0, 1.5) / 1.5
    light = np.clip(0.88 - 0.2 * (right + down) / radius, 0, 1.1) * (1 - 0.55 * rim)
    surface = np.clip(light[..., None] * np.asarray(COLOURS[scene.colour], np.float32), 0, 1)
    return background + inside * (surface - background)


def clip_of_seed(seed: int, size: int = 128, **crop) -> tuple[str, torch.Tensor]:
    """A random scene drawn from the seed: its caption and its frames as (3, frames, size, size) float32 in -1..1."""
    scene = SCENES[np.random.default_rng((seed, 7)).integers(len(SCENES))]
    frames = render(scene, seed, size, **crop)
    return scene.caption, torch.from_numpy(frames).permute(3, 0, 1, 2) * 2 - 1
