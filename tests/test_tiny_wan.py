"""Facts about the trained pipeline that ships with the package: what its captions do to its pictures."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from tools.tiny_scenes import COLOURS
from tools.tiny_vae import reconstruction_psnr
from torch_svg.testing import tiny_wan_folder, tiny_wan_pipeline, tiny_wan_settings

# clips that no stage of the training has drawn
HELD_OUT = range(9_000_000, 9_000_004)
LEAST_PSNR = 24.0


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def likeness(frames: np.ndarray, colour: str) -> np.ndarray:
    """(frames, height, width): 0 to 1, how much a pixel's hue is that of a colour; grey and dull pixels have none."""
    hue = frames - frames.mean(-1, keepdims=True)
    wanted = np.array(COLOURS[colour]) - np.mean(COLOURS[colour])
    length = np.linalg.norm(hue, axis=-1)
    cosine = (hue @ wanted) / (length * np.linalg.norm(wanted) + 1e-6)
    return np.clip((cosine - 0.9) / 0.1, 0, 1) * (length > 0.25)


def centre(weights: np.ndarray) -> np.ndarray:
    """(frames, 2): the middle of the weights in shares of the height and the width."""
    _, height, width = weights.shape
    total = weights.sum((1, 2)) + 1e-6
    rows = (weights.sum(2) * np.arange(height)).sum(1) / total / height
    columns = (weights.sum(1) * np.arange(width)).sum(1) / total / width
    return np.stack([rows, columns], 1)


def moves(frames: np.ndarray, colour: str) -> np.ndarray:
    """(down, right) travel of a colour from the first three frames to the last three, in shares of the picture."""
    path = centre(likeness(frames, colour))
    return path[-3:].mean(0) - path[:3].mean(0)


def generate(pipe, prompt: str, seed: int, **settings) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    settings = {**tiny_wan_settings(), **settings}
    return pipe(prompt, generator=generator, output_type="np", **settings).frames[0]


# colours that no background has
HUES = ("red", "blue", "pink")
# (axis, sign) of the travel that a motion means; axis 0 runs down, axis 1 right
TRAVEL = {"left": (1, -1), "right": (1, 1), "up": (0, -1), "down": (0, 1)}
CASES = [
    ("red", "ball", "left", "over grass"),
    ("blue", "box", "right", "over sand"),
    ("red", "box", "up", "at night"),
    ("pink", "ball", "down", "over grass"),
]


@pytest.fixture(scope="module", params=[64, pytest.param(128, marks=pytest.mark.slow)])
def videos(pipe, request):
    """(colour, way) and frames for every case and three seeds."""
    return [
        ((colour, way), generate(pipe, f"a {colour} {shape} moves {way} {place}", seed, height=size, width=size))
        for size in [request.param]
        for colour, shape, way, place in CASES
        for seed in range(3)
    ]


def test_the_colour_of_the_caption_shows(videos):
    shares = [(colour, {name: likeness(frames, name).mean() for name in HUES}) for (colour, _), frames in videos]
    right = sum(max(share, key=share.get) == colour and share[colour] > 0.005 for colour, share in shares)
    assert right >= 0.9 * len(videos), f"{right} of {len(videos)}: {shares}"


def test_the_direction_of_the_caption_shows(videos):
    travels = []
    for (colour, way), frames in videos:
        axis, sign = TRAVEL[way]
        travels.append(round(sign * moves(frames, colour)[axis], 2))
    right = sum(travel > 0.1 for travel in travels)
    assert right >= 0.8 * len(videos), f"{right} of {len(videos)}: {travels}"


def test_captions_and_not_the_seed_decide_the_colour(pipe):
    prompts = {colour: f"a {colour} ball moves left at night" for colour in COLOURS}
    frames = {colour: generate(pipe, prompt, 7, height=64, width=64) for colour, prompt in prompts.items()}
    for colour in HUES:
        shares = {asked: likeness(video, colour).mean() for asked, video in frames.items()}
        assert max(shares, key=shares.get) == colour, f"{colour} by caption: {shares}"


def test_vae_restores_held_out_clips():
    vae = AutoencoderKLWan.from_pretrained(tiny_wan_folder(), subfolder="vae", torch_dtype=torch.float32)
    values = reconstruction_psnr(vae, HELD_OUT)
    assert min(values) > LEAST_PSNR, f"PSNR of held-out clips: {[round(value, 1) for value in values]} dB"
