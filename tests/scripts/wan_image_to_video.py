import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image
from transformers import CLIPVisionModel

model_id = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
image_encoder = CLIPVisionModel.from_pretrained(model_id, subfolder="image_encoder", torch_dtype=torch.float32)
vae = AutoencoderKLWan.from_pretrained(model_id, subfolder="vae", torch_dtype=torch.float32)
pipe = WanImageToVideoPipeline.from_pretrained(
    model_id, vae=vae, image_encoder=image_encoder, torch_dtype=torch.float32
)
pipe.enable_model_cpu_offload()

image = load_image("first_frame.png")
# as large as the model likes it, with sides that its patches divide
max_area = 32 * 48
aspect_ratio = image.height / image.width
mod_value = pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[1]
height = round(np.sqrt(max_area * aspect_ratio)) // mod_value * mod_value
width = round(np.sqrt(max_area / aspect_ratio)) // mod_value * mod_value
image = image.resize((width, height))

output = pipe(
    image=image,
    prompt="a red ball moves left over grass",
    height=height,
    width=width,
    num_frames=9,
    num_inference_steps=3,
    guidance_scale=5.0,
    generator=torch.Generator(device="cuda").manual_seed(0),
).frames[0]
export_to_video(output, "output.mp4", fps=16)
np.save("frames.npy", output)
print(f"{len(output)} frames of {width} x {height}")
