"""Wan image to video on an XLA device.

    python examples/wan_image_to_video.py --model Wan-AI/Wan2.1-I2V-14B-480P-Diffusers --image first.png

Without ``--model`` a tiny pipeline with random weights runs, which shows that everything fits together and no picture.
"""

import argparse

import numpy as np
import torch
import torch_xla
from diffusers import WanImageToVideoPipeline
from diffusers.utils import export_to_video, load_image
from PIL import Image

import torch_svg.patches
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.testing import random_tiny_wan_pipeline

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="hub id or folder; default: a tiny pipeline with random weights")
parser.add_argument("--image", help="path or address of the first frame; default: a colour gradient")
parser.add_argument("--prompt", default="a red ball moves left over grass")
parser.add_argument("--density", type=float, help="default: by model and size")
parser.add_argument("--output", default="output.mp4")
args = parser.parse_args()

settings = {} if args.model else {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 4}

if args.model:
    pipe = WanImageToVideoPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16)
else:
    pipe = random_tiny_wan_pipeline(variant="i2v")
pipe.to(torch_xla.device())

torch_svg.patches.apply(pipe)
pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SparseVideoConfig(density=args.density)))

if args.image:
    image = load_image(args.image)
else:
    rows, columns = np.mgrid[0:48, 0:80]
    image = Image.fromarray(np.stack([rows * 5, columns * 3, 0 * rows + 128], axis=-1).astype(np.uint8))
generator = torch.Generator().manual_seed(0)
frames = pipe(image=image, prompt=args.prompt, generator=generator, **settings).frames[0]
export_to_video(frames, args.output, fps=16)
print(f"wrote {args.output}: {len(frames)} frames, {pipe.transformer.blocks[0].attn1.processor.report().head_kinds}")
