"""Every example runs as a user runs it, on small settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import imageio.v3 as iio
import pytest

ROOT = Path(__file__).parents[1]
# the video of the trained pipeline is 128 x 128; a quarter of its tokens is enough here
SMALL = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "3"]


def run(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "size"),
    [
        ("wan_text_to_video", [*SMALL, "--density", "0.5"], (9, 64, 64, 3)),
        ("wan_image_to_video", ["--density", "0.5"], (9, 48, 80, 3)),
        ("wan22_two_experts", ["--density", "0.5"], (9, 48, 80, 3)),
    ],
)
def test_example_writes_a_video(script, arguments, size, tmp_path):
    out = tmp_path / "video.mp4"
    printed = run(f"examples/{script}.py", *arguments, "--output", str(out))
    assert "9 frames" in printed
    assert iio.imread(out).shape == size


def test_demo_writes_everything_and_compiles_nothing_the_second_time(tmp_path):
    printed = run("examples/demo.py", *SMALL, "--warmup-steps", "1", "--density", "0.6", "--output", str(tmp_path))
    assert len(printed.strip().splitlines()) <= 25
    facts = json.loads((tmp_path / "report.json").read_text())
    for name in ("psnr_db", "ssim", "pair_density", "tile_density", "head_kinds", "fallbacks", "versions"):
        assert name in facts
    assert facts["compiles_second"] == 0
    assert facts["implementation"] in ("xla", "pallas")
    assert 0.5 < facts["sparse_pair_density"] <= 0.6 < facts["pair_density"] < 1
    assert facts["dense_steps"] == [0] and facts["psnr_db"] > 15
    for name in ("dense.mp4", "sparse.mp4"):
        assert iio.imread(tmp_path / name).shape == (9, 64, 64, 3)
    for name in ("routing.png", "frames.png"):
        assert (tmp_path / name).stat().st_size > 2000
