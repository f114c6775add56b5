"""How close a sparse video is to the dense one of the same seed."""

from __future__ import annotations

import numpy as np


def video_psnr(video, reference) -> float:
    """Mean over frames of the PSNR of each frame, RGB, in dB: the measure of the SVG papers.

    Not FFmpeg's aggregate over a clip in YUV, which the figures of other projects may be.

    Args:
        video, reference: (frames, height, width, 3) in [0, 1].

    Returns:
        dB; infinite where all frames are equal.
    """
    return float(np.mean(frame_psnr(video, reference)))


def frame_psnr(video, reference) -> np.ndarray:
    """(frames,) PSNR of every frame in dB."""
    video, reference = _pair(video, reference)
    error = ((video - reference) ** 2).mean(axis=(1, 2, 3))
    with np.errstate(divide="ignore"):
        return -10 * np.log10(error)


def video_ssim(video, reference) -> float:
    """Mean over frames of the structural similarity (scikit-image, 7 x 7 windows, RGB), in [-1, 1].

    Args:
        video, reference: (frames, height, width, 3) in [0, 1], sides of at least 7 pixels.
    """
    from skimage.metrics import structural_similarity

    video, reference = _pair(video, reference)
    frames = zip(video, reference, strict=True)
    return float(np.mean([structural_similarity(a, b, channel_axis=-1, data_range=1.0) for a, b in frames]))


def _pair(video, reference):
    video, reference = np.asarray(video, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if video.ndim != 4 or video.shape != reference.shape:
        raise ValueError(
            "expected two videos of one shape (frames, height, width, channels), got "
            f"{video.shape} and {reference.shape}"
        )
    return video, reference
