"""Block sizes that the TPU compiler's schedule favours; written by `python -m benchmarks.tune --write`.

(chip, head_dim, frames, tokens per frame): (unit, query granules, full granules, edge granules)
"""

TABLE = {}
