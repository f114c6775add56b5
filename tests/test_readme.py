"""README says what is true: its snippets run, its links exist, its table of versions is the tested one."""

import re
from pathlib import Path

import pytest
import torch

from torch_svg import bridge
from torch_svg.testing import random_tiny_wan_pipeline

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_snippets_run_in_order_on_a_tiny_pipeline(monkeypatch, tmp_path):
    import diffusers

    import torch_svg.patches

    pipe = random_tiny_wan_pipeline(layers=1)
    pipe.set_progress_bar_config(disable=True)
    call = type(pipe).__call__

    def small_call(self, *args, **kwargs):
        return call(self, *args, **{"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 4, **kwargs})

    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", classmethod(lambda cls, *a, **k: pipe))
    monkeypatch.setattr(type(pipe), "__call__", small_call)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(snippets) == 3
    # with 3 latent frames the first-frame sink alone is a third of the pairs
    snippets[1] = snippets[1].replace("density=0.3", "density=0.4")
    names = {}
    try:
        for snippet in snippets:
            exec(snippet, names)
    finally:
        torch_svg.patches.revert()
    assert names["report"].dense_steps == [0]
    assert (tmp_path / "outputs/report/routing.png").exists()


def test_the_example_family_of_the_docs_is_one():
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), flags=re.S).group(1)
    names = {}
    exec(snippet, names)
    transformer = random_tiny_wan_pipeline(layers=2).transformer
    assert list(names["family"].video_attention_modules(transformer)) == ["blocks.0.attn1", "blocks.1.attn1"]
    latents = {"hidden_states": torch.empty(1, 4, 3, 10, 14)}
    assert names["family"].grid(transformer, latents).tokens == 3 * 5 * 7


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_versions_are_the_tested_ones():
    for name, version in bridge.TESTED_VERSIONS.items():
        assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\| {re.escape(version)} ", README, flags=re.M), name


@pytest.mark.parametrize("command", ["demo", "test", "lint", "test-slow"])
def test_make_targets_exist(command):
    assert f"make {command}" in README
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), flags=re.M)


def test_it_stays_short():
    assert len(README.splitlines()) < 180
