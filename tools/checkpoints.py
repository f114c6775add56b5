"""Checkpoints and logs of the training stages: one file per stage, written whole or not at all."""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn


def save_checkpoint(
    path: Path, step: int, model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, **more: nn.Module
) -> None:
    """Write the state of a stage after `step` steps, replacing the last one atomically. `more`: further modules."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"model": model, "average": average, "optimizer": optimizer, **more}
    state = {"step": step, **{name: part.state_dict() for name, part in parts.items()}}
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    average: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **more: nn.Module,
) -> int:
    """Take up a stage where it stopped; returns the number of steps done, 0 if there is no checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    average.load_state_dict(state["average"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    for name, module in more.items():
        module.load_state_dict(state[name])
    return state["step"]


def log_line(path: Path, **values: float) -> None:
    """Append one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"time": round(time.time(), 1), **values}) + "\n")
