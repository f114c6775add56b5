"""The report of a run: its figures against a run that is known, its JSON, and its page."""

import base64
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig, enable
from torch_svg.pattern import pair_density
from torch_svg.testing import random_tiny_wan_pipeline

STEPS, LAYERS, HEADS = 5, 2, 2


@pytest.fixture(scope="module")
def report():
    """3 x 6 x 6 tokens, one dense step of five, one dense layer of two, two guidance branches."""
    pipe = random_tiny_wan_pipeline(layers=LAYERS, heads=HEADS)
    pipe.set_progress_bar_config(disable=True)
    processor = enable(pipe, SparseVideoConfig(density=0.5, warmup_steps=1, dense_layers=1))
    settings = {"height": 48, "width": 48, "num_frames": 9, "num_inference_steps": STEPS}
    pipe("a red ball", negative_prompt="a box", guidance_scale=3.0, max_sequence_length=16, **settings)
    return processor.report()


def test_its_figures(report):
    assert report.grid == (3, 6, 6) and report.kinds.shape == (2 * STEPS, LAYERS, HEADS)
    assert report.steps.tolist() == [step for step in range(STEPS) for _ in range(2)]
    sparse = [pair_density(pattern, report.plan.grid) for pattern in report.plan.patterns][:2]
    assert report.density_by_forward[:2].tolist() == [1, 1]
    # the dense layer, and a layer of one of two sparse kinds
    assert (1 + min(sparse)) / 2 - 1e-6 <= report.density_by_forward[2:].min()
    assert report.density_by_forward[2:].max() <= (1 + max(sparse)) / 2 + 1e-6
    assert report.density_by_forward.mean() == pytest.approx(report.pair_density)
    assert report.blocks is None and report.compiles is None


def test_json_holds_everything(report, tmp_path):
    report.save(tmp_path)
    facts = json.loads((tmp_path / "report.json").read_text())
    assert set(facts) == set(vars(report))
    assert facts["plan"]["patterns"][1]["order"] == "temporal"
    assert np.array(facts["kinds"]).shape == report.kinds.shape


def test_the_page_needs_nothing_else(report, tmp_path):
    from matplotlib.image import imread

    report.save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page and "url(" not in page and "<script" not in page
    for source in sources:
        picture = imread(io.BytesIO(base64.b64decode(source.split(",")[1])))
        assert min(picture.shape[:2]) > 200 and picture[..., :3].std() > 0.02
    for said in ("3 x 6 x 6 tokens", f"{report.pair_density:.1%}", "dense steps"):
        assert said in page


def test_words_of_a_reason_are_no_markup(report):
    from dataclasses import replace

    from torch_svg.report_page import report_page

    assert "&lt;b&gt;" in report_page(replace(report, fallbacks={"<b>": 1}))


def test_a_processor_that_never_ran(tmp_path):
    report = SparseVideoAttnProcessor().report()
    assert report.pair_density == 1 and report.kinds.size == 0
    report.save(tmp_path)
    assert "nothing sparse ran" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on the path")
def test_a_browser_shows_the_page_without_a_request(report, tmp_path):
    from matplotlib.image import imread

    report.save(tmp_path)
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2600", "--hide-scrollbars",
        # no host but this page's file can be reached
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={tmp_path / 'page.png'}",
        f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    picture = imread(tmp_path / "page.png")
    assert picture.shape[1] == 1280
    # there is something to see in every stretch of the page where a picture stands
    assert all(part[..., :3].std() > 0.05 for part in np.array_split(picture, 4))
