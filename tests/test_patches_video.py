"""Patches of autoencoders, prompts and schedulers: each test does both, without the patch and with it."""

import diffusers
import pytest
import torch
from family_cases import animate, animate_inputs, mochi, mochi_inputs, run
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_svg import bridge, patches
from torch_svg.patches import cosmos_padding, tile_blending
from torch_svg.testing import random_tiny_wan_pipeline

torch_xla = pytest.importorskip("torch_xla")
metrics = pytest.importorskip("torch_xla.debug.metrics")


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    patches.revert()


def relative_rms(actual, expected):
    return ((actual.cpu().float() - expected.float()).norm() / expected.float().norm()).item()


# cosmos_padding


@pytest.mark.parametrize("kernel", [(1, 3, 3), (3, 3, 3)])
def test_cosmos_convolutions_run_with_and_without_padding_in_time(xla_device, kernel):
    from diffusers.models.autoencoders.autoencoder_kl_cosmos import CosmosCausalConv3d

    convolution = CosmosCausalConv3d(2, 3, kernel_size=kernel)
    x = torch.randn(1, 2, 4, 5, 6)
    with torch.no_grad():
        expected = convolution(x)
        convolution.to(xla_device)
        if kernel[0] == 1:
            with pytest.raises(RuntimeError, match="Concatenate expects at least one argument"):
                convolution(x.to(xla_device))
        patches.apply(names=["cosmos_padding"])
        assert relative_rms(convolution(x.to(xla_device)), expected) < 1e-5


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 2), min_size=2, max_size=4), packed=st.booleans())
def test_repeating_equals_torch(counts, packed):
    x = torch.arange(6).reshape(2, 3)
    arguments = (tuple(counts),) if packed else counts
    assert torch.equal(cosmos_padding._repeat(x, *arguments), x.repeat(*arguments))


# tile_blending


def operations(tensor):
    return torch_xla._XLAC._get_xla_tensors_text([tensor]).count("\n")


@pytest.mark.parametrize(("module", "path"), tile_blending.PATCH.targets, ids=lambda name: name)
def test_tiles_are_blended_at_once(xla_device, module, path):
    owner, name = path.split(".")
    a, b = torch.randn(2, 1, 2, 9, 9, 10).unbind()
    expected = b.clone()
    getattr(getattr(diffusers, owner), name)(None, a, expected, 8)
    counts = []
    for names in ([], ["tile_blending"]):
        patches.apply(names=names)
        tile = b.to(xla_device)
        blended = getattr(getattr(diffusers, owner), name)(None, a.to(xla_device), tile, 8)
        counts.append(operations(tile))
        assert relative_rms(blended, expected) < 1e-6 and relative_rms(tile, expected) < 1e-6, "in place too"
    assert counts[0] > 8 * 5 > counts[1], f"operations without and with the patch: {counts}"


def test_blending_no_overlap_changes_nothing(xla_device):
    patches.apply(names=["tile_blending"])
    a, b = torch.randn(2, 1, 2, 3, 4, 5).unbind()
    for extent in (0, 99):
        expected = diffusers.AutoencoderKLWan.blend_h(None, a, b.clone(), extent)
        blended = diffusers.AutoencoderKLWan.blend_h(None, a.to(xla_device), b.to(xla_device), extent)
        assert relative_rms(blended, expected) < 1e-6


# vae_graphs


def largest_graph():
    return max(size for _, size in metrics.metric_data("TensorsGraphSize")[2])


def test_the_graphs_of_a_decoder_do_not_grow_with_the_clip(xla_device):
    vae = random_tiny_wan_pipeline().vae
    clips = [torch.randn(1, 4, frames, 2, 3) for frames in (4, 6)]
    sizes = {}
    with torch.no_grad():
        expected = [vae.decode(latents).sample for latents in clips]
        vae.to(xla_device)
        torch_xla.sync()
        for names in (["wan_vae_slices", "nearest_upsampling"], ["vae_graphs"]):
            patches.apply(names=names)
            for latents, want in zip(clips, expected, strict=True):
                metrics.clear_all()
                assert relative_rms(vae.decode(latents.to(xla_device)).sample, want) < 1e-5, f"video, with {names}"
                sizes[names[0], latents.shape[2]] = largest_graph()
    assert sizes["wan_vae_slices", 6] > 1.3 * sizes["wan_vae_slices", 4], f"upstream's graphs: {sizes}"
    assert sizes["vae_graphs", 6] == sizes["vae_graphs", 4] < sizes["wan_vae_slices", 4] / 2, f"graphs: {sizes}"


# wan_prompt_lengths


def test_prompts_of_other_lengths_compile_nothing(xla_device):
    pipe = random_tiny_wan_pipeline(layers=1)
    prompts = ["a ball", "the red box moves left over sand", "a blue box moves up in the sky at night"]
    with torch.no_grad():
        expected = [pipe.encode_prompt(prompt, do_classifier_free_guidance=False)[0] for prompt in prompts]
        pipe.to(xla_device)
        compiled = []
        for names in ([], ["wan_prompt_lengths"]):
            patches.apply(names=names)
            for prompt, want in zip(prompts, expected, strict=True):
                before = bridge.metrics().compiles
                embeds = pipe.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
                torch_xla.sync(wait=True)
                compiled.append(bridge.metrics().compiles - before)
                assert embeds.shape == want.shape and relative_rms(embeds, want) < 1e-5, prompt
    assert compiled[1] > 0 and compiled[2] > 0, f"graphs by prompt, upstream: {compiled[:3]}"
    assert compiled[4:] == [0, 0], f"graphs by prompt, patched: {compiled[3:]}"


# transformers


def forwards(model, inputs, names):
    """Two forwards on the device: the second output, and what of it met the host."""
    patches.apply(names=[*names, "timesteps_to_device"])
    for _ in range(2):
        before = bridge.metrics()
        output = run(model, inputs, "xla")
        after = bridge.metrics()
    fallbacks = {name: count - before.fallbacks.get(name, 0) for name, count in after.fallbacks.items()}
    return output, after.host_reads - before.host_reads, {name for name, count in fallbacks.items() if count}


@pytest.mark.parametrize(
    ("name", "model", "inputs"),
    [("mochi_text_length", mochi, mochi_inputs), ("animate_basis", animate, animate_inputs)],
)
def test_a_forward_waits_for_nothing(xla_device, name, model, inputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer, arguments = model().eval(), inputs()
    expected = run(transformer, arguments)
    output, upstream_reads, _ = forwards(transformer, arguments, [])
    assert relative_rms(output, expected) < 1e-4, "output, upstream"
    output, reads, fallbacks = forwards(transformer, arguments, [name])
    assert relative_rms(output, expected) < 1e-4, "output, patched"
    # the output itself is read
    assert upstream_reads > 1 == reads and not fallbacks, f"{upstream_reads=}, {reads=}, {fallbacks=}"


def test_a_changed_weight_has_another_basis(xla_device):
    transformer, arguments = animate().eval(), animate_inputs()
    patches.apply(names=["animate_basis", "timesteps_to_device"])
    run(transformer, arguments, "xla")
    with torch.no_grad():
        transformer.motion_encoder.motion_synthesis_weight.mul_(-0.5).add_(0.1)
    assert relative_rms(run(transformer, arguments, "xla"), run(transformer, arguments)) < 1e-4


# host_timesteps


SCHEDULERS = {
    "EDMEuler": lambda: diffusers.EDMEulerScheduler(final_sigmas_type="sigma_min"),
    "EulerDiscrete": diffusers.EulerDiscreteScheduler,
    "EulerAncestral": diffusers.EulerAncestralDiscreteScheduler,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_find_their_step_without_asking_the_device(xla_device, name):
    def last_sample(device):
        scheduler = SCHEDULERS[name]()
        scheduler.set_timesteps(5, device=device)
        generator = torch.Generator().manual_seed(1)
        sample = torch.randn(1, 2, 2, 3, 3, generator=generator).to(device)
        torch_xla.sync(wait=True)
        before = bridge.metrics().host_reads
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(sample, timestep)
            sample = scheduler.step(torch.tanh(scaled), timestep, sample, generator=generator).prev_sample
            torch_xla.sync(wait=True)
        return sample, bridge.metrics().host_reads - before

    expected, _ = last_sample(torch.device("cpu"))
    sample, upstream = last_sample(xla_device)
    assert relative_rms(sample, expected) < 1e-4, "sample, upstream"
    patches.apply(names=["host_timesteps"])
    sample, patched = last_sample(xla_device)
    assert upstream > 0 and patched == 0, f"reads of the device without and with the patch: {upstream}, {patched}"
    assert relative_rms(sample, expected) < 1e-4, "sample"
