"""Families with joint text: real transformer classes, tiny random weights."""

import copy

import diffusers
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, HunyuanVideoTransformer3DModel
from numerics import assert_close

import torch_svg
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.pattern import keep

SPARSE = SparseVideoConfig(density=0.6, warmup_steps=0, dense_layers=0)
TEXT = 10


def hunyuan_video():
    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )


def hunyuan_inputs(text_lengths):
    generator = torch.Generator().manual_seed(0)
    batch = len(text_lengths)
    mask = (torch.arange(TEXT)[None] < torch.tensor(text_lengths)[:, None]).long()
    return {
        "hidden_states": torch.randn(batch, 4, 3, 6, 10, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16, generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox(patch_size_t=None):
    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=10, sample_height=6, sample_frames=9, patch_size=2,
        patch_size_t=patch_size_t, temporal_compression_ratio=4, max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=patch_size_t is not None,
    )


def cogvideox_inputs(batch, frames=3, rotary=None):
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(batch, frames, 4, 6, 10, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
        "image_rotary_emb": rotary,
    }


def cogvideox15_inputs(batch):
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    return cogvideox_inputs(batch, 4, get_3d_rotary_pos_embed(16, ((0, 0), (3, 5)), (3, 5), 2))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WAN = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 16, "out_channels": 16, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 64,
}


def wan_inputs(channels=16, text=12, **more):
    return {
        "hidden_states": random(2, channels, 3, 6, 10), "timestep": torch.full((2,), 500),
        "encoder_hidden_states": random(2, text, 32), **more,
    }


def vace():
    return diffusers.WanVACETransformer3DModel(**WAN, vace_layers=[0, 1], vace_in_channels=48)


def animate():
    return diffusers.WanAnimateTransformer3DModel(
        **{**WAN, "in_channels": 36}, latent_channels=16, image_dim=16, added_kv_proj_dim=48,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def animate_inputs():
    return wan_inputs(
        36, 512, encoder_hidden_states_image=random(2, 257, 16), pose_hidden_states=random(2, 16, 2, 6, 10),
        face_pixel_values=random(2, 3, 8, 16, 16),
    )


def chronoedit():
    return diffusers.ChronoEditTransformer3DModel(**{**WAN, "in_channels": 36}, image_dim=16, added_kv_proj_dim=48)


def ltx():
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16, qk_norm="rms_norm_across_heads",
    )


def ltx_inputs():
    return {
        "hidden_states": random(2, 45, 4), "encoder_hidden_states": random(2, TEXT, 16),
        "timestep": torch.full((2,), 500.0), "num_frames": 3, "height": 3, "width": 5,
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).float(),
    }


def cosmos():
    return diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type=None,
    )


def cosmos_inputs():
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "timestep": torch.full((2,), 5.0),
        "encoder_hidden_states": random(2, 12, 16), "fps": 30,
    }


def allegro():
    return diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=24, sample_width=10, sample_height=6, sample_frames=3, caption_channels=16,
    )


def allegro_inputs():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *tables, frames, rows, columns = get_3d_rotary_pos_embed_allegro(12, ((0, 0), (3, 5)), (3, 5), 3)
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T.reshape(3, 1, -1)
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "encoder_hidden_states": random(2, TEXT, 16),
        "timestep": torch.full((2,), 500),
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).float(),
        "image_rotary_emb": (tuple(tables), tuple(places)),
    }


def kandinsky5():
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
    )


def kandinsky5_inputs():
    return {
        "hidden_states": random(1, 3, 6, 10, 4), "encoder_hidden_states": random(1, TEXT, 12),
        "timestep": torch.full((1,), 500.0), "pooled_projections": random(1, 8),
        "visual_rope_pos": (torch.arange(3), torch.arange(3), torch.arange(5)), "text_rope_pos": torch.arange(TEXT),
    }


# name: (model, inputs, grid)
CASES = {
    "hunyuan_video": (hunyuan_video, lambda: hunyuan_inputs([TEXT, 4]), (3, 3, 5)),
    "cogvideox": (cogvideox, lambda: cogvideox_inputs(2), (3, 3, 5)),
    "cogvideox15": (lambda: cogvideox(patch_size_t=2), lambda: cogvideox15_inputs(2), (2, 3, 5)),
    "vace": (vace, lambda: wan_inputs(control_hidden_states=random(2, 48, 3, 6, 10, seed=1)), (3, 3, 5)),
    "animate": (animate, animate_inputs, (3, 3, 5)),
    "chronoedit": (
        chronoedit, lambda: wan_inputs(36, 512, encoder_hidden_states_image=random(2, 257, 16)), (3, 3, 5)
    ),
    "skyreels": (lambda: diffusers.SkyReelsV2Transformer3DModel(**WAN), wan_inputs, (3, 3, 5)),
    "ltx": (ltx, ltx_inputs, (3, 3, 5)),
    "cosmos": (cosmos, cosmos_inputs, (3, 3, 5)),
    "allegro": (allegro, allegro_inputs, (3, 3, 5)),
    "kandinsky5": (kandinsky5, kandinsky5_inputs, (3, 3, 5)),
}


# compiling for XLA:CPU takes seconds a case: by default the families with joint text stand for the others there
ON_XLA_BY_DEFAULT = ("hunyuan_video", "cogvideox15")


@pytest.fixture(
    params=[
        pytest.param((name, device), id=f"{name}-{device}", marks=() if quick else pytest.mark.slow)
        for name in CASES
        for device in ("cpu", "xla")
        for quick in [device == "cpu" or name in ON_XLA_BY_DEFAULT]
    ]
)
def case_and_device(request):
    name, device = request.param
    return *make_case(name), device


@pytest.fixture(params=CASES)
def case(request):
    return make_case(request.param)


def make_case(name):
    build, inputs, grid = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            # a gate that starts at zero would hide what attention does
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.3)
    return lambda: copy.deepcopy(model), inputs(), grid


@torch.no_grad()
def run(transformer, inputs, device="cpu"):
    def move(x):
        return tuple(map(move, x)) if isinstance(x, tuple) else x.to(device) if isinstance(x, torch.Tensor) else x

    transformer.to(device)
    out = transformer(**{name: move(x) for name, x in inputs.items()}, return_dict=False)
    return (out if isinstance(out, torch.Tensor) else out[0]).cpu()


def put_on(transformer, config=None):
    """Sets the processor as a user would: by diffusers' own call where the class has it."""
    if not hasattr(transformer, "set_attn_processor"):
        return torch_svg.enable(transformer, config)
    processor = SparseVideoAttnProcessor(config)
    transformer.set_attn_processor(processor)
    return processor


def test_density_one_equals_the_default_processor(case_and_device):
    make, inputs, grid, device = case_and_device
    expected = run(make(), inputs)
    transformer = make()
    processor = put_on(transformer, SPARSE.replace(density=1.0))
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)
    assert processor.report().grid == grid


def test_the_default_config_stays_dense_here_and_equals_the_default_processor(case_and_device):
    make, inputs, _, device = case_and_device
    expected = run(make(), inputs)
    transformer = make()
    put_on(transformer)
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)


def test_sparse_equals_the_familys_mask_through_the_default_processor(case_and_device, monkeypatch):
    make, inputs, _, device = case_and_device
    transformer = make()
    processor = put_on(transformer, SPARSE)
    sparse = run(transformer, inputs, device)
    plan, report = processor.record.plan, processor.report()
    assert 0.5 < report.sparse_pair_density <= 0.6 and report.kinds.max() <= 1
    batch = inputs["hidden_states"].shape[0]
    by_layer = torch.from_numpy(report.kinds[0]).reshape(-1, batch, 2).long()
    # layers are numbered as the modules stand; VACE runs its own blocks before the others
    kinds = iter([by_layer[layer] for layer in processor.record.forwards[-1].kinds])
    rows = range(plan.grid.tokens)
    masks = torch.stack([torch.from_numpy(keep(pattern, plan.grid, rows, rows)) for pattern in plan.patterns])

    # the masks go in where the default processors meet torch, so neither work table nor wrapper takes part
    attention = torch.nn.functional.scaled_dot_product_attention

    def masked(query, key, value, attn_mask=None, **kwargs):
        if query.shape[2] == key.shape[2] == plan.grid.tokens:
            mask = masks[next(kinds)]
            attn_mask = mask if attn_mask is None else mask & attn_mask
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", masked)
    expected = run(make(), inputs)
    assert next(kinds, None) is None
    assert_close("output", sparse, expected, 1e-4)


def test_restoring_gives_the_default_result_bitwise(case):
    make, inputs, _ = case
    transformer = make()
    expected = run(transformer, inputs)
    before = [getattr(module, "processor", None) for module in transformer.modules()]
    torch_svg.enable(transformer, SPARSE)
    assert not torch.equal(run(transformer, inputs), expected)
    torch_svg.disable(transformer)
    after = [getattr(module, "processor", None) for module in transformer.modules()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert torch.equal(run(transformer, inputs), expected)
    put_on(transformer, SPARSE)
    run(transformer, inputs)
    torch_svg.disable(transformer)
    assert torch.equal(run(transformer, inputs), expected)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_hunyuan_rows_with_different_text_lengths_equal_their_own_runs(device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = hunyuan_video().eval()
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    inputs = hunyuan_inputs([TEXT, 4])
    both = run(transformer, inputs, device)
    for row in range(2):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        assert_close(f"row {row}", run(transformer, alone, device)[0], both[row], 1e-5)
    changed = {name: value.clone() for name, value in inputs.items()}
    changed["encoder_hidden_states"][1, 4:] += 100
    assert torch.equal(run(transformer, changed, device), both), "padded text must not matter"


def test_hunyuan_token_refiner_is_bitwise_unchanged():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = hunyuan_video().eval()
    inputs = hunyuan_inputs([TEXT, 4])
    outputs = []
    transformer.context_embedder.register_forward_hook(lambda module, args, output: outputs.append(output))
    run(transformer, inputs)
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    run(transformer, inputs)
    assert torch.equal(outputs[0], outputs[1])


def test_a_mask_that_is_not_a_key_prefix_is_refused():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = cogvideox().eval()
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    inputs = cogvideox_inputs(1)
    run(transformer, inputs)
    attn = transformer.transformer_blocks[0].attn1
    tokens = 45 + TEXT
    forward = attn.forward
    attn.forward = lambda *a, **k: forward(*a, **{**k, "attention_mask": torch.ones(1, tokens, tokens)})
    with pytest.raises(NotImplementedError, match="mask of shape"):
        run(transformer, inputs)
