"""Block sizes that the TPU compiler's schedule favours; written by `python -m benchmarks.tune --write`.

(chip, head_dim, frames, tokens per frame): (unit, query granules, full granules, edge granules)
"""

TABLE = {
    ("v6e", 64, 11, 4080): (16, 16, (16, 7, 1), 17),
    ("v6e", 128, 21, 3600): (16, 9, (9, 3, 1), 5),
}
