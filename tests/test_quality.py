"""The metrics against closed forms."""

import math

import numpy as np
import pytest

from torch_svg.quality import frame_psnr, video_psnr, video_ssim


def test_psnr_is_the_mean_over_frames_not_of_the_clip():
    reference = np.zeros((2, 8, 9, 3))
    video = reference + np.array([0.1, 0.01])[:, None, None, None]
    assert frame_psnr(video, reference) == pytest.approx([20, 40])
    assert video_psnr(video, reference) == pytest.approx(30)


def test_equal_videos():
    video = np.random.default_rng(0).random((3, 16, 17, 3))
    assert math.isinf(video_psnr(video, video))
    assert video_ssim(video, video) == pytest.approx(1)
    assert video_ssim(1 - video, video) < 0


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 8, 8, 3\) and \(3, 8, 8, 3\)"):
        video_psnr(np.zeros((2, 8, 8, 3)), np.zeros((3, 8, 8, 3)))
