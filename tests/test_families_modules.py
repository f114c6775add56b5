"""Which modules of every family are replaced, that the others stay what they were, and what is refused."""

import re

import diffusers
import pytest
import torch
from family_cases import (
    CASES,
    LTX2,
    SPARSE,
    TEXT,
    cogvideox,
    cogvideox_inputs,
    cosmos3,
    cosmos3_inputs,
    ltx,
    ltx2_inputs,
    ltx_inputs,
    make_case,
    minimax_h3,
    minimax_inputs,
    on_cpu_and_xla,
    put_on,
    run,
    sparse_config,
)
from numerics import assert_close
from torch.utils._pytree import tree_map_only

import torch_svg
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.families import FAMILIES, UNSERVED, family_of
from torch_svg.pattern import pair_density


@pytest.mark.parametrize("name", CASES)
def test_restoring_gives_the_default_result_bitwise(name):
    make, inputs, grid, _ = make_case(name)
    config = sparse_config(grid)
    transformer = make()
    expected = run(transformer, inputs)
    before = [getattr(module, "processor", None) for module in transformer.modules()]
    torch_svg.enable(transformer, config)
    assert not torch.equal(run(transformer, inputs), expected)
    torch_svg.disable(transformer)
    after = [getattr(module, "processor", None) for module in transformer.modules()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert torch.equal(run(transformer, inputs), expected)
    put_on(transformer, config)
    run(transformer, inputs)
    torch_svg.disable(transformer)
    assert torch.equal(run(transformer, inputs), expected)


# families in which every attention module is video self-attention
NO_OTHER_ATTENTION = {
    "cogvideox", "cogvideox15", "consisid", "cosmos3", "cosmos3_action", "easyanimate", "mochi", "motif_video",
}  # fmt: skip


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla(name for name in CASES if name not in NO_OTHER_ATTENTION))
def test_other_attention_is_what_it_was(name, device):
    """Text refiners, cross-attention and audio get the same inputs again, with their default processors."""
    make, inputs, grid, _ = make_case(name)
    transformer = make()
    video = family_of(transformer).video_attention_modules(transformer)
    calls = {}

    def copied(x):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), x)

    def before(module, args, kwargs):
        calls[module] = copied((args, kwargs))

    def after(module, args, kwargs, output):
        calls[module] = (*calls[module], copied(output))

    hooks = []
    for path, module in transformer.named_modules():
        if getattr(module, "processor", None) is not None and path not in video:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
    assert hooks
    put_on(transformer, sparse_config(grid))
    run(transformer, inputs, device)
    for hook in hooks:
        hook.remove()
    torch_svg.disable(transformer.cpu())
    for module, (args, kwargs, output) in calls.items():
        with torch.no_grad():
            expected = module(*args, **kwargs)
        pairs = zip(*([x] if isinstance(x, torch.Tensor) else x for x in (output, expected)), strict=True)
        for got, wanted in pairs:
            if device == "cpu":
                assert torch.equal(got, wanted)
            else:
                assert_close(type(module).__name__, got, wanted, 1e-5)


@pytest.mark.parametrize("name", sorted(NO_OTHER_ATTENTION))
def test_these_have_no_other_attention(name):
    transformer = make_case(name)[0]()
    video = family_of(transformer).video_attention_modules(transformer)
    assert list(video) == [path for path, module in transformer.named_modules() if hasattr(module, "processor")]


# modules that come before the first video attention, so that nothing may change in them
UNTOUCHED = {
    "hunyuan_video": "context_embedder", "hunyuan_video15": "context_embedder", "framepack": "context_embedder",
    "minimax_h3": "token_refiner", "ltx2": "transformer_blocks.0.audio_attn1",
    "kandinsky6": "video_text_transformer_blocks.0",
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_refiners_and_audio_are_bitwise_unchanged(name):
    make, inputs, *_ = make_case(name)
    transformer = make()
    outputs = []
    module = transformer.get_submodule(UNTOUCHED[name])
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    expected = run(transformer, inputs)
    put_on(transformer, SPARSE)
    assert not torch.equal(run(transformer, inputs), expected)
    assert torch.equal(outputs[0], outputs[1])


ONLY_VIDEO = {
    "ltx2": ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"],
    "kandinsky6": [f"visual_transformer_blocks.{i}.video_dec_block.self_attention" for i in range(2)],
    "minimax_h3": ["transformer_blocks.0.attn", "transformer_blocks.1.attn"],
    "hunyuan_video15": ["transformer_blocks.0.attn", "transformer_blocks.1.attn"],
    "motif_video": [
        "transformer_blocks.0.attn", "single_transformer_blocks.0.attn", "single_transformer_blocks.1.attn"
    ],
    "mochi": ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"],
    "cosmos3": ["layers.0.self_attn", "layers.1.self_attn"],
    "easyanimate": ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"],
}


@pytest.mark.parametrize("name", ONLY_VIDEO)
def test_only_video_self_attention_is_replaced(name):
    make, *_ = make_case(name)
    transformer = make()
    processor = torch_svg.enable(transformer, SPARSE)
    replaced = [
        path for path, module in transformer.named_modules() if getattr(module, "processor", None) is processor
    ]
    assert replaced == ONLY_VIDEO[name]


def test_a_sequence_whose_rows_are_not_a_grid_is_refused():
    transformer = minimax_h3().eval()
    torch_svg.enable(transformer, SPARSE)
    inputs = minimax_inputs()
    # the last frame loses a token
    positions = inputs["position_ids"].clone()
    positions[-15:, 0], positions[-15, 0] = 9.0, 8.0
    with pytest.raises(NotImplementedError, match="frame by frame"):
        run(transformer, {**inputs, "position_ids": positions})


def test_layers_with_another_sequence_have_the_same_patterns_and_their_share_in_the_report():
    make, inputs, *_ = make_case("motif_video_decoder")
    transformer = make()
    # 15 text and image tokens of 60 take half of the knob; the decoder layer's 45 other tokens are no text
    processor = torch_svg.enable(transformer, SparseVideoConfig.from_svg(0.8, warmup_steps=0, dense_layers=0))
    run(transformer, inputs)
    plan, (decoder,) = processor.record.plan, {*processor.record.layer_plans.values()} - {processor.record.plan}
    assert decoder.patterns == plan.patterns and decoder.grid.text_tokens == 45
    report = processor.report()
    assert report.kinds.shape == (1, 3, 4) and report.kinds.max() <= 1
    shares = [pair_density(plan.patterns[kind], plan.grid) for kind in report.kinds.flatten()]
    assert report.sparse_pair_density == pytest.approx(sum(shares) / len(shares))
    assert report.pair_density == report.tile_density == report.sparse_pair_density


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


def test_packed_latents_without_a_grid_are_refused():
    for build, inputs in ((ltx, ltx_inputs()), (lambda: diffusers.LTX2VideoTransformer3DModel(**LTX2), ltx2_inputs())):
        transformer = build().eval()
        torch_svg.enable(transformer, SPARSE)
        with pytest.raises(NotImplementedError, match="grid of these 45 tokens is not known"):
            run(transformer, {**inputs, "num_frames": None})


def test_a_weighted_mask_over_the_video_is_refused():
    transformer = diffusers.LTX2VideoTransformer3DModel(**LTX2).eval()
    torch_svg.enable(transformer, SPARSE)
    with pytest.raises(NotImplementedError, match="mask of shape"):
        run(transformer, ltx2_inputs(video_self_attention_mask=torch.ones(2, 45, 45)))


def test_cosmos3_takes_one_video_right_after_the_text():
    transformer = cosmos3().eval()
    torch_svg.enable(transformer, SPARSE)
    inputs = cosmos3_inputs(action=4)
    moved = {**cosmos3_inputs(), "vision_sequence_indexes": torch.arange(7, 52).flip(0)}
    with pytest.raises(NotImplementedError, match="right after the 7 text tokens"):
        run(transformer, moved)
    torch_svg.enable(transformer, SPARSE)
    with pytest.raises(NotImplementedError, match="2 videos and images"):
        run(transformer, {**inputs, "vision_token_shapes": [(1, 3, 5), (2, 3, 5)]})


def sana_video():
    return diffusers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16,
        mlp_ratio=2.5, sample_size=8, patch_size=(1, 2, 2), rope_max_seq_len=32,
    )


@pytest.mark.parametrize("name", UNSERVED)
def test_an_unserved_transformer_is_refused_with_its_reason(name):
    transformer = type(name, (torch.nn.Module,), {})()
    with pytest.raises(NotImplementedError, match=re.escape(f"{name}: {UNSERVED[name]}")):
        torch_svg.enable(transformer)


def test_a_transformer_of_another_kind_is_refused_before_anything_changes():
    transformer = sana_video().eval()
    before = list(transformer.attn_processors.values())
    with pytest.raises(NotImplementedError, match="linear"):
        torch_svg.enable(transformer)
    assert list(transformer.attn_processors.values()) == before


# transformers of diffusers that make no video
NO_VIDEO = re.compile(r"\w+(1D|2D)Model|LongCatAudioDiTTransformer|PriorTransformer|RFD4ProteinaTransformer")
# one attention block of a UNet, not a transformer of its own
NOT_A_MODEL = {"TransformerTemporalModel"}


def test_every_video_transformer_of_diffusers_is_served_or_named_with_its_reason():
    served = {name for family in FAMILIES for name in family.transformers}
    exported = {
        name
        for name in dir(diffusers)
        if "Transformer" in name
        and isinstance(getattr(diffusers, name), type)
        and issubclass(getattr(diffusers, name), diffusers.ModelMixin)
    }
    video = {name for name in exported if not NO_VIDEO.fullmatch(name)} - NOT_A_MODEL
    assert not served & set(UNSERVED)
    assert video == served | set(UNSERVED)
