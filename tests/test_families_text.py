"""Text of every family: rows of a batch do not touch each other, padding does not matter, lengths are no new graph."""

import pytest
import torch
from family_cases import CASES, ON_XLA_BY_DEFAULT, SPARSE, make_case, on_cpu_and_xla, run, sparse_config
from numerics import assert_close
from torch.utils._pytree import tree_map_only

import torch_svg
from torch_svg import patches
from torch_svg.families import family_of

# inputs that all rows of a batch share
SHARED = {
    "image_rotary_emb", "indices_latents", "indices_latents_clean", "indices_latents_history_2x",
    "indices_latents_history_4x", "position_ids", "timestep_indices", "token_tags", "text_indices", "video_indices",
    "audio_indices", "visual_rope_pos", "text_rope_pos",
}  # fmt: skip
# these pack one sequence without a batch, or are cases of a batch of one
ONE_ROW = {"cosmos3", "cosmos3_action", "framepack_alone"}
# the masks of the text inputs
MASKS = {
    "encoder_attention_mask": "encoder_hidden_states",
    "encoder_attention_mask_2": "encoder_hidden_states_2",
    "audio_encoder_attention_mask": "audio_encoder_hidden_states",
}


def masked_inputs(inputs):
    return {mask: text for mask, text in MASKS.items() if inputs.get(mask) is not None}


PADDED = [name for name, (_, inputs, *_) in CASES.items() if masked_inputs(inputs())]


def row_of(inputs, row):
    def cut(tensor):
        return tensor[row : row + 1] if tensor.ndim and tensor.shape[0] == 2 else tensor

    # MiniMax-H3's timesteps are those of kinds of tokens
    shared = SHARED | ({"timestep"} if "timestep_indices" in inputs else set())
    return {
        name: value if name in shared else tree_map_only(torch.Tensor, cut, value) for name, value in inputs.items()
    }


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla(name for name in CASES if name not in ONE_ROW))
def test_a_row_of_a_batch_equals_its_own_run(name, device):
    make, inputs, grid, _ = make_case(name)
    transformer = make()
    torch_svg.enable(transformer, sparse_config(grid))
    both = run(transformer, inputs, device)
    for row in range(2):
        alone = run(transformer, row_of(inputs, row), device)
        assert_close(f"row {row}", alone[0], both[row], 1e-5)


@pytest.mark.parametrize(("name", "device"), on_cpu_and_xla(PADDED))
def test_padded_text_does_not_matter(name, device):
    make, inputs, grid, _ = make_case(name)
    transformer = make()
    torch_svg.enable(transformer, sparse_config(grid))
    expected = run(transformer, inputs, device)
    changed = dict(inputs)
    for mask, text in masked_inputs(inputs).items():
        padding = ~inputs[mask].bool().reshape(inputs[text].shape[:2])
        assert padding.any()
        changed[text] = torch.where(padding[..., None], inputs[text] + 100, inputs[text])
    assert torch.equal(run(transformer, changed, device), expected)


@pytest.mark.parametrize("name", CASES)
def test_the_table_says_where_text_stands_and_what_becomes_of_padding(name):
    make, inputs, _, leading = make_case(name)
    transformer = make()
    family = family_of(transformer)
    grid = family.grid(transformer, inputs)
    if family.text == "cross-attention":
        assert grid.text_tokens == 0 or family.others
    else:
        assert grid.text_tokens > 0
        assert grid.text_first == (family.text == "before the video" and not leading)
    if family.masks == "attended":
        assert name not in PADDED
    else:
        assert name in PADDED and (family.masks == "cross-attention") == (family.text == "cross-attention")


def other_prompts(inputs):
    """Text of other words and other lengths."""
    changed = {name: value for name, value in inputs.items() if name not in MASKS}
    for name in ("encoder_hidden_states", "encoder_hidden_states_2", "audio_encoder_hidden_states"):
        if name in changed:
            changed[name] = tree_map_only(torch.Tensor, lambda x: x * 0.5, inputs[name])
    for mask, text in masked_inputs(inputs).items():
        rows, tokens = inputs[text].shape[:2]
        valid = torch.arange(tokens)[None] < torch.tensor([3, tokens - 2][:rows])[:, None]
        changed[mask] = valid.reshape(inputs[mask].shape).to(inputs[mask].dtype)
    return changed


# HunyuanVideo 1.5 sorts its text by boolean indexing without them, Framepack cuts its text on the host
NEEDS_PATCH = ("hunyuan_video15", "hunyuan_video15_t2v", "framepack", "framepack_alone")


@pytest.fixture
def text_patches():
    patches.apply(names=["hunyuan15_text_order", "framepack_text_length"])
    yield
    patches.revert(["hunyuan15_text_order", "framepack_text_length"])


def compiles():
    import torch_xla
    from torch_xla.debug import metrics

    torch_xla.sync(wait=True)
    return (metrics.metric_data("CompileTime") or [0])[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ON_XLA_BY_DEFAULT else pytest.mark.slow)
        for name in CASES
    ],
)
def test_prompts_of_other_lengths_are_no_new_graph(name, xla_device, text_patches):
    make, inputs, grid, _ = make_case(name)
    transformer = make()
    torch_svg.enable(transformer, sparse_config(grid))
    first = run(transformer, inputs, xla_device)
    before = compiles()
    assert before > 0
    second = run(transformer, other_prompts(inputs), xla_device)
    assert compiles() == before
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_PATCH)
def test_the_patches_of_text_change_no_result(name, xla_device, text_patches):
    make, inputs, *_ = make_case(name)
    expected = run(make(), inputs)
    assert_close("default processors", run(make(), inputs, xla_device), expected, 1e-5)
    transformer = make()
    torch_svg.enable(transformer, SPARSE.replace(density=1.0))
    assert_close("density 1", run(transformer, inputs, xla_device), expected, 1e-5)


def test_the_mask_that_a_processor_makes_of_all_pairs_of_tokens_never_exists(monkeypatch):
    make, inputs, grid, _ = make_case("hunyuan_video15")
    transformer = make()
    torch_svg.enable(transformer, sparse_config(grid))
    repeat, devices = torch.Tensor.repeat, []

    def seen(x, *sizes):
        out = repeat(x, *sizes)
        if out.dtype == torch.bool and out.shape[-2:] == (45 + 21, 45 + 21):
            devices.append(out.device.type)
        return out

    monkeypatch.setattr(torch.Tensor, "repeat", seen)
    run(transformer, inputs)
    assert devices == ["meta", "meta"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mochi", *NEEDS_PATCH])
def test_a_forward_is_one_graph_that_waits_for_nothing(name, xla_device, text_patches):
    import torch_xla
    from torch_xla.debug import metrics

    make, inputs, grid, _ = make_case(name)
    transformer = make().to(xla_device)
    torch_svg.enable(transformer, sparse_config(grid))
    inputs = {name: value.to(xla_device) for name, value in inputs.items()}
    torch_xla.sync()
    metrics.clear_all()
    with torch.no_grad():
        # without the patches, the models look for the valid text tokens of every row; Mochi does in every layer
        transformer(**inputs, return_dict=False)
    torch_xla.sync()
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert metrics.metric_data("CompileTime")[0] == 1
