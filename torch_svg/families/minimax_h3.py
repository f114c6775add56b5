"""MiniMax-H3: packed [text | conditions | audio | video] without masks; the video's grid follows from its positions."""

import numpy as np

from ..grid import TokenGrid
from .base import Facts, Family, host_values, preset_as_wan


def _grid(transformer, inputs) -> TokenGrid:
    # (tokens, 3): time, row, column
    positions = host_values(inputs["position_ids"])
    tokens = len(positions)
    video = host_values(inputs["video_indices"])
    # the last run of video tokens without a gap; conditions stand further ahead
    gaps = np.flatnonzero(np.diff(video) != 1)
    run = tokens - int(video[gaps[-1] + 1 if len(gaps) else 0])
    times = positions[tokens - run :, 0]
    per_frame = int((times[::-1] == times[-1]).cumprod().sum())
    frame = positions[tokens - per_frame :, 1:]
    height = len(np.unique(frame[:, 0]))
    frames = 1
    while (frames + 1) * per_frame <= run:
        start = tokens - (frames + 1) * per_frame
        block = positions[start : start + per_frame]
        earlier = block[0, 0] < positions[start + per_frame, 0] and (block[:, 0] == block[0, 0]).all()
        if not (earlier and np.array_equal(block[:, 1:], frame)):
            break
        frames += 1
    # rows from top to bottom, all of one width
    regular = np.array_equal(frame[:, 0], np.unique(frame[:, 0]).repeat(max(1, per_frame // height)))
    if video[-1] != tokens - 1 or not regular:
        raise NotImplementedError(
            "MiniMax-H3's video must be the last of the sequence, frame by frame, as its pipeline packs it: "
            f"got video_indices that end at {video[-1]} of {tokens} tokens and {per_frame} tokens in {height} rows"
        )
    others = tokens - frames * per_frame
    return TokenGrid(frames, height, per_frame // height, text_tokens=others, text_first=others > 0)


MINIMAX_H3 = Family(
    name="minimax_h3",
    transformers={"MiniMaxH3Transformer3DModel": Facts("MiniMax-H3", (128,))},
    video_attention=r"transformer_blocks\.\d+\.attn",
    grid=_grid,
    preset=preset_as_wan,
    text="before the video",
    others="conditions and audio before the video",
    grid_source="position_ids and video_indices, read from the device once a generation",
)
