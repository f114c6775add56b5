"""How close a sparse video is to the dense one of the same seed: the metrics, and a pipeline's comparison."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from .config import SparseVideoConfig

# limited-range luma and chroma of BT.601, what FFmpeg makes of RGB unless told otherwise
_YUV = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]]) / 255


def video_psnr(video, reference) -> float:
    """Mean over frames of the PSNR of each frame, RGB, in dB: the measure of the SVG papers.

    Not FFmpeg's aggregate over a clip in YUV, which the figures of other projects may be: that is `video_psnr_yuv`.

    Args:
        video, reference: (frames, height, width, 3) in [0, 1].

    Returns:
        dB; infinite where all frames are equal.
    """
    return float(np.mean(frame_psnr(video, reference)))


def frame_psnr(video, reference) -> np.ndarray:
    """(frames,) PSNR of every frame in dB."""
    video, reference = _pair(video, reference)
    return _decibels(((video - reference) ** 2).mean(axis=(1, 2, 3)))


def video_psnr_yuv(video, reference) -> float:
    """PSNR of the whole clip's squared error in YUV 4:2:0, in dB: FFmpeg's `psnr` filter, its "average".

    Google's figures for sparse attention are of this kind. It is higher than the mean over frames in RGB: chroma,
    averaged over 2 x 2 pixels, counts a third, and the range of video levels is narrower than the peak of 255.

    Args:
        video, reference: (frames, height, width, 3) in [0, 1], sides even.
    """
    video, reference = _pair(video, reference)
    difference = (video - reference) @ _YUV.T
    frames, height, width, _ = difference.shape
    if height % 2 or width % 2:
        raise ValueError(f"4:2:0 needs even sides, got {height} x {width}; crop both videos by a pixel")
    chroma = difference[..., 1:].reshape(frames, height // 2, 2, width // 2, 2, 2).mean(axis=(2, 4))
    # planes weigh by their samples: four of luma to one each of chroma
    error = (4 * (difference[..., 0] ** 2).mean() + (chroma**2).mean(axis=(0, 1, 2)).sum()) / 6
    return float(_decibels(error))


def video_ssim(video, reference) -> float:
    """Mean over frames of the structural similarity (scikit-image, 7 x 7 windows, RGB), in [-1, 1].

    Args:
        video, reference: (frames, height, width, 3) in [0, 1], sides of at least 7 pixels.
    """
    from skimage.metrics import structural_similarity

    video, reference = _pair(video, reference)
    frames = zip(video, reference, strict=True)
    return float(np.mean([structural_similarity(a, b, channel_axis=-1, data_range=1.0) for a, b in frames]))


def visual_information(video, reference) -> float:
    """Mean over frames of the visual information fidelity (Sheikh and Bovik 2006; torchmetrics): 1 for equal videos.

    A perceptual measure without learned weights, so that it needs no download.

    Args:
        video, reference: (frames, height, width, 3) in [0, 1], sides of at least 41 pixels.
    """
    from torchmetrics.functional.image import visual_information_fidelity

    frames = [torch.from_numpy(v).permute(0, 3, 1, 2) * 255 for v in _pair(video, reference)]
    return visual_information_fidelity(*frames).item()


@dataclass(frozen=True)
class VideoComparison:
    """One prompt and seed, dense and sparse.

    Attributes:
        psnr: `video_psnr`, dB.
        psnr_yuv: `video_psnr_yuv`, dB.
        ssim: `video_ssim`.
        perceptual: `visual_information`.
        psnr_by_frame: `frame_psnr`, dB.
        pair_density: Share of the video query-key pairs computed, dense steps and layers included.
        seconds_dense, seconds_sparse: Wall time of the pipeline calls, compilation included where it happened.
    """

    prompt: str
    seed: int
    psnr: float
    psnr_yuv: float
    ssim: float
    perceptual: float
    psnr_by_frame: list[float]
    pair_density: float
    seconds_dense: float
    seconds_sparse: float


METRICS = ("psnr", "psnr_yuv", "ssim", "perceptual", "pair_density")


@dataclass
class Comparison:
    """What `compare` found.

    Attributes:
        config: The sparse runs' settings.
        rows: One for every prompt and seed.
        videos: (dense, sparse) of each row, (frames, height, width, 3) in [0, 1].
    """

    config: SparseVideoConfig
    rows: list[VideoComparison]
    videos: list[tuple[np.ndarray, np.ndarray]]

    @property
    def medians(self) -> dict[str, float]:
        return {name: float(np.median([getattr(row, name) for row in self.rows])) for name in METRICS}

    def save(self, folder, fps: int = 16) -> None:
        """Writes ``comparison.json``, ``frames.png`` (the PSNR of every frame), and a video of each row, dense beside
        sparse, ``NUMBER.mp4``."""
        import imageio.v2 as imageio

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "config": self.config.to_dict(),
            "medians": self.medians,
            "rows": [asdict(row) for row in self.rows],
        }
        (folder / "comparison.json").write_text(json.dumps(facts, indent=2) + "\n")
        self._save_curves(folder / "frames.png")
        for number, pair in enumerate(self.videos):
            both = (np.concatenate(pair, axis=2).clip(0, 1) * 255).round().astype(np.uint8)
            # macro_block_size 1: no resizing of small or odd pictures
            imageio.mimwrite(folder / f"{number}.mp4", both, fps=fps, macro_block_size=1, quality=8)

    def _save_curves(self, path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.5), dpi=110)
        axes = figure.add_subplot()
        for number, row in enumerate(self.rows):
            axes.plot(row.psnr_by_frame, label=f"{number}: {row.prompt[:40]}, seed {row.seed}")
        axes.set_xlabel("frame")
        axes.set_ylabel("PSNR against dense, RGB, dB")
        axes.legend(fontsize=7)
        figure.savefig(path, bbox_inches="tight")


def compare(pipe, prompts, config: SparseVideoConfig | None = None, seeds=(0,), **settings) -> Comparison:
    """Generates every prompt and seed dense and sparse and measures how far apart the videos are.

    Args:
        pipe: A diffusers video pipeline whose transformer is served, on any device.
        prompts: One prompt or several.
        config: Of the sparse runs.
        seeds: Seeds of a CPU generator, which gives the same noise on every device.
        **settings: Of the pipeline call: height, width, num_frames, num_inference_steps, ...

    Raises:
        NotImplementedError: The transformer is not served.
        ValueError: No prompt or no seed.
    """
    from .enabling import disable, sparse_attention

    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or not list(seeds):
        raise ValueError(f"expected at least one prompt and one seed, got {prompts!r} and {list(seeds)!r}")
    config = config or SparseVideoConfig()
    disable(pipe)
    rows, videos = [], []
    for prompt in prompts:
        for seed in seeds:
            dense, seconds_dense = generate(pipe, prompt, seed, **settings)
            with sparse_attention(pipe, config) as processor:
                sparse, seconds_sparse = generate(pipe, prompt, seed, **settings)
                pair_density = processor.report().pair_density
            measured = measure(sparse, dense)
            rows.append(
                VideoComparison(
                    prompt,
                    seed,
                    **measured,
                    pair_density=pair_density,
                    seconds_dense=seconds_dense,
                    seconds_sparse=seconds_sparse,
                )
            )
            videos.append((dense, sparse))
    return Comparison(config, rows, videos)


def measure(video, reference) -> dict[str, float | list[float]]:
    """All metrics of a sparse video against its dense twin, under the names of `VideoComparison`."""
    return {
        "psnr": video_psnr(video, reference),
        "psnr_yuv": video_psnr_yuv(video, reference),
        "ssim": video_ssim(video, reference),
        "perceptual": visual_information(video, reference),
        "psnr_by_frame": frame_psnr(video, reference).tolist(),
    }


def generate(pipe, prompt: str, seed: int, **settings) -> tuple[np.ndarray, float]:
    """A video, (frames, height, width, 3) in [0, 1], and the seconds that the pipeline took."""
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    frames = pipe(prompt=prompt, generator=generator, output_type="np", **settings).frames[0]
    return np.asarray(frames), time.perf_counter() - start


def _decibels(error):
    with np.errstate(divide="ignore"):
        return -10 * np.log10(error)


def _pair(video, reference):
    video, reference = np.asarray(video, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if video.ndim != 4 or video.shape != reference.shape:
        raise ValueError(
            "expected two videos of one shape (frames, height, width, channels), got "
            f"{video.shape} and {reference.shape}"
        )
    return video, reference
