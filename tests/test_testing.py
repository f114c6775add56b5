"""The small pipelines: stock classes, whole from prompt to frames."""

import diffusers
import numpy as np
import pytest
import torch

from torch_svg import testing

CALL = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "output_type": "np"}


def frames_of(pipe, **kwargs):
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red ball moves left", "generator": torch.Generator().manual_seed(0), **CALL, **kwargs}
    return pipe(**call).frames[0]


@pytest.mark.parametrize("variant", testing.VARIANTS)
def test_random_pipeline_makes_frames(variant):
    pipe = testing.random_tiny_wan_pipeline(variant=variant)
    image = {}
    if variant == "i2v":
        from PIL import Image

        image["image"] = Image.fromarray(np.full((32, 48, 3), 128, np.uint8))
    frames = frames_of(pipe, **image)
    assert frames.shape == (9, 32, 48, 3), f"frames of {variant}: {frames.shape}"
    assert np.isfinite(frames).all() and frames.std() > 0


def test_random_pipeline_depends_on_seed_and_prompt_only():
    first = frames_of(testing.random_tiny_wan_pipeline(seed=1))
    again = frames_of(testing.random_tiny_wan_pipeline(seed=1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, frames_of(testing.random_tiny_wan_pipeline(seed=2)))
    assert not np.array_equal(first, frames_of(testing.random_tiny_wan_pipeline(seed=1), prompt="the blue box"))


def test_random_pipeline_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    testing.random_tiny_wan_pipeline()
    assert torch.equal(torch.rand(3), expected)


def test_random_pipeline_round_trips_through_a_folder(tmp_path):
    pipe = testing.random_tiny_wan_pipeline()
    pipe.save_pretrained(tmp_path)
    assert np.array_equal(frames_of(pipe), frames_of(diffusers.WanPipeline.from_pretrained(tmp_path)))


def test_unknown_variant_is_named():
    with pytest.raises(ValueError, match="flf2v"):
        testing.random_tiny_wan_pipeline(variant="flf2v")


def test_word_tokenizer_ends_and_pads_like_t5():
    tokenizer = testing.word_tokenizer(("red", "ball"))
    out = tokenizer(["Red ball", "ball zebra", ""], padding="max_length", max_length=5, truncation=True)
    assert out.input_ids == [[3, 4, 1, 0, 0], [4, 2, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert out.attention_mask == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_missing_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(testing, "files", lambda package: tmp_path)
    with pytest.raises(FileNotFoundError, match="train_tiny_wan"):
        testing.tiny_wan_pipeline()


def test_trained_pipeline_loads_plain():
    pipe = diffusers.WanPipeline.from_pretrained(testing.tiny_wan_folder())
    assert type(pipe.transformer) is diffusers.WanTransformer3DModel
    assert type(pipe.vae) is diffusers.AutoencoderKLWan
    size = sum(file.stat().st_size for file in testing.tiny_wan_folder().rglob("*") if file.is_file())
    assert size < 20e6, f"the folder holds {size / 1e6:.1f} MB"
