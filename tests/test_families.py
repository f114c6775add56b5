"""Families with joint text: real transformer classes, tiny random weights."""

import copy

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


CASES = {
    "hunyuan_video": (hunyuan_video, lambda: hunyuan_inputs([TEXT, 4]), (3, 3, 5)),
    "cogvideox": (cogvideox, lambda: cogvideox_inputs(2), (3, 3, 5)),
    "cogvideox15": (lambda: cogvideox(patch_size_t=2), lambda: cogvideox15_inputs(2), (2, 3, 5)),
}


@pytest.fixture(params=CASES)
def case(request):
    build, inputs, grid = CASES[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
    return lambda: copy.deepcopy(model), inputs(), grid


@torch.no_grad()
def run(transformer, inputs, device="cpu"):
    def move(x):
        return tuple(map(move, x)) if isinstance(x, tuple) else x if x is None else x.to(device)

    transformer.to(device)
    return transformer(**{name: move(x) for name, x in inputs.items()}, return_dict=False)[0].cpu()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_density_one_equals_the_default_processor(case, device):
    make, inputs, grid = case
    expected = run(make(), inputs)
    transformer = make()
    processor = SparseVideoAttnProcessor(SPARSE.replace(density=1.0))
    transformer.set_attn_processor(processor)
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)
    assert processor.report().grid == grid


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_default_config_stays_dense_here_and_equals_the_default_processor(case, device):
    make, inputs, _ = case
    expected = run(make(), inputs)
    transformer = make()
    transformer.set_attn_processor(SparseVideoAttnProcessor())
    assert_close("output", run(transformer, inputs, device), expected, 1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_sparse_equals_the_familys_mask_through_the_default_processor(case, device, monkeypatch):
    make, inputs, _ = case
    transformer = make()
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    sparse = run(transformer, inputs, device)
    plan, report = processor.record.plan, processor.report()
    assert 0.5 < report.sparse_pair_density <= 0.6 and report.kinds.max() <= 1
    batch = inputs["hidden_states"].shape[0]
    kinds = iter(torch.from_numpy(report.kinds[0]).reshape(-1, batch, 2).long())
    rows = range(plan.grid.tokens)
    masks = torch.stack([torch.from_numpy(keep(pattern, plan.grid, rows, rows)) for pattern in plan.patterns])

    # the masks go in where the default processors meet torch, so neither work table nor wrapper takes part
    attention = torch.nn.functional.scaled_dot_product_attention

    def masked(query, key, value, attn_mask=None, **kwargs):
        if query.shape[2] == plan.grid.tokens:
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
    before = transformer.attn_processors
    torch_svg.enable(transformer, SPARSE)
    assert not torch.equal(run(transformer, inputs), expected)
    torch_svg.disable(transformer)
    assert all(transformer.attn_processors[name] is before[name] for name in before)
    assert torch.equal(run(transformer, inputs), expected)
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
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
