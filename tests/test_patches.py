import copy
import importlib.metadata
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_svg import patches
from torch_svg.patches import nearest_upsampling, unipc_solve, wan_vae_slices
from torch_svg.testing import random_tiny_wan_pipeline

diffusers = pytest.importorskip("diffusers")
torch_xla = pytest.importorskip("torch_xla")
metrics = pytest.importorskip("torch_xla.debug.metrics")


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    patches.revert()


def relative_rms(actual, expected):
    return ((actual.cpu().float() - expected.float()).norm() / expected.float().norm()).item()


def count_of(prefix):
    """How often torch_xla ran operations on the host since the counters were cleared."""
    return sum(metrics.counter_value(name) for name in metrics.counter_names() if name.startswith(prefix))


def compiles():
    torch_xla.sync(wait=True)
    return metrics.counter_value("UncachedCompile") or 0


def names_applied():
    return [patch.name for patch in patches.list_patches() if patch.applied]


# applying and reverting


def test_nothing_is_patched_at_import():
    assert names_applied() == []


def test_apply_and_revert_restore_upstream_exactly():
    owners = [(owner, attribute) for patch in patches.list_patches() for owner, attribute in patch._owners()]
    before = [owner.__dict__[attribute] for owner, attribute in owners]
    applied = patches.apply()
    assert applied == [patch.name for patch in patches.list_patches()] and applied == patches.apply()
    changed = [owner.__dict__[attribute] for owner, attribute in owners]
    assert all(now is not old for now, old in zip(changed, before, strict=True))
    patches.revert()
    patches.revert()
    assert [owner.__dict__[attribute] for owner, attribute in owners] == before


@pytest.mark.parametrize("first", ["timesteps_to_device", "transformer_graphs"])
def test_patches_of_one_method_can_be_reverted_in_any_order(first):
    forward = diffusers.WanTransformer3DModel.forward
    both = {"timesteps_to_device", "transformer_graphs"}
    patches.apply(names=sorted(both))
    patches.revert([first])
    assert names_applied() == list(both - {first})
    assert diffusers.WanTransformer3DModel.forward.__wrapped__ is forward, "just one wrapper is left"
    patches.revert()
    assert diffusers.WanTransformer3DModel.forward is forward


def test_every_target_is_found_in_the_newest_served_diffusers():
    if importlib.metadata.version("diffusers") != "0.42.1":
        pytest.skip("older versions lack some classes")
    for patch in patches.list_patches():
        assert len(list(patch._owners())) == len(patch.targets), patch.name


def test_apply_takes_what_the_pipeline_needs():
    pipe = random_tiny_wan_pipeline()
    others = {
        *("animate_basis", "cosmos_padding", "framepack_text_length", "hunyuan15_text_order", "mochi_text_length"),
    }
    assert set(patches.apply(pipe)) == {patch.name for patch in patches.list_patches()} - others
    patches.revert()
    pipe.scheduler = diffusers.DDIMScheduler()
    pipe.vae = None
    assert patches.apply(pipe) == ["wan_prompt_lengths", "timesteps_to_device", "transformer_graphs"]


def test_a_patch_brings_what_it_needs():
    assert patches.apply(names=["host_timesteps"]) == ["host_timesteps", "timesteps_to_device"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"unknown patches \['vae'\], expected some of \['wan_vae_slices'"):
        patches.apply(names=["vae"])


def test_an_untested_upstream_version_is_refused_and_nothing_is_applied(monkeypatch):
    strange = replace(unipc_solve.PATCH, versions={"diffusers": ">=0.43"})
    monkeypatch.setitem(patches._PATCHES, "unipc_solve", strange)
    found = importlib.metadata.version("diffusers")
    with pytest.raises(NotImplementedError, match=rf"unipc_solve was tested with diffusers >=0\.43, found {found}"):
        patches.apply()
    assert names_applied() == []


def test_every_patch_tells_what_where_and_until_when():
    for patch in patches.list_patches():
        assert patch.upstream.startswith("https://github.com/")
        assert patch.what and patch.delete_when and patch.versions and patch.targets


# wan_vae_slices


def test_wan_vae_decodes_and_encodes_on_xla(xla_device):
    vae = random_tiny_wan_pipeline().vae
    latents, video = torch.randn(1, 4, 2, 3, 4), torch.randn(1, 3, 5, 12, 16)
    with torch.no_grad():
        expected = vae.decode(latents).sample, vae.encode(video).latent_dist.mean
        vae.to(xla_device)
        with pytest.raises(RuntimeError, match="Value out of range"):
            vae.decode(latents.to(xla_device))
        patches.apply(names=["wan_vae_slices"])
        decoded = vae.decode(latents.to(xla_device)).sample
        encoded = vae.encode(video.to(xla_device)).latent_dist.mean
    assert relative_rms(decoded, expected[0]) < 1e-5, "decoded video"
    assert relative_rms(encoded, expected[1]) < 1e-5, "encoded latents"


bounds = st.one_of(st.none(), st.integers(-6, 6))
entries = st.one_of(st.none(), st.integers(-2, 1), st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2])))


@settings(max_examples=60, deadline=None)
@given(index=st.one_of(entries, st.lists(entries, max_size=5).map(tuple)))
def test_clamped_slices_equal_torch(index):
    x = torch.arange(24).reshape(2, 3, 4)
    indexed = sum(entry is not None for entry in (index if isinstance(index, tuple) else (index,)))
    if indexed > x.dim():
        return
    expected = x[index]
    assert torch.equal(wan_vae_slices._clamped(x.to("xla"), index).cpu(), expected)


def test_other_kinds_of_index_pass_untouched():
    x = torch.arange(24).reshape(2, 3, 4)
    for index in (..., (..., slice(1, None)), torch.tensor([1, 0]), (slice(None), torch.tensor([2, 0])), x > 7):
        assert torch.equal(wan_vae_slices._clamped(x, index), x[index])


# nearest_upsampling


def test_wan_vae_decodes_without_going_through_the_host(xla_device):
    vae = random_tiny_wan_pipeline().vae
    latents = torch.randn(1, 4, 2, 3, 4)
    on_host = {}
    with torch.no_grad():
        expected = vae.decode(latents).sample
        vae.to(xla_device)
        for names in (["wan_vae_slices"], ["wan_vae_slices", "nearest_upsampling"]):
            patches.apply(names=names)
            metrics.clear_counters()
            decoded = vae.decode(latents.to(xla_device)).sample
            on_host[len(names)] = count_of("aten::_upsample_nearest")
            assert relative_rms(decoded, expected) < 1e-5, f"video decoded with {names}"
    assert on_host[1] > 0 and on_host[2] == 0


@pytest.mark.parametrize(
    ("shape", "arguments", "host_calls"),
    [
        ((1, 2, 3, 4), {"scale_factor": (2.0, 3.0), "mode": "nearest-exact"}, 0),
        ((1, 2, 3, 4), {"scale_factor": 2, "mode": "nearest"}, 0),
        ((1, 2, 2, 3, 4), {"scale_factor": (1, 2, 2), "mode": "nearest"}, 0),
        ((1, 2, 2, 3, 4), {"size": (4, 9, 4)}, 0),
        ((1, 2, 2, 3, 4), {"size": (3, 6, 8)}, 1),
        ((1, 2, 3, 4), {"scale_factor": 2.5, "mode": "nearest-exact"}, 1),
    ],
)
def test_upsampling_by_whole_factors_stays_on_the_device(xla_device, shape, arguments, host_calls):
    x = torch.randn(shape)
    metrics.clear_counters()
    actual = nearest_upsampling._upsample(x.to(xla_device), **arguments)
    assert torch.equal(actual.cpu(), F.interpolate(x, **arguments))
    assert count_of("aten::") - count_of("aten::_local_scalar") == host_calls


def decoder_blocks():
    """The modules of other families that upsample, each with inputs for it."""
    from diffusers.models.autoencoders import autoencoder_kl_cogvideox as cogvideox
    from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan_video
    from diffusers.models.autoencoders import autoencoder_kl_magvit as magvit
    from diffusers.models.upsampling import CogVideoXUpsample3D

    features = torch.randn(1, 4, 3, 4, 6)
    return {
        "hunyuan_video": (hunyuan_video.HunyuanVideoUpsampleCausal3D(4), features),
        "cogvideox": (CogVideoXUpsample3D(4, 4, compress_time=True), features),
        "cogvideox_frames": (CogVideoXUpsample3D(4, 4), features),
        "cogvideox_norm": (cogvideox.CogVideoXSpatialNorm3D(4, 2, groups=2), features, torch.randn(1, 2, 2, 2, 3)),
        "easyanimate": (magvit.EasyAnimateUpsampler3D(4, 4), features),
    }


@pytest.mark.parametrize("family", ["hunyuan_video", "cogvideox", "cogvideox_frames", "cogvideox_norm", "easyanimate"])
def test_the_blocks_of_other_decoders_stay_on_the_device(xla_device, family):
    block, *inputs = decoder_blocks()[family]
    # a copy, since some blocks keep features of their last call
    moved, on_device = copy.deepcopy(block).to(xla_device), [tensor.to(xla_device) for tensor in inputs]
    with torch.no_grad():
        expected = block(*inputs)
        patches.apply(names=["nearest_upsampling"])
        metrics.clear_counters()
        actual = moved(*on_device)
        torch_xla.sync()
        assert count_of("aten::") == 0
    if family == "cogvideox_norm":
        actual, expected = actual[0], expected[0]
    assert relative_rms(actual, expected) < 1e-5, family


# schedulers


def steps_of(scheduler, device):
    """A generation without a model: the last sample, and how many graphs each step compiled."""
    scheduler.set_timesteps(6, device=device)
    scheduler.set_begin_index(0)
    numbers = torch.Generator().manual_seed(1)
    sample = torch.randn(1, 2, 2, 3, 3, generator=numbers).to(device)
    compiled = []
    for timestep in scheduler.timesteps:
        noise = torch.randn(1, 2, 2, 3, 3, generator=numbers).to(device)
        before = compiles()
        sample = scheduler.step(torch.tanh(sample) + noise, timestep, sample, return_dict=False)[0]
        compiled.append(compiles() - before)
    return sample, compiled


def euler():
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def unipc(order=2):
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=order
    )


def test_euler_steps_stop_recompiling(xla_device):
    expected, _ = steps_of(euler(), torch.device("cpu"))
    _, stock = steps_of(euler(), xla_device)
    assert min(stock) > 0, f"upstream compiles at every step no more ({stock}): delete host_timesteps"
    patches.apply(names=["host_timesteps"])
    sample, patched = steps_of(euler(), xla_device)
    assert patched[1:] == [0] * 5, f"graphs compiled by step: {patched}"
    assert relative_rms(sample, expected) < 1e-5, "sample"


@pytest.mark.parametrize("order", [2, 3])
def test_unipc_solves_on_the_device(xla_device, order):
    expected, _ = steps_of(unipc(order), torch.device("cpu"))
    metrics.clear_counters()
    steps_of(unipc(order), xla_device)
    assert count_of("aten::_linalg_solve_ex") > 0
    patches.apply(names=["unipc_solve", "host_timesteps"])
    metrics.clear_counters()
    sample, _ = steps_of(unipc(order), xla_device)
    assert count_of("aten::") == 0
    assert relative_rms(sample, expected) < 1e-4, "sample"


@settings(max_examples=30, deadline=None)
@given(ratios=st.lists(st.floats(-4, -0.25), min_size=1, max_size=2, unique_by=lambda r: round(r, 1)))
def test_the_small_solve_equals_torch(ratios):
    rks = torch.tensor([*ratios, 1.0], dtype=torch.float64)
    matrix = torch.stack([rks**power for power in range(len(rks))])
    vector = torch.arange(1.0, len(rks) + 1, dtype=torch.float64)
    torch.testing.assert_close(unipc_solve._solve(matrix, vector), torch.linalg.solve(matrix, vector))


def test_wan_with_two_experts_does_not_wait_for_the_device_to_choose(xla_device):
    pipe = random_tiny_wan_pipeline(seed=3, variant="two_experts", layers=1)
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(1, 8, 32)

    def generate(device):
        return pipe(
            prompt_embeds=text.to(device),
            **{"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 3, "guidance_scale": 1.0},
            **{"output_type": "latent", "generator": torch.Generator().manual_seed(1)},
        ).frames

    expected = generate("cpu")
    pipe.to(xla_device)
    reads = []
    for names in ([], ["host_timesteps", "unipc_solve"]):
        patches.apply(names=names)
        metrics.clear_counters()
        latents = generate(xla_device)
        reads.append(count_of("xla::_local_scalar_dense") + count_of("aten::_local_scalar_dense"))
        assert relative_rms(latents, expected) < 1e-4, f"latents with {names}"
    assert reads[0] > 0 and reads[1] == 0, f"reads of the device without and with the patches: {reads}"


def test_a_timestep_on_the_host_is_moved_to_the_transformer(xla_device):
    transformer = random_tiny_wan_pipeline(seed=4, layers=1).transformer
    inputs = {"hidden_states": torch.randn(2, 4, 2, 4, 4), "encoder_hidden_states": torch.randn(2, 7, 32)}
    timestep = torch.tensor([500.0, 500.0])
    with torch.no_grad():
        expected = transformer(**inputs, timestep=timestep).sample
        transformer.to(xla_device)
        moved = {name: value.to(xla_device) for name, value in inputs.items()}
        with pytest.raises(RuntimeError, match="Expected XLA tensor"):
            transformer(**moved, timestep=timestep)
        patches.apply(names=["timesteps_to_device"])
        assert relative_rms(transformer(**moved, timestep=timestep).sample, expected) < 1e-5, "noise prediction"
        positional = transformer(moved["hidden_states"], timestep, moved["encoder_hidden_states"])
        assert relative_rms(positional.sample, expected) < 1e-5, "noise prediction, positional"


def test_the_transformer_is_compiled_once(xla_device):
    """UniPC's first steps and its last differ; the graphs of the transformer must not."""
    pipe = random_tiny_wan_pipeline(seed=6, layers=1)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(xla_device)
    patches.apply(names=["transformer_graphs", "host_timesteps", "unipc_solve"])
    at_start, compiled = [], []

    def count():
        return metrics.counter_value("UncachedCompile") or 0

    # the first submodule runs after the cut before the transformer, the model's own hook after the one behind it
    pipe.transformer.patch_embedding.register_forward_pre_hook(lambda *_: at_start.append(count()))
    pipe.transformer.register_forward_hook(lambda *_: compiled.append(count() - at_start[-1]))
    text = torch.randn(1, 8, 32).to(xla_device)
    pipe(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        **{"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 5, "output_type": "latent"},
    )
    assert compiled == [1] + [0] * 9, f"graphs compiled by transformer call: {compiled}"


def test_a_stock_pipeline_runs_whole_with_every_patch(xla_device):
    pipe = random_tiny_wan_pipeline(seed=5, layers=1)
    pipe.set_progress_bar_config(disable=True)
    settings = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2, "output_type": "np"}
    expected = torch.as_tensor(pipe("a ball", generator=torch.Generator().manual_seed(2), **settings).frames)
    pipe.to(xla_device)
    patches.apply(pipe)
    frames = torch.as_tensor(pipe("a ball", generator=torch.Generator().manual_seed(2), **settings).frames)
    assert relative_rms(frames, expected) < 1e-4, "frames"
