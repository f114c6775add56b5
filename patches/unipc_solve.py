"""UniPC solves a system of two or three equations at every step, and torch_xla does it on the host."""

import torch

from .patch import Patch, redirecting


def _solve(matrix, vector, **options):
    """`torch.linalg.solve` of a few equations by elimination, as ordinary device operations.

    UniPC's matrix has rows of powers of distinct numbers (1, r, r^2), so no pivot is near 0.
    """
    count = matrix.shape[-1]
    if matrix.dim() != 2 or vector.dim() != 1 or options:
        return torch.linalg.solve(matrix, vector, **options)
    rows = [[*row.unbind(), value] for row, value in zip(matrix.unbind(), vector.unbind(), strict=True)]
    for pivot in range(count):
        for row in range(pivot + 1, count):
            factor = rows[row][pivot] / rows[pivot][pivot]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[pivot], strict=True)]
    solution = [None] * count
    for row in reversed(range(count)):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, count))
        solution[row] = (rows[row][count] - known) / rows[row][row]
    return torch.stack(solution)


SCHEDULER = "diffusers.schedulers.scheduling_unipc_multistep"

PATCH = Patch(
    name="unipc_solve",
    what="every UniPC step from the second on waits for the device: `torch.linalg.solve` runs on the host",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/schedulers/"
    "scheduling_unipc_multistep.py#L1078",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="torch_xla's counters show no `aten::_linalg_solve_ex`, or diffusers solves on the host's own sigmas",
    targets=(
        (SCHEDULER, "UniPCMultistepScheduler.multistep_uni_p_bh_update"),
        (SCHEDULER, "UniPCMultistepScheduler.multistep_uni_c_bh_update"),
    ),
    wrap=redirecting(torch.linalg.solve, _solve),
)
