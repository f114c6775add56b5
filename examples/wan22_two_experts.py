"""Wan 2.2 A14B on an XLA device: two transformers, one for high noise and one for low.

    python examples/wan22_two_experts.py --model Wan-AI/Wan2.2-T2V-A14B-Diffusers

One processor on both transformers counts denoising steps over the whole generation, so the second expert does not
warm up again. Without ``--model`` a tiny pipeline with random weights runs.
"""

import argparse

import torch
import torch_xla
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import torch_svg.patches
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.testing import random_tiny_wan_pipeline

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="hub id or folder; default: a tiny pipeline with random weights")
parser.add_argument("--prompt", default="a red ball moves left over grass")
parser.add_argument("--density", type=float, help="default: by model and size")
parser.add_argument("--output", default="output.mp4")
args = parser.parse_args()

settings = {} if args.model else {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 8}

if args.model:
    pipe = WanPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16)
else:
    pipe = random_tiny_wan_pipeline(variant="two_experts")
pipe.to(torch_xla.device())

torch_svg.patches.apply(pipe)
processor = SparseVideoAttnProcessor(SparseVideoConfig(density=args.density))
pipe.transformer.set_attn_processor(processor)
pipe.transformer_2.set_attn_processor(processor)

generator = torch.Generator().manual_seed(0)
frames = pipe(args.prompt, generator=generator, **settings).frames[0]
export_to_video(frames, args.output, fps=16)
print(f"wrote {args.output}: {len(frames)} frames, dense steps {processor.report().dense_steps}")
