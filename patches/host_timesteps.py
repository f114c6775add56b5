"""Schedulers put timesteps and sigmas on the XLA device, where reading one waits and indexing one recompiles."""

import functools
import inspect

import torch

from .patch import Patch


def _on_host(set_timesteps):
    signature = inspect.signature(set_timesteps)

    @functools.wraps(set_timesteps)
    def wrapper(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        device = call.arguments.get("device")
        if device is not None and torch.device(device).type == "xla":
            call.arguments["device"] = "cpu"
        return set_timesteps(*call.args, **call.kwargs)

    return wrapper


SCHEDULERS = "diffusers.schedulers.scheduling"

PATCH = Patch(
    name="host_timesteps",
    what="with FlowMatchEulerDiscreteScheduler every step compiles a new graph, since it indexes the sigmas on the "
    "device with the step; Wan2.2 waits for the device to choose its transformer, and other schedulers to find their "
    "place among the timesteps",
    upstream="https://github.com/huggingface/diffusers/pull/11501",
    versions={"diffusers": ">=0.41,<0.43"},
    delete_when="diffusers' Wan pipelines pass a host device to `retrieve_timesteps` when torch_xla is there",
    targets=(
        (f"{SCHEDULERS}_flow_match_euler_discrete", "FlowMatchEulerDiscreteScheduler.set_timesteps"),
        (f"{SCHEDULERS}_unipc_multistep", "UniPCMultistepScheduler.set_timesteps"),
        (f"{SCHEDULERS}_dpmsolver_multistep", "DPMSolverMultistepScheduler.set_timesteps"),
        (f"{SCHEDULERS}_edm_euler", "EDMEulerScheduler.set_timesteps"),
        (f"{SCHEDULERS}_euler_discrete", "EulerDiscreteScheduler.set_timesteps"),
        (f"{SCHEDULERS}_euler_ancestral_discrete", "EulerAncestralDiscreteScheduler.set_timesteps"),
    ),
    wrap=_on_host,
    needs=("timesteps_to_device",),
)
