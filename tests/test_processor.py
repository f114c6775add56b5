"""The processor in a real Wan transformer: what it replaces, what it leaves, and how it is put on and taken off."""

import copy

import pytest
import torch
from numerics import assert_close

import torch_svg
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.pattern import keep
from torch_svg.testing import random_tiny_wan_pipeline

SPARSE = SparseVideoConfig(density=0.4, warmup_steps=0, dense_layers=0)
FULL = SPARSE.replace(density=1.0)
# 3 frames of 5 x 7 tokens: no side is a multiple of anything
LATENTS = (4, 3, 10, 14)


@pytest.fixture(scope="module")
def make_transformer():
    pipe = random_tiny_wan_pipeline(layers=2, heads=2, head_dim=16)
    return lambda: copy.deepcopy(pipe.transformer)


def inputs(batch=1, latents=LATENTS, device="cpu", channels=None):
    generator = torch.Generator().manual_seed(batch)
    latents = (channels or latents[0], *latents[1:])
    hidden_states = torch.randn(batch, *latents, generator=generator)
    text = torch.randn(batch, 12, 32, generator=generator)
    timestep = torch.full((batch,), 500)
    return {"hidden_states": hidden_states.to(device), "timestep": timestep.to(device),
            "encoder_hidden_states": text.to(device)}


@torch.no_grad()
def run(transformer, device="cpu", **kwargs):
    transformer.to(device)
    out = transformer(**inputs(device=device, **kwargs), return_dict=False)[0]
    return out.cpu()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_density_one_equals_the_default_processor(make_transformer, device):
    transformer = make_transformer()
    expected = run(transformer)
    transformer.set_attn_processor(SparseVideoAttnProcessor(FULL))
    assert_close("output", run(transformer, device), expected, 1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_dense_layers_and_steps_equal_the_default_processor(make_transformer, device):
    transformer = make_transformer()
    expected = run(transformer)
    for config in (SPARSE.replace(dense_layers=2), SPARSE.replace(warmup_steps=1)):
        transformer.set_attn_processor(SparseVideoAttnProcessor(config))
        assert_close("output", run(transformer, device), expected, 1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_sparse_output_equals_the_mask_applied_through_the_default_processor(make_transformer, device):
    transformer = make_transformer()
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    sparse = run(transformer, device, batch=2)
    plan, kinds = processor.record.plan, torch.from_numpy(processor.report().kinds)[0].reshape(2, 2, 2)
    assert plan.grid.frames == 3 and plan.grid.tokens_per_frame == 35

    masked = make_transformer()
    rows = range(plan.grid.tokens)
    masks = torch.stack([torch.from_numpy(keep(pattern, plan.grid, rows, rows)) for pattern in plan.patterns])
    for layer, block in enumerate(masked.blocks):
        with_mask(block.attn1, masks[kinds[layer].long()])
    assert_close("output", sparse, run(masked, batch=2), 1e-4)
    assert kinds.unique().numel() > 1, "the case must mix head kinds"


def with_mask(attn, mask):
    """Calls a module's default processor with a (batch, heads, tokens, tokens) mask."""
    default = attn.processor

    class Masked:
        def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
            return default(attn, hidden_states, encoder_hidden_states, mask, rotary_emb)

    attn.set_processor(Masked())


def test_cross_attention_is_bitwise_unchanged_on_cpu_and_close_on_xla(make_transformer):
    transformer = make_transformer()
    seen = {}

    def record(name):
        return lambda module, args, output: seen.setdefault(name, []).append((args[0].cpu(), output.cpu()))

    for index, block in enumerate(transformer.blocks):
        block.attn2.register_forward_hook(record(index))
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    run(transformer)
    run(transformer, "xla")
    default = make_transformer()
    text = default.condition_embedder.text_embedder(inputs()["encoder_hidden_states"])
    for index, block in enumerate(default.blocks):
        (on_cpu_in, on_cpu_out), (on_xla_in, on_xla_out) = seen[index]
        with torch.no_grad():
            assert torch.equal(on_cpu_out, block.attn2(on_cpu_in, text))
            assert_close(f"cross-attention {index}", on_xla_out, block.attn2(on_xla_in, text), 1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_batch_row_equals_its_own_run(make_transformer, device):
    transformer = make_transformer()
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    transformer.to(device)
    both = inputs(batch=2, device=device)
    with torch.no_grad():
        together = transformer(**both, return_dict=False)[0].cpu()
        for row in range(2):
            alone = {name: value[row : row + 1] for name, value in both.items()}
            assert_close(f"row {row}", transformer(**alone, return_dict=False)[0].cpu()[0], together[row], 1e-5)


def test_default_ours_ours_default(make_transformer):
    transformer = make_transformer()
    default = dict(transformer.attn_processors)
    dense = run(transformer)
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    sparse = run(transformer)
    transformer.set_attn_processor(processor)
    again = run(transformer)
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    another = run(transformer)
    transformer.set_attn_processor(default)
    assert torch.equal(run(transformer), dense)
    assert torch.equal(sparse, again) and torch.equal(sparse, another) and not torch.equal(sparse, dense)


def test_set_as_a_dict_and_on_one_module(make_transformer):
    transformer = make_transformer()
    dense = run(transformer)
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    everywhere = run(transformer)

    as_dict = make_transformer()
    processor = SparseVideoAttnProcessor(SPARSE)
    as_dict.set_attn_processor(
        {name: processor if ".attn1." in name else old for name, old in as_dict.attn_processors.items()}
    )
    assert torch.equal(run(as_dict), everywhere)

    one = make_transformer()
    processor = SparseVideoAttnProcessor(SPARSE)
    one.blocks[1].attn1.set_processor(processor)
    only_last = run(one)
    assert not torch.equal(only_last, dense) and not torch.equal(only_last, everywhere)
    one.blocks[0].attn1.set_processor(processor)
    assert torch.equal(run(one), everywhere)


def test_deepcopy_fused_projections_wrapped_projections_and_cache_context(make_transformer):
    transformer = make_transformer()
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    expected = run(transformer)

    copied = copy.deepcopy(transformer)
    assert torch.equal(run(copied), expected)
    copied.blocks[0].attn1.to_q.weight.data.zero_()
    assert not torch.equal(run(copied), expected), "the copy must use its own weights"
    assert torch.equal(run(transformer), expected)

    with transformer.cache_context("cond"):
        assert torch.equal(run(transformer), expected)

    class Wrapped(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.calls = base, 0

        def forward(self, x):
            self.calls += 1
            return self.base(x)

    for block in transformer.blocks:
        block.attn1.to_q = Wrapped(block.attn1.to_q)
    assert torch.equal(run(transformer), expected)
    assert [block.attn1.to_q.calls for block in transformer.blocks] == [1, 1]

    fused = make_transformer()
    fused.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    fused.fuse_qkv_projections()
    assert_close("fused", run(fused), expected, 1e-5)


def test_gradient_checkpointing(make_transformer):
    gradients = []
    for checkpointing in (False, True):
        transformer = make_transformer().train()
        transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        transformer(**inputs(), return_dict=False)[0].square().mean().backward()
        gradients.append(transformer.blocks[0].attn1.to_v.weight.grad)
    assert_close("gradient", gradients[1], gradients[0], 1e-5)


def test_moves_between_devices_keep_working(make_transformer):
    transformer = make_transformer()
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    expected = run(transformer, "cpu")
    assert_close("on xla", run(transformer, "xla"), expected, 1e-5)
    assert torch.equal(run(transformer, "cpu"), expected)


def test_default_config_stays_dense_on_a_small_clip_and_says_so_once(make_transformer, caplog):
    transformer = make_transformer()
    expected = run(transformer)
    processor = SparseVideoAttnProcessor()
    transformer.set_attn_processor(processor)
    with caplog.at_level("WARNING", "torch_svg"):
        assert torch.equal(run(transformer), expected)
        assert torch.equal(run(transformer), expected)
    assert sum("does not pay" in record.message for record in caplog.records) == 1
    (reason, calls), = processor.report().fallbacks.items()
    assert "105 video tokens" in reason and calls == 4


def test_default_config_is_sparse_where_it_pays(make_transformer):
    transformer = make_transformer()
    processor = SparseVideoAttnProcessor(SparseVideoConfig(min_tokens=100, warmup_steps=0, sink="none"))
    transformer.set_attn_processor(processor)
    run(transformer)
    assert 0.2 < processor.report().sparse_pair_density <= 0.3


def test_an_unserved_transformer_is_named_and_keeps_its_processors():
    from diffusers import WanTransformer3DModel

    class UnheardOfTransformer3DModel(WanTransformer3DModel):
        """A class of its own, in the way in which most of diffusers' new transformers are."""

    transformer = UnheardOfTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=1,
    ).eval()
    arguments = {
        "hidden_states": torch.randn(1, 4, 3, 16, 16), "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 10, 16),
    }
    with torch.no_grad():
        expected = transformer(**arguments, return_dict=False)[0]
        transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
        with pytest.raises(NotImplementedError, match=r"UnheardOfTransformer3DModel.*served"):
            transformer(**arguments, return_dict=False)
        assert torch.equal(transformer(**arguments, return_dict=False)[0], expected)
        with pytest.raises(NotImplementedError, match="UnheardOfTransformer3DModel"):
            torch_svg.enable(transformer)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SPARSE.replace(warmup_steps=0.2), "fraction"),
        (SPARSE.replace(dense_layers=3), "has 2 layers"),
        (SPARSE.replace(density=0.1), "sink"),
    ],
)
def test_a_config_that_does_not_fit_fails_before_the_first_step_and_changes_nothing(make_transformer, config, message):
    transformer = make_transformer()
    expected = run(transformer)
    processors = {name: type(p) for name, p in transformer.attn_processors.items()}
    transformer.set_attn_processor(SparseVideoAttnProcessor(config))
    with pytest.raises(ValueError, match=message):
        run(transformer)
    assert {name: type(p) for name, p in transformer.attn_processors.items()} == processors
    assert torch.equal(run(transformer), expected)


def test_context_parallelism_is_refused_and_attention_backends_are_accepted(make_transformer):
    transformer = make_transformer()
    processor = SparseVideoAttnProcessor(SPARSE)
    transformer.set_attn_processor(processor)
    expected = run(transformer)
    transformer.set_attention_backend("native")
    assert torch.equal(run(transformer), expected)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        processor._parallel_config = object()


def test_a_processor_outside_a_transformer_says_what_it_needs(make_transformer):
    attn = make_transformer().blocks[0].attn1
    attn.set_processor(SparseVideoAttnProcessor(SPARSE))
    with pytest.raises(ValueError, match="call the transformer itself"):
        attn(torch.randn(1, 105, 32))


def test_a_wrong_config_type_is_refused():
    with pytest.raises(ValueError, match="SparseVideoConfig"):
        SparseVideoAttnProcessor({"density": 0.3})


def test_enable_and_disable_restore_the_very_same_processors(make_transformer):
    transformer = make_transformer()
    before = transformer.attn_processors
    dense = run(transformer)
    processor = torch_svg.enable(transformer, SPARSE)
    after = transformer.attn_processors
    assert all((after[name] is processor) == (".attn1." in name) for name in after)
    sparse = run(transformer)
    torch_svg.disable(transformer)
    assert all(transformer.attn_processors[name] is before[name] for name in before)
    assert torch.equal(run(transformer), dense)
    with torch_svg.sparse_attention(transformer, SPARSE):
        assert torch.equal(run(transformer), sparse)
    assert torch.equal(run(transformer), dense)


def test_the_global_random_state_is_untouched(make_transformer):
    transformer = make_transformer()
    transformer.set_attn_processor(SparseVideoAttnProcessor(SPARSE))
    before = torch.get_rng_state()
    run(transformer)
    assert torch.equal(torch.get_rng_state(), before)
