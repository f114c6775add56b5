"""Whole stock pipelines with the processor: steps, experts, conditionings, compiles, memory."""

import math

import diffusers
import numpy as np
import pytest
import torch
from numerics import assert_close

import torch_svg
import torch_svg.patches
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig, bridge
from torch_svg.testing import random_tiny_wan_pipeline

SPARSE = SparseVideoConfig(density=0.5, warmup_steps=1, dense_layers=0)
# 3 x 6 x 10 tokens: a frame is not a multiple of a tile
SIZE = {"height": 48, "width": 80, "num_frames": 9}


def generate(pipe, steps=3, prompt="a red ball", **kwargs):
    settings = {**SIZE, "num_inference_steps": steps, "output_type": "latent", "guidance_scale": 3.0, **kwargs}
    return pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **settings).frames.cpu()


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def schedulers(shift):
    return {
        "UniPC": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
        "FlowMatchEuler": diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
    }


@pytest.mark.parametrize("name", ["UniPC", "FlowMatchEuler"])
def test_dense_warmup_is_counted_in_steps_whatever_the_shift(name):
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    for shift in (1.0, 3.0, 5.0, 12.0):
        pipe.scheduler = schedulers(shift)[name]
        for steps, warmup in ((1, 0.3), (4, 0.3), (4, 1), (50, 0.09)) if shift == 5.0 else ((4, 0.3),):
            expected = warmup if isinstance(warmup, int) else math.ceil(warmup * steps)
            processor = SparseVideoAttnProcessor(SPARSE.replace(warmup_steps=warmup, sampled_rows=4))
            pipe.transformer.set_attn_processor(processor)
            generate(pipe, steps)
            report = processor.report()
            assert report.dense_steps == list(range(expected)), (shift, steps, warmup)
            # both guidance branches of every step, dense in exactly those steps
            assert report.steps.tolist() == [step for step in range(steps) for _ in range(2)]
            dense = (report.kinds == 2).all(axis=(1, 2))
            assert dense.tolist() == [step < expected for step in report.steps]


def test_too_many_warmup_steps_fail_before_the_first_step():
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    expected = generate(pipe)
    pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE.replace(warmup_steps=4)))
    with pytest.raises(ValueError, match="warmup_steps=4, but the generation has 3 steps"):
        generate(pipe)
    assert torch.equal(generate(pipe), expected)


def test_two_experts_share_one_count_of_steps():
    pipe = quiet(random_tiny_wan_pipeline(variant="two_experts", layers=1))
    processor = torch_svg.enable(pipe, SPARSE.replace(warmup_steps=2))
    generate(pipe, steps=8)
    report = processor.report()
    # the second expert starts in the middle of the generation and must not warm up again
    assert report.dense_steps == [0, 1]
    assert report.steps.tolist() == [step for step in range(8) for _ in range(2)]
    assert pipe.transformer_2.blocks[0].attn1.processor is processor


def test_two_experts_may_have_configs_of_their_own():
    pipe = quiet(random_tiny_wan_pipeline(variant="two_experts", layers=1))
    high, low = (SparseVideoAttnProcessor(SPARSE.replace(density=density)) for density in (0.9, 0.5))
    pipe.transformer.set_attn_processor(high)
    pipe.transformer_2.set_attn_processor(low)
    generate(pipe, steps=8)
    assert high.report().sparse_pair_density > 0.8 > 0.5 >= low.report().sparse_pair_density
    assert low.report().dense_steps == []


def test_a_pipeline_without_its_second_expert():
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    assert pipe.transformer_2 is None
    torch_svg.enable(pipe, SPARSE)
    generate(pipe)


@pytest.mark.parametrize("variant", ["t2v", "two_experts", "ti2v", "i2v"])
def test_every_conditioning_at_density_one_equals_the_default(variant):
    pipe = quiet(random_tiny_wan_pipeline(variant=variant, layers=1))
    kwargs = {}
    if variant == "i2v":
        from PIL import Image

        kwargs["image"] = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 80, 3), dtype=np.uint8))
    expected = generate(pipe, **kwargs)
    processor = torch_svg.enable(pipe, SPARSE.replace(density=1.0))
    assert_close("latents", generate(pipe, **kwargs), expected, 1e-4)
    report = processor.report()
    assert report.grid == (3, 6, 10) and report.dense_steps == [0]
    torch_svg.enable(pipe, SPARSE)
    assert not torch.equal(generate(pipe, **kwargs), expected)


def test_the_grid_follows_the_latents_of_every_call():
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    processor = torch_svg.enable(pipe, SPARSE.replace(sink="none"))
    generate(pipe, num_frames=10)
    assert processor.report().grid == (3, 6, 10)
    generate(pipe, num_frames=5)
    assert processor.report().grid == (2, 6, 10)
    generate(pipe, num_frames=1)
    assert processor.report().grid == (1, 6, 10)


def test_the_same_seed_gives_the_same_latents_and_a_failed_generation_leaves_no_trace():
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    processor = torch_svg.enable(pipe, SPARSE)
    expected = generate(pipe, steps=4)

    def stop(pipe, step, timestep, kwargs):
        if step == 2:
            raise KeyboardInterrupt
        return kwargs

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, steps=4, callback_on_step_end=stop)
    assert torch.equal(generate(pipe, steps=4), expected)
    assert processor.report().steps.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_guidance_a_step_has_one_forward():
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    processor = torch_svg.enable(pipe, SPARSE)
    generate(pipe, guidance_scale=1.0)
    assert processor.report().steps.tolist() == [0, 1, 2]


def test_a_loop_of_ones_own_counts_timesteps_and_resets():
    transformer = random_tiny_wan_pipeline(layers=1).transformer
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    hidden_states, text = torch.randn(1, 4, 3, 10, 14), torch.randn(1, 5, 32)
    for _generation in range(2):
        for t in (900, 500, 100):
            timestep = torch.tensor([t])
            for _branch in range(2):
                with torch.no_grad():
                    transformer(hidden_states, timestep, text)
        report = processor.report()
        assert report.steps.tolist() == [0, 0, 1, 1, 2, 2] and report.dense_steps == [0]
        processor.reset()


def test_the_report_names_the_implementation_and_saves(tmp_path):
    pipe = quiet(random_tiny_wan_pipeline(layers=2))
    processor = torch_svg.enable(pipe, SPARSE)
    generate(pipe)
    report = processor.report()
    assert report.implementation == "reference"
    assert report.kinds.shape == (6, 2, 2) and sum(report.head_kinds.values()) == report.kinds.size
    assert 0.4 < report.sparse_pair_density <= 0.5 < report.pair_density < 1
    assert report.tile_density >= report.pair_density
    assert np.isfinite(report.probe_errors).all()
    report.save(tmp_path)
    assert (tmp_path / "report.json").stat().st_size > 500 and (tmp_path / "routing.png").stat().st_size > 2000


@pytest.mark.parametrize("name", ["UniPC", "FlowMatchEuler"])
def test_sparse_adds_no_compile_and_a_second_generation_compiles_nothing(name, xla_device):
    def compiles(pipe):
        before = bridge.metrics().compiles
        generate(pipe, steps=4)
        return bridge.metrics().compiles - before

    counts = {}
    for kind in ("default", "sparse"):
        pipe = quiet(random_tiny_wan_pipeline(layers=1))
        pipe.scheduler = schedulers(3.0)[name]
        pipe.to(xla_device)
        if kind == "sparse":
            pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
        counts[kind] = compiles(pipe), compiles(pipe)
    assert counts["sparse"][0] <= counts["default"][0]
    assert counts["sparse"][1] == counts["default"][1] == 0


def test_the_kernel_is_traced_once_for_all_layers_and_steps(xla_device, monkeypatch):
    pipe = quiet(random_tiny_wan_pipeline(layers=3))
    pipe.to(xla_device)
    pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    bridge.clear()
    lowered = []
    lower = bridge.lower
    monkeypatch.setattr(bridge, "lower", lambda function, *a, **k: lowered.append(function) or lower(function, *a, **k))
    generate(pipe, steps=3)
    # one for sparse self-attention, one for cross-attention
    assert len(lowered) == 2


def test_no_tokens_by_tokens_tensor_in_the_graph(xla_device):
    import torch_xla

    transformer = random_tiny_wan_pipeline(layers=1).transformer.to(xla_device)
    hidden_states = torch.randn(1, 4, 3, 22, 26).to(xla_device)
    text = torch.randn(1, 5, 32).to(xla_device)
    tokens = 3 * 11 * 13
    for processor, expected in ((None, True), (SparseVideoAttnProcessor(SPARSE), False)):
        if processor is not None:
            transformer.set_attn_processor(processor)
        with torch.no_grad():
            out = transformer(hidden_states, torch.tensor([500], device=xla_device), text, return_dict=False)[0]
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([out])
        assert (f"{tokens},{tokens}]" in hlo) == expected


def test_the_interpreted_pallas_kernel_equals_the_xla_implementation_in_a_pipeline(xla_device):
    latents = {}
    for implementation in ("xla", "pallas_interpret"):
        pipe = quiet(random_tiny_wan_pipeline(layers=1))
        pipe.to(xla_device)
        processor = SparseVideoAttnProcessor(SPARSE.replace(implementation=implementation))
        pipe.transformer.set_attn_processor(processor)
        latents[implementation] = generate(pipe, steps=2)
        assert processor.report().implementation == implementation
    assert_close("latents", latents["pallas_interpret"], latents["xla"], 1e-4)


def test_tile_density_is_that_of_the_tables_that_ran(xla_device):
    from torch_svg.kernels.tuning import small_blocks_for
    from torch_svg.worktable import tile_density

    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    pipe.to(xla_device)
    processor = torch_svg.enable(pipe, SPARSE.replace(warmup_steps=0))
    generate(pipe, steps=1)
    report, plan = processor.report(), processor.record.plan
    counts = list(report.head_kinds.values())
    tiles = [tile_density(plan, small_blocks_for(plan.grid), kind) for kind in range(3)]
    assert report.tile_density == pytest.approx(np.dot(counts, tiles) / sum(counts))


def test_prompt_to_frames_on_the_xla_device(xla_device):
    pipe = quiet(random_tiny_wan_pipeline(layers=1))
    expected = pipe("a red ball", **SIZE, num_inference_steps=2, generator=torch.Generator().manual_seed(0)).frames
    pipe.to(xla_device)
    try:
        torch_svg.patches.apply(pipe)
        pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE.replace(density=1.0)))
        frames = pipe("a red ball", **SIZE, num_inference_steps=2, generator=torch.Generator().manual_seed(0)).frames
    finally:
        torch_svg.patches.revert()
    assert np.abs(frames - expected).max() < 1e-3
