"""The transformer is compiled anew for every variant of what a scheduler does around it."""

import functools

import torch

from .patch import Patch, on_xla
from .timesteps_to_device import TRANSFORMERS


def cut_out(forward):
    """A forward that is a graph of its own: pending work is launched before it and after it, and not waited for."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        # while training the backward pass belongs to the same graph
        if torch.is_grad_enabled() or not on_xla(*args, *kwargs.values()):
            return forward(self, *args, **kwargs)
        import torch_xla

        torch_xla.sync()
        output = forward(self, *args, **kwargs)
        torch_xla.sync()
        return output

    return wrapper


PATCH = Patch(
    name="transformer_graphs",
    what="the first steps, and the last, each compile the whole transformer again, since the scheduler's changing "
    "arithmetic is in the same graph",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/wan/pipeline_wan.py#L657",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="diffusers' pipelines end a graph before and after the transformer",
    targets=TRANSFORMERS,
    wrap=cut_out,
)
