import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.schedulers import UniPCMultistepScheduler
from diffusers.utils import export_to_video

model_id = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
vae = AutoencoderKLWan.from_pretrained(model_id, subfolder="vae", torch_dtype=torch.float32)
pipe = WanPipeline.from_pretrained(model_id, vae=vae, torch_dtype=torch.float32)
pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=3.0)
pipe.to("cuda")


def show_step(pipe, step, timestep, callback_kwargs):
    print(f"step {step} of {pipe.num_timesteps}: {tuple(callback_kwargs['latents'].shape)}")
    return callback_kwargs


output = pipe(
    prompt="a red ball moves left over grass",
    negative_prompt="blurry, still picture",
    height=64,
    width=64,
    num_frames=9,
    num_inference_steps=3,
    guidance_scale=5.0,
    generator=torch.Generator("cuda").manual_seed(0),
    callback_on_step_end=show_step,
).frames[0]
export_to_video(output, "output.mp4", fps=16)
np.save("frames.npy", output)
print("done", output.shape)
