"""Comparisons shared by the kernels' tests."""

import numpy as np


def to_numpy(x) -> np.ndarray:
    """f32 numpy of a torch or JAX array."""
    if hasattr(x, "detach"):
        return x.detach().float().cpu().numpy()
    return np.asarray(x, dtype=np.float32)


def assert_close(name: str, got, want, tolerance: float) -> None:
    """Relative RMS of the difference, with the tensor's name in the message."""
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name}: {np.sum(~np.isfinite(got))} values are not finite"
    error = float(np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30))
    assert error <= tolerance, f"{name}: relative RMS {error:.2e}, allowed {tolerance:.0e}"
