"""Whole transformers of released sizes, one layer, traced through torch_xla and compiled for an absent TPU."""

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig, aot, bridge

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(aot.available() is not None, reason=str(aot.available())),
]


def wan(device, heads, ffn):
    """One layer of Wan with placeholders for weights: shapes without memory."""
    import torch_xla.core.xla_builder as xla_builder

    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel(num_attention_heads=heads, ffn_dim=ffn, num_layers=1).eval()
    model.rope = WanRotaryPosEmbed(128, (1, 2, 2), 1024).to(device)
    kept_in_f32 = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    weights = {
        name: xla_builder.create_placeholder_tensor(
            tuple(weight.shape), torch.float32 if any(part in name for part in kept_in_f32) else torch.bfloat16
        )
        for name, weight in model.named_parameters()
    }

    def forward(latents):
        hidden_states = xla_builder.create_placeholder_tensor((1, 16, *latents), torch.bfloat16)
        text = xla_builder.create_placeholder_tensor((1, 512, 4096), torch.bfloat16)
        timestep = torch.tensor([500]).to(device)
        arguments = (hidden_states, timestep, text)
        with torch.no_grad():
            return torch.func.functional_call(model, weights, arguments, {"return_dict": False}, strict=False)[0]

    return model, forward


@pytest.mark.parametrize(
    ("chip", "heads", "ffn", "latents", "largest_mib"),
    [
        # Wan 1.3B, 480p, 81 frames: 32,760 tokens, frames of 1,560
        pytest.param("v5e", 12, 8960, (21, 60, 104), 700, id="1.3B-480p-v5e"),
        # Wan 14B, 720p, 81 frames: 75,600 tokens, frames of 3,600
        pytest.param("v6e", 40, 13824, (21, 90, 160), 4200, id="14B-720p-v6e", marks=pytest.mark.slow),
    ],
)
def test_a_released_size_compiles_without_a_tokens_by_tokens_array(chip, heads, ffn, latents, largest_mib, xla_device):
    model, forward = wan(xla_device, heads, ffn)
    processor = SparseVideoAttnProcessor(SparseVideoConfig(warmup_steps=0, dense_layers=0))
    model.set_attn_processor(processor)
    with bridge.lowering_for("tpu"):
        out = forward(latents)
        compiled = aot.compile_pending([out], chip=chip)
    tokens = latents[0] * latents[1] // 2 * latents[2] // 2
    kernels = [op for op in compiled.operations() if op.kind == "kernel"]
    assert len(kernels) >= 2, "one kernel for self-attention, one for cross-attention"
    size, shape, name = compiled.largest_array()
    assert size <= largest_mib * 2**20 < tokens**2, (size, shape, name)
    assert compiled.memory.total < compiled.chip.hbm_bytes
    gib = compiled.memory.total / 2**30
    print(f"{chip}: HBM {gib:.2f} GiB, largest array {shape}, {compiled.compile_seconds:.0f} s")
