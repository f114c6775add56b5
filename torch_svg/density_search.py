"""Finds the least density that keeps the pictures, or the largest that gives the speed."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .config import SparseVideoConfig
from .enabling import disable, sparse_attention
from .quality import generate, video_psnr


@dataclass(frozen=True)
class Trial:
    """One density at one number of dense steps.

    Attributes:
        values: PSNR in dB, or speed-up, of every video that was generated; fewer than all once the outcome is clear.
        passed: At least half of the videos reach the target.
        pair_density: Mean share of pairs computed, dense steps included.
    """

    warmup_steps: int | float | None
    density: float
    values: list[float]
    passed: bool
    pair_density: float


@dataclass(frozen=True)
class DensitySearch:
    """What `tune_density` found.

    Attributes:
        config: The chosen config, or None where no density reaches the target.
        trials: All trials, in order.
        target: ("psnr", dB) or ("speedup", ratio).
    """

    config: SparseVideoConfig | None
    trials: list[Trial]
    target: tuple[str, float]

    def save(self, path) -> None:
        """Writes config and trials as JSON; ``config.save`` writes the config alone."""
        facts = {
            "target": dict([self.target]),
            "config": self.config and self.config.to_dict(),
            "trials": [asdict(trial) for trial in self.trials],
        }
        Path(path).write_text(json.dumps(facts, indent=2) + "\n")


def tune_density(
    pipe,
    prompts,
    target_psnr: float | None = None,
    target_speedup: float | None = None,
    *,
    seeds=(0,),
    config: SparseVideoConfig | None = None,
    warmup_steps=(None,),
    lowest: float = 0.15,
    tolerance: float = 0.02,
    folder=None,
    **settings,
) -> DensitySearch:
    """Bisection over density with a pipeline's own videos.

    With ``target_psnr``: the least density at which half of the videos, at least, come that close to dense. With
    ``target_speedup``: the largest density at which half of the videos, at least, are that much faster than dense, by
    the wall clock of this machine without compilation.

    Args:
        pipe: A diffusers video pipeline whose transformer is served.
        prompts: One prompt or several.
        target_psnr: dB, RGB, mean over frames (`quality.video_psnr`).
        target_speedup: Ratio of seconds, dense by sparse.
        seeds: Seeds for each prompt.
        config: Everything but density and dense steps.
        warmup_steps: Numbers of dense steps to try, each as `SparseVideoConfig.warmup_steps`; of several that reach
            the target, the one that computes the fewest pairs (for ``target_speedup``: the most) is chosen.
        lowest: Densities from here to 1 are searched.
        tolerance: The bisection ends when the bounds are this close.
        folder: Keeps dense videos and trials, so that an interrupted search goes on where it stopped. It must be the
            same call: another target, model or setting needs another folder.
        **settings: Of the pipeline call.

    Raises:
        ValueError: Not exactly one target, or a bound outside its range, or a folder of another search.
        NotImplementedError: The transformer is not served.
    """
    if (target_psnr is None) == (target_speedup is None):
        raise ValueError(f"expected one of target_psnr and target_speedup, got {target_psnr!r} and {target_speedup!r}")
    if not 0 < lowest < 1 or not 0 < tolerance < 1:
        raise ValueError(f"lowest and tolerance lie in (0, 1), got {lowest!r} and {tolerance!r}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    if not jobs:
        raise ValueError(f"expected at least one prompt and one seed, got {prompts!r} and {list(seeds)!r}")
    target = ("psnr", target_psnr) if target_speedup is None else ("speedup", target_speedup)
    config = config or SparseVideoConfig()
    disable(pipe)
    call = {"jobs": jobs, "target": target, "config": config.to_dict(), "settings": settings, "lowest": lowest}
    search = _Search(pipe, jobs, target, config, settings, _Kept(folder, call))
    found = [best for steps in warmup_steps if (best := search.bisect(steps, lowest, tolerance)) is not None]
    chosen = None
    if found:
        trial = (min if target_speedup is None else max)(found, key=lambda trial: trial.pair_density)
        chosen = config.replace(density=trial.density, warmup_steps=trial.warmup_steps)
    return DensitySearch(chosen, search.trials, target)


class _Search:
    def __init__(self, pipe, jobs, target, config, settings, kept):
        self.pipe, self.jobs, self.target, self.config, self.settings = pipe, jobs, target, config, settings
        self.kept = kept
        self.trials: list[Trial] = []

    def bisect(self, warmup_steps, lowest: float, tolerance: float) -> Trial | None:
        """The trial nearest to the target that reaches it, or None."""
        by_psnr = self.target[0] == "psnr"
        # the end that costs least work to be content with first; density 1 is dense, which needs no run for PSNR
        eager, other = (lowest, 1.0) if by_psnr else (1.0, lowest)
        first = self.run(warmup_steps, eager)
        if first.passed:
            return first
        best = None
        if not by_psnr:
            best = self.run(warmup_steps, other)
            if not best.passed:
                return None
        passing, failing = other, eager
        while abs(passing - failing) > tolerance:
            middle = round((passing + failing) / 2, 4)
            trial = self.run(warmup_steps, middle)
            if trial.passed:
                passing, best = middle, trial
            else:
                failing = middle
        return best

    def run(self, warmup_steps, density: float) -> Trial:
        trial = self.kept.trial(warmup_steps, density)
        if trial is None:
            trial = self.generate(warmup_steps, density)
            self.kept.add(trial)
        self.trials.append(trial)
        return trial

    def generate(self, warmup_steps, density: float) -> Trial:
        config = self.config.replace(density=density, warmup_steps=warmup_steps)
        values, shares = [], []
        for prompt, seed in (bar := tqdm(self.jobs, desc=f"density {density:.3f}", leave=False)):
            dense, dense_seconds = self.dense(prompt, seed)
            with sparse_attention(self.pipe, config) as processor:
                video, seconds = self.timed(prompt, seed)
                shares.append(processor.report().pair_density)
            values.append(video_psnr(video, dense) if self.target[0] == "psnr" else dense_seconds / seconds)
            bar.set_postfix(value=f"{values[-1]:.2f}")
            if self.verdict(values) is not None:
                break
        return Trial(warmup_steps, density, values, self.verdict(values), float(np.mean(shares)))

    def verdict(self, values: list[float]) -> bool | None:
        """Whether half of the videos reach the target, as soon as the rest cannot change it."""
        needed = math.ceil(len(self.jobs) / 2)
        reached = sum(value >= self.target[1] for value in values)
        if reached >= needed:
            return True
        return False if reached + len(self.jobs) - len(values) < needed else None

    def dense(self, prompt: str, seed: int) -> tuple[np.ndarray, float]:
        kept = self.kept.dense(prompt, seed)
        if kept is None:
            kept = self.timed(prompt, seed)
            self.kept.add_dense(prompt, seed, *kept)
        return kept

    def timed(self, prompt: str, seed: int) -> tuple[np.ndarray, float]:
        """A video and its seconds; where seconds count, those of a run that compiled nothing."""
        before = self.compiles()
        video, seconds = generate(self.pipe, prompt, seed, **self.settings)
        if self.target[0] == "speedup" and self.compiles() > before:
            video, seconds = generate(self.pipe, prompt, seed, **self.settings)
        return video, seconds

    def compiles(self) -> int:
        if self.pipe.device.type != "xla":
            return 0
        from . import bridge

        return bridge.metrics().compiles


class _Kept:
    """Trials and dense videos of a search: in memory, and in a folder if there is one."""

    def __init__(self, folder, call: dict):
        self.folder = None if folder is None else Path(folder)
        self.trials: dict[tuple, Trial] = {}
        self.videos: dict[tuple, tuple[np.ndarray, float]] = {}
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(call, indent=1, default=str) + "\n"
        stated = self.folder / "search.json"
        if stated.exists() and stated.read_text() != text:
            raise ValueError(f"{stated} tells of another search: use another folder, or remove this one")
        stated.write_text(text)
        self.rows = self.folder / "trials.jsonl"
        if self.rows.exists():
            for line in self.rows.read_text().splitlines():
                trial = Trial(**json.loads(line))
                self.trials[trial.warmup_steps, trial.density] = trial

    def trial(self, warmup_steps, density: float) -> Trial | None:
        return self.trials.get((warmup_steps, density))

    def add(self, trial: Trial) -> None:
        self.trials[trial.warmup_steps, trial.density] = trial
        if self.folder is not None:
            with self.rows.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")

    def dense(self, prompt: str, seed: int) -> tuple[np.ndarray, float] | None:
        if (prompt, seed) in self.videos:
            return self.videos[prompt, seed]
        path = self._path(prompt, seed)
        if path is None or not path.exists():
            return None
        with np.load(path) as stored:
            return stored["video"], float(stored["seconds"])

    def add_dense(self, prompt: str, seed: int, video: np.ndarray, seconds: float) -> None:
        path = self._path(prompt, seed)
        if path is None:
            self.videos[prompt, seed] = video, seconds
            return
        # written whole or not at all
        beside = path.with_suffix(".new.npz")
        np.savez(beside, video=video, seconds=seconds)
        beside.rename(path)

    def _path(self, prompt: str, seed: int) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"dense_{hashlib.sha256(prompt.encode()).hexdigest()[:12]}_{seed}.npz"
