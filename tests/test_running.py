"""Scripts written for CUDA, run as they are on the XLA device; and everything as before when they are done."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers

from benchmarks.tiny_pipelines import image, make
from torch_svg import SparseVideoConfig, cli, patches, running
from torch_svg.running import as_tpu, run_script
from torch_svg.testing import random_tiny_wan_pipeline, tiny_wan_folder

pytest.importorskip("torch_xla")

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
SIZE = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture
def notes():
    return []


@pytest.fixture
def on_tpu(notes):
    with as_tpu(note=notes.append) as run:
        yield run


# what `as_tpu` may replace
OWNERS = (
    torch, torch.cuda, torch.accelerator, torch.amp.autocast_mode.autocast, torch.utils._device.DeviceContext,
    torch.nn.Module, diffusers.DiffusionPipeline, diffusers.ModelMixin, diffusers.WanPipeline,
    transformers.PreTrainedModel, diffusers.hooks, diffusers.hooks.group_offloading,
)


def differences(before):
    """Attributes that are not what they were; what modules import, or transformers adds to torch, does not count."""
    return [
        f"{owner.__name__}.{name}"
        for owner, attributes in zip(OWNERS, before, strict=True)
        for name in attributes.keys() | (owner.__dict__.keys() if isinstance(owner, type) else set()) - {"smart_apply"}
        if owner.__dict__.get(name) is not attributes.get(name)
    ]


# what "cuda" means


def test_cuda_devices_are_the_xla_device(on_tpu):
    made = [
        torch.zeros(2, device="cuda"),
        torch.arange(3, device=torch.device("cuda", 0)),
        torch.tensor([1.0], device="cuda:0"),
        torch.zeros(2).to("cuda"),
        torch.zeros(2).to(device="cuda", dtype=torch.bfloat16),
        torch.zeros(2).cuda(),
        torch.zeros(2).cuda(0),
        torch.nn.Linear(2, 2).to("cuda").weight,
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2, device="cuda").weight,
        torch.zeros_like(torch.zeros(2), device="cuda"),
    ]
    with torch.device("cuda"):
        made.append(torch.ones(2))
    assert [tensor.device.type for tensor in made] == ["xla"] * len(made)
    assert made[4].dtype == torch.bfloat16
    assert torch.zeros(2).device.type == "cpu" and torch.device("cuda").type == "cuda"


def test_the_default_device_is_taken_back():
    with as_tpu(note=lambda text: None):
        torch.set_default_device("cuda")
        assert torch.ones(2).device.type == "xla"
    assert torch.ones(2).device.type == "cpu" and torch.get_default_device().type == "cpu"


def test_numbers_are_those_of_the_host(on_tpu):
    expected = torch.randn(5, generator=torch.Generator("cpu").manual_seed(3))
    for generator in (torch.Generator("cuda"), torch.Generator(device=torch.device("cuda:0")), torch.Generator("xla")):
        assert isinstance(generator, torch.Generator)
        drawn = torch.randn(5, generator=generator.manual_seed(3), device="cuda")
        assert drawn.device.type == "xla" and torch.equal(drawn.cpu(), expected)
    torch.manual_seed(4)
    expected = torch.rand(5), torch.randn(2, 3)
    torch.cuda.manual_seed_all(4)
    on_device = torch.rand(5, device="cuda"), torch.randn_like(torch.zeros(2, 3, device="cuda"))
    for drawn, want in zip(on_device, expected, strict=True):
        assert drawn.device.type == "xla" and torch.equal(drawn.cpu(), want)
    assert isinstance(torch.default_generator, torch.Generator)


def test_torch_cuda_answers_scripts_and_tells_libraries_the_truth(on_tpu):
    from accelerate.utils import is_cuda_available

    assert torch.cuda.is_available() and torch.cuda.device_count() >= 1
    assert not is_cuda_available() and not transformers.utils.is_torch_cuda_available()
    assert torch.cuda.is_bf16_supported() and torch.cuda.get_device_capability()[0] >= 8
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() >= 0 and torch.cuda.get_device_properties(0).total_memory >= 0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0


def test_autocast_is_the_device_s_and_float16_becomes_bfloat16(on_tpu, notes):
    linear, x = torch.nn.Linear(4, 4).to("cuda"), torch.ones(1, 4, device="cuda")
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            assert linear(x).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert linear(x).dtype == torch.float32
    assert notes == ["float16 becomes bfloat16, the half precision that a TPU multiplies"]


def test_torch_compile_is_passed_over(on_tpu, notes):
    linear = torch.nn.Linear(2, 2)
    assert torch.compile(linear, mode="max-autotune", fullgraph=True) is linear
    assert torch.compile(dynamic=True)(abs) is abs
    linear.compile()
    assert len(notes) == 1 and "XLA compiles the whole graph" in notes[0]


def test_saved_tensors_load_from_a_cuda_machine(on_tpu, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", map_location="cuda", weights_only=True)
    assert torch.equal(loaded["weight"].to("cuda").cpu(), torch.ones(2))


def test_nothing_is_left_behind():
    before = [dict(owner.__dict__) for owner in OWNERS]
    pipe = random_tiny_wan_pipeline(layers=1)
    with pytest.raises(KeyError), as_tpu(note=lambda text: None):
        assert {"torch.Generator", "DiffusionPipeline.from_pretrained"} < set(differences(before))
        inside = random_tiny_wan_pipeline(layers=1)
        inside.set_progress_bar_config(disable=True)
        inside.enable_model_cpu_offload()
        inside("a red ball", **SIZE)
        assert type(inside.transformer.blocks[0].attn1.processor).__name__ == "SparseVideoAttnProcessor"
        raise KeyError
    assert differences(before) == []
    assert not any(patch.applied for patch in patches.list_patches())
    assert type(inside.transformer.blocks[0].attn1.processor) is type(pipe.transformer.blocks[0].attn1.processor)
    for module in inside.transformer, inside.text_encoder:
        assert not module._forward_hooks and not module._forward_pre_hooks
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).to("cuda")


def test_patches_that_were_applied_before_stay():
    patches.apply(names=["wan_vae_slices"])
    try:
        with as_tpu(note=lambda text: None):
            pipe = random_tiny_wan_pipeline(layers=1).to("cuda")
            pipe.set_progress_bar_config(disable=True)
            pipe("a red ball", **{**SIZE, "num_frames": 1, "num_inference_steps": 1, "output_type": "latent"})
            assert sum(patch.applied for patch in patches.list_patches()) > 1
        assert [patch.name for patch in patches.list_patches() if patch.applied] == ["wan_vae_slices"]
    finally:
        patches.revert()


# placements


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    random_tiny_wan_pipeline(layers=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
def test_offloading_becomes_a_placement(offload, on_tpu, notes, wan_folder):
    pipe = diffusers.WanPipeline.from_pretrained(wan_folder)
    arguments = {"onload_device": torch.device("cuda")} if offload == "enable_group_offload" else {}
    getattr(pipe, offload)(**arguments)
    parts = ("text_encoder", "transformer", "vae")
    places = {name: next(getattr(pipe, name).parameters()).device.type for name in parts}
    assert places == {"text_encoder": "cpu", "transformer": "xla", "vae": "xla"}
    assert pipe._execution_device.type == "xla"
    assert notes == [
        f"{offload} becomes a placement: text_encoder on the host, everything else on the XLA device"
    ]
    embeds, _ = pipe.encode_prompt("a red ball", device=torch.device("cuda"))
    assert embeds.device.type == "xla"


def test_device_maps_and_dtypes(on_tpu, notes, wan_folder):
    pipe = diffusers.WanPipeline.from_pretrained(wan_folder, torch_dtype=torch.float16, device_map="balanced")
    assert pipe.transformer.dtype == torch.bfloat16
    assert {next(part.parameters()).device.type for part in (pipe.transformer, pipe.text_encoder)} == {"xla"}
    assert sorted(notes) == [
        "device_map='balanced' becomes a placement: all of WanPipeline on the XLA device",
        "float16 becomes bfloat16, the half precision that a TPU multiplies",
    ]
    vae = diffusers.AutoencoderKLWan.from_pretrained(wan_folder, subfolder="vae", device_map="cuda")
    assert vae.device.type == "xla" and vae.dtype == torch.float32
    transformer = diffusers.WanTransformer3DModel.from_pretrained(wan_folder, subfolder="transformer")
    diffusers.hooks.apply_group_offloading(transformer, onload_device=torch.device("cuda"))
    transformer.set_attention_backend("flash")
    assert transformer.device.type == "xla" and "attention backend 'flash' is passed over" in notes[-1]


def test_an_unserved_transformer_keeps_its_attention_and_is_told(on_tpu, notes):
    transformer = torch.nn.Linear(1, 1).to("cuda")
    pipe = random_tiny_wan_pipeline(layers=1)
    pipe.transformer = transformer
    on_tpu._prepare(pipe)
    assert len(notes) == 1 and notes[0].startswith("attention stays as it is: ") and "Linear" in notes[0]


# pipelines


def test_pipelines_get_sparse_attention_patches_and_a_report(notes, tmp_path):
    config = SparseVideoConfig(density=0.6, warmup_steps=1, dense_layers=0)
    with as_tpu(config, note=notes.append) as run:
        pipe = random_tiny_wan_pipeline(layers=1).to("cuda")
        pipe.set_progress_bar_config(disable=True)
        for _ in range(2):
            pipe("a red ball", **{**SIZE, "num_frames": 9, "output_type": "latent"})
    first, second = run.calls
    assert first.pipeline == "WanPipeline" and first.report.dense_steps == [0] and first.report.grid == (3, 4, 6)
    assert first.compiles > 0 == second.compiles
    assert "host_timesteps" in run.patches
    assert "compiling WanTransformer3DModel for 1 x 4 x 3 x 8 x 12, a moment the first time" in notes
    assert sum(note.startswith("compiling") for note in notes) == 1
    assert any(note.startswith("compiled WanTransformer3DModel in ") for note in notes)
    written = run.save(tmp_path / "report")
    facts = json.loads(written.read_text())
    assert len(facts["calls"]) == 2 and facts["calls"][0]["report"]["dense_steps"] == [0]
    assert facts["config"]["density"] == 0.6 and "torch_xla" in facts["versions"]
    assert (tmp_path / "report/routing.png").stat().st_size > 2000


def test_a_pipeline_left_on_the_host_is_left_alone(on_tpu, notes):
    pipe = random_tiny_wan_pipeline(layers=1)
    pipe.set_progress_bar_config(disable=True)
    pipe("a red ball", **{**SIZE, "num_frames": 1, "output_type": "latent"})
    assert on_tpu.calls == [] and notes == []


def test_minutes_follow_the_number_of_blocks(monkeypatch):
    monkeypatch.setattr(running.bridge, "platform", lambda: "tpu")
    small, large = (torch.nn.Module() for _ in range(2))
    small.blocks = torch.nn.ModuleList([torch.nn.Identity()])
    large.blocks = torch.nn.ModuleList([torch.nn.Identity() for _ in range(40)])
    assert running._minutes(small) == "about 1 minute" and running._minutes(large) == "about 3 minutes"


# running a script


def write(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_script_runs_as_python_runs_it(tmp_path, capfd):
    (tmp_path / "beside.py").write_text("number = 7\n")
    path = write(
        tmp_path,
        '"""Its own docstring."""\nimport sys, __main__\nfrom beside import number\n'
        "print(__name__, __doc__, sys.argv[1:], number, __main__.number, __file__ == sys.argv[0])\n",
    )
    before = list(sys.path), list(sys.argv), sys.modules["__main__"]
    assert run_script(path, ["--steps", "3"]) == 0
    out = capfd.readouterr().out
    assert out == "__main__ Its own docstring. ['--steps', '3'] 7 7 True\n"
    assert (list(sys.path), list(sys.argv), sys.modules["__main__"]) == before
    sys.modules.pop("beside")


def test_an_exception_keeps_the_script_s_own_traceback(tmp_path, capfd):
    text = "def inner():\n    raise LookupError('nothing there')\n\ninner()\n"
    path = write(tmp_path, text)
    assert run_script(path) == 1
    ours = capfd.readouterr().err
    theirs = subprocess.run([sys.executable, path], capture_output=True, text=True).stderr
    assert ours == theirs and ours.startswith("Traceback") and "line 2, in inner" in ours


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("", None), ("'stopped'", "stopped")])
def test_the_exit_status_is_the_script_s(tmp_path, code, status):
    with pytest.raises(SystemExit) as ended:
        run_script(write(tmp_path, f"import sys\nsys.exit({code})\n"))
    assert ended.value.code == status


def test_a_syntax_error_is_told_as_python_tells_it(tmp_path, capfd):
    path = write(tmp_path, "print('a'\n")
    assert run_script(path) == 1
    assert capfd.readouterr().err == subprocess.run([sys.executable, path], capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--density", "2"], "density is a share of query-key pairs"),
        (["--dense", "--density", "0.3"], "--dense goes with neither"),
        (["--preset", "missing.json"], "missing.json"),
        ([], "no_such.py"),
    ],
)
def test_a_wrong_call_is_refused(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *flags, "no_such.py"])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_flags_make_the_config(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(running, "run_script", lambda *args, **kwargs: asked.append((args, kwargs)) or 0)
    SparseVideoConfig(density=0.7, sink="none").save(tmp_path / "mine.json")
    for flags in (
        [], ["--dense"], ["--density", "0.4"], ["--preset", "published"],
        ["--preset", str(tmp_path / "mine.json"), "--dry-run", "--report", "there"],
    ):
        assert cli.main(["run", *flags, "script.py", "--density", "of its own"]) == 0
    assert all(args == ("script.py", ["--density", "of its own"]) for args, _ in asked)
    configs = [kwargs["config"] for _, kwargs in asked]
    assert configs == [
        SparseVideoConfig(), SparseVideoConfig(density=1.0), SparseVideoConfig(density=0.4),
        SparseVideoConfig(min_tokens=0), SparseVideoConfig(density=0.7, sink="none"),
    ]
    assert [kwargs["dry_run"] for _, kwargs in asked] == [False] * 4 + [True]
    assert asked[-1][1]["report"] == "there" and asked[0][1]["report"] == "torch_svg_report"


# whole scripts


# script -> (the model it names, the pipeline that stands for it)
MODELS = {
    "wan_text_to_video": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", None),
    "wan_image_to_video": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "wan_i2v"),
}
# compiling for XLA:CPU takes its time: one script stands for the others by default
BY_DEFAULT = ("wan_text_to_video",)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in which each model's id is a folder, as `from_pretrained` looks for it."""
    return tmp_path_factory.mktemp("hub")


def working_folder(hub, name, tmp_path, monkeypatch):
    model, case = MODELS[name]
    folder = hub / model
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if case is None:
            folder.symlink_to(tiny_wan_folder())
        else:
            make(case).save_pretrained(folder)
    for part in hub.iterdir():
        (tmp_path / part.name).symlink_to(part)
    image().save(tmp_path / "first_frame.png")
    monkeypatch.chdir(tmp_path)


def for_cpu(text):
    """The script as one would write it for a machine without an accelerator."""
    for offload in ("enable_model_cpu_offload()", "enable_sequential_cpu_offload()"):
        text = text.replace(offload, 'to("cuda")')
    return text.replace('"cuda"', '"cpu"')


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in MODELS]
)
def test_a_script_makes_the_frames_that_it_makes_on_a_cpu(name, hub, tmp_path, monkeypatch, capfd):
    working_folder(hub, name, tmp_path, monkeypatch)
    script = SCRIPTS / f"{name}.py"
    assert '"cuda"' in script.read_text() or "offload" in script.read_text()
    printed, frames = on_cpu(script, tmp_path, capfd)
    assert run_script(script, report=tmp_path / "report") == 0
    out, err = capfd.readouterr()
    assert out == printed, "what the script prints"
    on_xla = np.load(tmp_path / "frames.npy")
    assert on_xla.shape == frames.shape and frames.std() > 0.01
    assert np.abs(on_xla - frames).max() < 1e-3
    assert (tmp_path / "output.mp4").stat().st_size > 500
    facts = json.loads((tmp_path / "report/run.json").read_text())
    assert [call["pipeline"] for call in facts["calls"]] and facts["patches"]
    assert "torch-svg: report in " in err
    assert ("becomes a placement" in err) == ("offload" in script.read_text())


def on_cpu(script, folder, capfd):
    """What a script prints, and its frames, with plain diffusers on the CPU."""
    capfd.readouterr()
    argv, sys.argv = sys.argv, [str(script)]
    try:
        exec(compile(for_cpu(script.read_text()), str(script), "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = argv
    sys.stdout.flush()
    frames = np.load(folder / "frames.npy")
    for name in ("frames.npy", "output.mp4"):
        (folder / name).unlink()
    return capfd.readouterr().out, frames
