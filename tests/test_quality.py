"""The metrics against closed forms, and the comparison of a pipeline with itself."""

import json
import math
import re
import subprocess
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.quality import (
    compare,
    frame_psnr,
    measure,
    video_psnr,
    video_psnr_yuv,
    video_ssim,
    visual_information,
)
from torch_svg.testing import random_tiny_wan_pipeline

SETTINGS = {
    "height": 48,
    "width": 48,
    "num_frames": 9,
    "num_inference_steps": 2,
    "guidance_scale": 1.0,
    "max_sequence_length": 16,
}


def test_psnr_is_the_mean_over_frames_not_of_the_clip():
    reference = np.zeros((2, 8, 9, 3))
    video = reference + np.array([0.1, 0.01])[:, None, None, None]
    assert frame_psnr(video, reference) == pytest.approx([20, 40])
    assert video_psnr(video, reference) == pytest.approx(30)


def test_yuv_psnr_of_a_grey_and_of_a_colour_shift():
    reference = np.full((2, 8, 10, 3), 0.5)
    # a grey shift is luma alone: 219 of 255 levels, four of six samples
    assert video_psnr_yuv(reference + 0.1, reference) == pytest.approx(-10 * math.log10(4 / 6 * (0.1 * 219 / 255) ** 2))
    # a pattern in colour that is finer than the chroma samples is gone, but for its luma
    fine = reference.copy()
    fine[:, :, ::2, 2] += 0.1
    fine[:, :, 1::2, 2] -= 0.1
    assert video_psnr_yuv(fine, reference) == pytest.approx(-10 * math.log10(4 / 6 * (0.1 * 24.966 / 255) ** 2))
    with pytest.raises(ValueError, match="even sides, got 7 x 8"):
        video_psnr_yuv(np.zeros((1, 7, 8, 3)), np.zeros((1, 7, 8, 3)))


def test_yuv_psnr_is_ffmpegs(tmp_path):
    random = np.random.default_rng(0)
    reference = random.random((3, 64, 64, 3)).repeat(2, 1).repeat(2, 2)[:, ::2, ::2]
    video = (reference + 0.05 * random.standard_normal(reference.shape)).clip(0, 1)
    clips = []
    for name, frames in (("video", video), ("reference", reference)):
        path = tmp_path / f"{name}.rgb"
        path.write_bytes((frames * 255).round().astype(np.uint8).tobytes())
        clips += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x64", "-i", str(path)]
    chain = "[0]format=yuv420p[a];[1]format=yuv420p[b];[a][b]psnr"
    command = [get_ffmpeg_exe(), *clips, "-lavfi", chain, "-f", "null", "-"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    average = float(said.split("average:")[1].split()[0])
    assert video_psnr_yuv(video, reference) == pytest.approx(average, abs=0.3)


def test_equal_videos():
    video = np.random.default_rng(0).random((3, 48, 48, 3))
    assert math.isinf(video_psnr(video, video)) and math.isinf(video_psnr_yuv(video, video))
    assert video_ssim(video, video) == pytest.approx(1)
    assert visual_information(video, video) == pytest.approx(1)
    assert video_ssim(1 - video, video) < 0


def test_more_noise_is_worse_by_every_metric():
    random = np.random.default_rng(0)
    reference = random.random((2, 12, 12, 3)).repeat(4, 1).repeat(4, 2)
    noise = random.standard_normal(reference.shape)
    near, far = (measure(reference + scale * noise, reference) for scale in (0.01, 0.1))
    for name in ("psnr", "psnr_yuv", "ssim", "perceptual"):
        assert near[name] > far[name], name


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 8, 8, 3\) and \(3, 8, 8, 3\)"):
        video_psnr(np.zeros((2, 8, 8, 3)), np.zeros((3, 8, 8, 3)))


@pytest.fixture(scope="module")
def pipe():
    pipe = random_tiny_wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


class TestCompare:
    def test_density_one_is_dense_and_a_low_density_is_not(self, pipe):
        stock = {name: type(processor) for name, processor in pipe.transformer.attn_processors.items()}
        whole, half = (
            compare(pipe, "a red ball", SparseVideoConfig(density=density, warmup_steps=0), **SETTINGS)
            for density in (1.0, 0.5)
        )
        assert whole.medians["psnr"] > 80 and whole.medians["pair_density"] == 1
        assert half.medians["psnr"] < whole.medians["psnr"] and half.medians["pair_density"] < 0.6
        assert {name: type(p) for name, p in pipe.transformer.attn_processors.items()} == stock

    def test_a_pipeline_that_is_sparse_already_is_compared_with_its_dense_self(self, pipe):
        pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SparseVideoConfig(density=0.5, warmup_steps=0)))
        config = SparseVideoConfig(density=0.5, warmup_steps=0)
        assert not math.isinf(compare(pipe, "a red ball", config, **SETTINGS).medians["psnr"])

    def test_what_is_saved(self, pipe, tmp_path):
        config = SparseVideoConfig(density=0.5, warmup_steps=0)
        compare(pipe, ["a red ball", "a blue box"], config, seeds=(0, 1), **SETTINGS).save(tmp_path)
        facts = json.loads((tmp_path / "comparison.json").read_text())
        assert [(row["prompt"], row["seed"]) for row in facts["rows"]] == [
            (prompt, seed) for prompt in ("a red ball", "a blue box") for seed in (0, 1)
        ]
        assert len(facts["rows"][0]["psnr_by_frame"]) == SETTINGS["num_frames"]
        assert SparseVideoConfig(**facts["config"]) == config
        frames = imageio.mimread(tmp_path / "3.mp4", memtest=False)
        assert (len(frames), frames[0].shape) == (9, (48, 96, 3))
        assert imageio.imread(tmp_path / "frames.png").std() > 1

    def test_wrong_calls(self, pipe):
        for wrong in ({"prompts": []}, {"prompts": "a red ball", "seeds": ()}):
            with pytest.raises(ValueError, match="at least one prompt and one seed"):
                compare(pipe, **wrong, **SETTINGS)


def test_the_snippets_of_the_docs_run(pipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs/quality.md").read_text()
    names = {"pipe": pipe, "settings": SETTINGS}
    for snippet in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        # three latent frames: the first frame alone is a third of the pairs
        exec(snippet.replace("target_psnr", "lowest=0.36, target_psnr"), names)
    assert names["comparison"].rows[1].seed == 1 and (tmp_path / "outputs/comparison/1.mp4").exists()
    assert names["found"].trials
