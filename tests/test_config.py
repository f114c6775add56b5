"""Configuration: what is accepted, what is refused, and how open fields are filled."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_svg import SparseVideoConfig
from torch_svg.config import Preset

PRESET = Preset(density=0.3, warmup_steps=0.2, dense_layers=0.03, source="a test")


@pytest.mark.parametrize(
    "fields",
    [
        {"density": 0}, {"density": -0.1}, {"density": 1.01}, {"density": float("nan")}, {"density": True},
        {"warmup_steps": -1}, {"warmup_steps": 1.0}, {"warmup_steps": -0.1}, {"warmup_steps": True},
        {"dense_layers": -2}, {"dense_layers": 1.5}, {"sink": "last_frame"}, {"density_rule": "tiles"},
        {"sampled_rows": 0}, {"implementation": "cuda"}, {"min_tokens": -1},
    ],
    ids=str,
)
def test_bad_fields_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SparseVideoConfig(**fields)


@given(st.floats(0, 0.99), st.integers(1, 100))
def test_a_fraction_of_steps_is_rounded_up(fraction, steps):
    count = SparseVideoConfig(warmup_steps=fraction).resolve(PRESET, 10**6).warmup_count(steps)
    assert count - 1 < fraction * steps + 1e-6 and count >= fraction * steps - 1e-6
    assert count == math.ceil(fraction * steps - 1e-9)


def test_presets_fill_what_is_open_and_nothing_else():
    resolved = SparseVideoConfig(density=0.5).resolve(PRESET, 100)
    assert (resolved.density, resolved.warmup_steps, resolved.dense_layers) == (0.5, 0.2, 0.03)
    assert resolved.dense_reason is None
    assert resolved.warmup_count(50) == 10 and resolved.dense_layer_count(40) == 1
    assert SparseVideoConfig().resolve(PRESET, 75_600).dense_reason is None
    assert "7,392 video tokens" in SparseVideoConfig().resolve(PRESET, 7_392).dense_reason


def test_counts_that_do_not_fit_are_refused_with_both_numbers():
    resolved = SparseVideoConfig(density=0.5, warmup_steps=5, dense_layers=3).resolve(PRESET, 100)
    with pytest.raises(ValueError, match=r"warmup_steps=5.*4 steps"):
        resolved.warmup_count(4)
    with pytest.raises(ValueError, match=r"dense_layers=3.*2 layers"):
        resolved.dense_layer_count(2)
    with pytest.raises(ValueError, match="whole number of steps"):
        SparseVideoConfig(density=0.5).resolve(PRESET, 100).warmup_count(None)


def test_save_and_load(tmp_path):
    config = SparseVideoConfig.from_svg(0.3, sink="svg", warmup_steps=3)
    config.save(tmp_path / "config.json")
    assert SparseVideoConfig.load(tmp_path / "config.json") == config
    (tmp_path / "other.json").write_text('{"sparsity": 0.3}')
    with pytest.raises(ValueError, match=r"other.json.*sparsity"):
        SparseVideoConfig.load(tmp_path / "other.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json"):
        SparseVideoConfig.load(tmp_path / "broken.json")
