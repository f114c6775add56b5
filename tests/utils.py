"""Comparisons that name what they compare."""

import torch


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected tensor."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30))


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Fails with the tensor's name when its relative RMS error is above the tolerance, or it is not finite."""
    assert actual.shape == expected.shape, f"{name}: got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error = relative_rms(actual, expected)
    assert error <= tolerance, f"{name}: relative RMS {error:.2e}, allowed {tolerance:.0e}"
