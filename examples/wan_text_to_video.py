"""Wan text to video on an XLA device: the diffusers documentation's example, plus two lines.

    python examples/wan_text_to_video.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --height 720 --width 1280

``--model`` takes a hub id or a local folder; without it a tiny pipeline that ships with torch_svg runs, on a CPU too.
"""

import argparse

import torch
import torch_xla
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import torch_svg.patches
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig
from torch_svg.testing import tiny_wan_folder, tiny_wan_settings

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="hub id or folder; default: the tiny pipeline of torch_svg")
parser.add_argument("--prompt", default="a red ball moves left over grass")
parser.add_argument("--negative-prompt")
parser.add_argument("--height", type=int)
parser.add_argument("--width", type=int)
parser.add_argument("--num-frames", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--density", type=float, help="default: by model and size")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", default="output.mp4")
args = parser.parse_args()

settings = {} if args.model else tiny_wan_settings()
for name, value in {
    "height": args.height, "width": args.width, "num_frames": args.num_frames, "num_inference_steps": args.steps
}.items():
    if value is not None:
        settings[name] = value

# bfloat16 is what a TPU multiplies; the tiny pipeline is quicker in float32 on a CPU
dtype = torch.bfloat16 if args.model else torch.float32
pipe = WanPipeline.from_pretrained(args.model or tiny_wan_folder(), torch_dtype=dtype)
pipe.to(torch_xla.device())

torch_svg.patches.apply(pipe)
pipe.transformer.set_attn_processor(SparseVideoAttnProcessor(SparseVideoConfig(density=args.density)))

# torch_xla has no generator of its own; a CPU generator gives the same noise on every device
generator = torch.Generator().manual_seed(args.seed)
frames = pipe(args.prompt, negative_prompt=args.negative_prompt, generator=generator, **settings).frames[0]
export_to_video(frames, args.output, fps=16)
print(f"wrote {args.output}: {len(frames)} frames, {pipe.transformer.blocks[0].attn1.processor.report().head_kinds}")
