"""Whole pipelines of stock diffusers with tiny random weights: step, grid and text come from the pipeline itself."""

import diffusers
import pytest
import torch
from family_cases import SPARSE, TEXT, cogvideox, hunyuan_video, ltx, random
from numerics import assert_close

import torch_svg
from torch_svg.families import FAMILIES
from torch_svg.testing import random_tiny_wan_pipeline

SMALL = {"height": 48, "width": 80, "num_frames": 9}
NO_ENCODERS = {"text_encoder": None, "tokenizer": None}


def masked_prompt():
    mask = torch.arange(TEXT)[None] < 7
    return {"prompt_embeds": random(1, TEXT, 16), "prompt_attention_mask": mask}


def wan():
    return random_tiny_wan_pipeline(), {"prompt": "a red ball", **SMALL}


def wan_image():
    return random_tiny_wan_pipeline(variant="i2v"), {
        "prompt": "a red ball", "image": random(1, 3, 48, 80).clamp(0, 1), **SMALL
    }  # fmt: skip


def hunyuan():
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    pipe = diffusers.HunyuanVideoPipeline(
        **NO_ENCODERS, text_encoder_2=None, tokenizer_2=None, transformer=hunyuan_video(), vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip
    return pipe, {**masked_prompt(), "pooled_prompt_embeds": random(1, 8), **SMALL}


def cogvideo():
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2,
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
    )  # fmt: skip
    pipe = diffusers.CogVideoXPipeline(
        **NO_ENCODERS, transformer=cogvideox(), vae=vae,
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
    )  # fmt: skip
    # both guidance branches in one batch
    prompts = {"prompt_embeds": random(1, TEXT, 16), "negative_prompt_embeds": random(1, TEXT, 16, seed=1)}
    return pipe, {**prompts, "guidance_scale": 6.0, "max_sequence_length": TEXT, **SMALL}


def ltx_parts():
    blocks = {
        "block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5, "spatio_temporal_scaling": (True, True, True, False),
        "decoder_spatio_temporal_scaling": (True, True, True, False), "decoder_inject_noise": (False,) * 5,
        "upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4,
    }
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=4, timestep_conditioning=False, patch_size=4, patch_size_t=1,
        encoder_causal=True, decoder_causal=False, **blocks,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return {"scheduler": scheduler, "vae": vae, "text_encoder": None, "tokenizer": None, "transformer": ltx()}


def ltx_text():
    prompts = {
        **masked_prompt(), "negative_prompt_embeds": random(1, TEXT, 16, seed=1),
        "negative_prompt_attention_mask": torch.arange(TEXT)[None] < 4,
    }  # fmt: skip
    return diffusers.LTXPipeline(**ltx_parts()), {
        **prompts, "guidance_scale": 3.0, "height": 96, "width": 160, "num_frames": 17
    }  # fmt: skip


def ltx_condition():
    return diffusers.LTXConditionPipeline(**ltx_parts()), {
        "image": [random(1, 3, 96, 160).clamp(0, 1)], "frame_index": [0], **masked_prompt(), "guidance_scale": 1.0,
        "height": 96, "width": 160, "num_frames": 17,
    }  # fmt: skip


# class of the pipeline: (what makes it and its arguments, the grid of its video)
PIPELINES = {
    "WanPipeline": (wan, (3, 6, 10)),
    "WanImageToVideoPipeline": (wan_image, (3, 6, 10)),
    "HunyuanVideoPipeline": (hunyuan, (3, 3, 5)),
    "CogVideoXPipeline": (cogvideo, (3, 3, 5)),
    "LTXPipeline": (ltx_text, (3, 3, 5)),
    "LTXConditionPipeline": (ltx_condition, (3, 3, 5)),
}


def test_the_registry_names_the_pipelines_that_are_tested_here():
    named = {name for family in FAMILIES for facts in family.transformers.values() for name in facts.pipelines}
    assert named == set(PIPELINES)


def make(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe, arguments = build()
    pipe.set_progress_bar_config(disable=True)

    def latents(**more):
        generator = torch.Generator().manual_seed(0)
        return pipe(
            **{**arguments, **more}, num_inference_steps=3, generator=generator, output_type="latent"
        ).frames  # fmt: skip

    return pipe, latents


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_dense_as_before_and_sparse_by_its_own_steps(name):
    build, grid = PIPELINES[name]
    pipe, latents = make(build)
    assert type(pipe).__name__ == name
    expected = latents()
    with torch_svg.sparse_attention(pipe, SPARSE.replace(density=1.0)) as processor:
        assert_close("latents", latents(), expected, 1e-5)
    assert processor.report().grid == grid
    with torch_svg.sparse_attention(pipe, SPARSE.replace(warmup_steps=1)) as processor:
        sparse = latents()
    report = processor.report()
    assert torch.isfinite(sparse).all() and not torch.equal(sparse, expected)
    assert report.dense_steps == [0] and sorted(set(report.steps.tolist())) == [0, 1, 2]
    assert report.sparse_pair_density <= 0.4
    assert torch.equal(latents(), expected)


@pytest.mark.parametrize(("frame_index", "conditions"), [(0, 0), (8, 15)])
def test_ltx_conditions_stand_before_the_grid_that_the_pipeline_knows(frame_index, conditions):
    pipe, latents = make(ltx_condition)
    expected = latents(frame_index=[frame_index])
    with torch_svg.sparse_attention(pipe, SPARSE.replace(density=1.0)) as processor:
        assert_close("latents", latents(frame_index=[frame_index]), expected, 1e-5)
    grid = processor.record.plan.grid
    assert (grid.frames, grid.height, grid.width) == (3, 3, 5)
    assert grid.text_tokens == conditions and grid.text_first == (conditions > 0)
    with torch_svg.sparse_attention(pipe, SPARSE):
        assert not torch.equal(latents(frame_index=[frame_index]), expected)
