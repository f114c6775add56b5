"""Whole transformers of released sizes, one layer, traced through torch_xla and compiled for an absent TPU."""

import inspect
import json

import diffusers
import pytest

from benchmarks import aot_models
from benchmarks.released import RELEASED
from torch_svg import aot
from torch_svg.families import FAMILIES

needs_compiler = [
    pytest.mark.aot,
    pytest.mark.skipif(aot.available() is not None, reason=str(aot.available())),
]


@pytest.mark.parametrize(
    ("name", "chip", "largest_mib"),
    [
        # Wan 1.3B, 480p, 81 frames: 32,760 tokens, frames of 1,560
        pytest.param("wan-1.3b", "v5e", 700, id="1.3B-480p-v5e", marks=needs_compiler),
        # Wan 14B, 720p, 81 frames: 75,600 tokens, frames of 3,600
        pytest.param("wan-14b-720p", "v6e", 4200, id="14B-720p-v6e", marks=[*needs_compiler, pytest.mark.slow]),
    ],
)
def test_a_released_size_compiles_without_a_tokens_by_tokens_array(name, chip, largest_mib, xla_device):
    result = aot_models.compile_released(name, chip)
    assert result.kernels >= 2, "one kernel for self-attention, one for cross-attention"
    size, shape = result.largest_array
    assert size <= largest_mib * 2**20 < result.tokens**2, (size, shape)
    assert not result.square_arrays
    assert result.total < aot.CHIPS[chip].hbm_bytes
    print(f"{chip}: HBM {result.total / 2**30:.2f} GiB, largest array {shape}, {result.compile_seconds:.0f} s")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_compiler) for name in RELEASED])
def test_every_released_transformer_compiles_for_one_chip(name, xla_device):
    result = aot_models.compile_released(name)
    assert result.grid == RELEASED[name].grid
    assert result.video_layers >= 1 and result.kernels >= result.video_layers
    assert not result.square_arrays
    assert result.total < aot.CHIPS["v6e"].hbm_bytes
    print(json.dumps(aot_models.asdict(result)))


def test_every_served_class_has_a_released_size_with_the_head_dim_of_the_table():
    seen = {}
    for entry in RELEASED.values():
        arguments = inspect.signature(getattr(diffusers, entry.transformer).__init__).parameters
        config = {name: argument.default for name, argument in arguments.items()} | entry.config
        head_dim = config.get("attention_head_dim") or config.get("head_dim") or sum(config["axes_dims"])
        seen.setdefault(entry.transformer, set()).add(head_dim)
        assert set(entry.cut) <= set(config)
    facts = {name: facts for family in FAMILIES for name, facts in family.transformers.items()}
    assert seen.keys() == facts.keys()
    for name, head_dims in seen.items():
        assert head_dims <= set(facts[name].head_dims), name


def test_attention_matrices_are_found_and_activations_are_not():
    text = "f32[2,4,1500,1500] bf16[1,1500,1536] pred[1,1,1500,1700] bf16[1500,64]"
    assert aot_models.square_arrays(text, 1500, 1600, {64, 1536}) == ["[1,1,1500,1700]", "[2,4,1500,1500]"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        aot_models.compile_released("wan-99b")
