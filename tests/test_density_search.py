"""The search for a density: what it chooses, when it stops, and that it goes on where it was interrupted."""

import json

import numpy as np
import pytest

from torch_svg import SparseVideoConfig, density_search
from torch_svg.density_search import tune_density
from torch_svg.quality import compare
from torch_svg.testing import random_tiny_wan_pipeline

# a first frame of three leaves no density below 0.34
LOWEST = 0.36
SETTINGS = {
    "height": 48,
    "width": 48,
    "num_frames": 9,
    "num_inference_steps": 3,
    "guidance_scale": 1.0,
    "max_sequence_length": 16,
}
PROMPTS = ("a red ball", "a blue box", "a ball")


@pytest.fixture(scope="module")
def pipe():
    pipe = random_tiny_wan_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def generated(monkeypatch):
    """Counts the videos that are generated."""
    calls, generate = [], density_search.generate

    def counted(pipe, prompt, seed, **settings):
        calls.append((prompt, seed))
        return generate(pipe, prompt, seed, **settings)

    monkeypatch.setattr(density_search, "generate", counted)
    return calls


def psnr_at(pipe, density: float) -> float:
    config = SparseVideoConfig(density=density, warmup_steps=1, dense_layers=0)
    return compare(pipe, PROMPTS, config, **SETTINGS).medians["psnr"]


def test_the_least_density_that_keeps_the_pictures(pipe):
    target = psnr_at(pipe, 0.6) - 0.01
    config = SparseVideoConfig(dense_layers=0)
    arguments = {"config": config, "warmup_steps": (1,), "lowest": LOWEST, "tolerance": 0.05}
    found = tune_density(pipe, PROMPTS, target_psnr=target, **arguments, **SETTINGS)
    assert found.config.warmup_steps == 1 and found.config.dense_layers == 0
    assert psnr_at(pipe, found.config.density) >= target
    # with random weights a higher density is not always better, so only what was tried can be held against it
    failed = [trial.density for trial in found.trials if not trial.passed]
    assert 0 < found.config.density - max(failed) <= 0.05


def test_a_target_out_of_reach_and_one_within_it(pipe):
    config = SparseVideoConfig(dense_layers=0)
    arguments = {"config": config, "warmup_steps": (1,), "lowest": LOWEST, "tolerance": 0.4, **SETTINGS}
    assert tune_density(pipe, PROMPTS, target_psnr=1e3, **arguments).config is None
    easy = tune_density(pipe, PROMPTS, target_psnr=0.0, **arguments)
    assert easy.config.density == LOWEST and len(easy.trials) == 1


def test_the_outcome_is_known_before_all_videos_are_made(pipe, generated):
    config = SparseVideoConfig(dense_layers=0)
    found = tune_density(pipe, PROMPTS, target_psnr=0.0, config=config, warmup_steps=(1,), lowest=LOWEST, **SETTINGS)
    # two of three are half of them
    assert len(found.trials[0].values) == 2 and len(generated) == 4


def test_of_two_numbers_of_dense_steps_the_cheaper_wins(pipe):
    config = SparseVideoConfig(dense_layers=0)
    found = tune_density(
        pipe, PROMPTS[:1], target_psnr=0.0, config=config, warmup_steps=(2, 1), lowest=LOWEST, **SETTINGS
    )
    assert found.config.warmup_steps == 1
    assert len({trial.pair_density for trial in found.trials}) == 2


@pytest.mark.parametrize("sparse_is_slower", [False, True])
def test_the_largest_density_that_gives_the_speed(pipe, monkeypatch, sparse_is_slower):
    """The wall clock is replaced: a sparse call takes as long as its density, or longer than a dense one."""
    running = [1.0]
    attention = density_search.sparse_attention

    class Noted:
        def __init__(self, pipe, config):
            self.inner, self.density = attention(pipe, config), config.density

        def __enter__(self):
            running[0] = 2.0 if sparse_is_slower else self.density
            return self.inner.__enter__()

        def __exit__(self, *error):
            running[0] = 1.0
            return self.inner.__exit__(*error)

    monkeypatch.setattr(density_search, "sparse_attention", Noted)
    video = np.zeros((1, 8, 8, 3))
    generate = density_search.generate

    def timed(*arguments, **settings):
        generate(*arguments, **settings)
        return video, running[0]

    monkeypatch.setattr(density_search, "generate", timed)
    config = SparseVideoConfig(dense_layers=0)
    found = tune_density(
        pipe, PROMPTS[:1], target_speedup=2.4, config=config, warmup_steps=(1,), lowest=LOWEST, **SETTINGS
    )
    if sparse_is_slower:
        assert found.config is None and not any(trial.passed for trial in found.trials)
    else:
        assert 1 / 2.4 - 0.02 <= found.config.density <= 1 / 2.4


def test_an_interrupted_search_goes_on(pipe, generated, tmp_path):
    config = SparseVideoConfig(dense_layers=0)
    arguments = {
        "target_psnr": 1e3,
        "config": config,
        "warmup_steps": (1,),
        "lowest": LOWEST,
        "tolerance": 0.3,
        **SETTINGS,
    }
    first = tune_density(pipe, PROMPTS[:2], folder=tmp_path, **arguments)
    made = len(generated)
    assert tune_density(pipe, PROMPTS[:2], folder=tmp_path, **arguments) == first and len(generated) == made
    # its last trial gone, one trial is done again, and no dense video
    rows = (tmp_path / "trials.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "trials.jsonl").write_text("".join(rows[:-1]))
    assert tune_density(pipe, PROMPTS[:2], folder=tmp_path, **arguments) == first
    assert len(generated) == made + len(first.trials[-1].values)
    with pytest.raises(ValueError, match="tells of another search"):
        tune_density(pipe, PROMPTS[:1], folder=tmp_path, **arguments)


def test_what_is_saved(pipe, tmp_path):
    config = SparseVideoConfig(dense_layers=0)
    found = tune_density(pipe, PROMPTS[0], target_psnr=0.0, config=config, warmup_steps=(1,), lowest=LOWEST, **SETTINGS)
    found.save(tmp_path / "search.json")
    facts = json.loads((tmp_path / "search.json").read_text())
    assert facts["target"] == {"psnr": 0.0} and SparseVideoConfig(**facts["config"]) == found.config
    found.config.save(tmp_path / "config.json")
    assert SparseVideoConfig.load(tmp_path / "config.json") == found.config


def test_wrong_calls(pipe):
    for wrong in ({}, {"target_psnr": 26.0, "target_speedup": 1.3}):
        with pytest.raises(ValueError, match="one of target_psnr and target_speedup"):
            tune_density(pipe, "a", **wrong)
    for wrong in ({"lowest": 0.0}, {"tolerance": 1.5}):
        with pytest.raises(ValueError, match=r"lie in \(0, 1\)"):
            tune_density(pipe, "a", target_psnr=1.0, **wrong)
    with pytest.raises(ValueError, match="at least one prompt"):
        tune_density(pipe, (), target_psnr=1.0)
