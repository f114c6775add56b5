"""The command that trains the shipped pipeline, in miniature: whole, resumable, and with data that is what it says."""

import functools
import json

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from tools import train_tiny_wan
from tools.real_clips import REAL_CAPTION, real_clip_of_seed
from tools.tiny_scenes import SCENES, clip_of_seed
from tools.tiny_transformer import Phase
from tools.tiny_vae import Crops, train_vae


@pytest.fixture
def miniature(monkeypatch):
    phases = (Crops(1, 1, 32, 1), Crops(1, 1, 32, 5, encoder=False, real=1.0))
    monkeypatch.setattr(train_tiny_wan, "train_vae", functools.partial(train_vae, phases=phases))
    monkeypatch.setattr(train_tiny_wan, "CLIPS", {"drawn": {64: 4}, "real": {64: 4}})
    monkeypatch.setattr(train_tiny_wan, "PHASES", (Phase(size=64, steps=2, batch=2, shift=1.5),))
    monkeypatch.setattr(train_tiny_wan, "HELD_OUT_SEEDS", range(1))
    return monkeypatch


def test_one_command_trains_resumes_and_writes_a_pipeline(miniature, tmp_path):
    arguments = ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--threads", "1"]
    train_tiny_wan.main(arguments)
    pipe = WanPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    first = pipe.transformer.proj_out.weight.clone()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Blender" in card and "{" not in card.split("```")[0]
    # more steps go on from the checkpoint; nothing done is done again
    miniature.setattr(train_tiny_wan, "PHASES", (Phase(size=64, steps=3, batch=2, shift=1.5),))
    train_tiny_wan.main(arguments)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "transformer.log").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "vae.log").read_text().splitlines()] == [1, 2]
    again = WanPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    assert not torch.equal(first, again.transformer.proj_out.weight)


def test_clips_follow_from_their_seed():
    caption, clip = clip_of_seed(5, 32)
    assert caption in {scene.caption for scene in SCENES} and clip.shape == (3, 33, 32, 32)
    assert torch.equal(clip, clip_of_seed(5, 32)[1]) and not torch.equal(clip, clip_of_seed(6, 32)[1])
    assert -1 <= clip.min() < clip.max() <= 1


def test_real_clips_are_crops_of_the_film():
    caption, clip = real_clip_of_seed(3, 64)
    assert caption == REAL_CAPTION and clip.shape == (3, 33, 64, 64)
    assert torch.equal(clip, real_clip_of_seed(3, 64)[1])
    # something moves, and it is no noise: neighbouring frames are alike
    steps = np.abs(np.diff(clip.numpy(), axis=1)).mean()
    assert 0 < steps < 0.1, f"mean change between frames {steps:.3f}"


def test_every_word_of_every_caption_is_known():
    tokenizer = train_tiny_wan.scene_tokenizer()
    for caption in (*(scene.caption for scene in SCENES), REAL_CAPTION):
        assert tokenizer.unk_token_id not in tokenizer(caption).input_ids, caption
