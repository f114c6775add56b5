"""Wan 2.1 and 2.2 with all conditionings, and the models that share its attention."""

from ..config import Preset
from ..grid import TokenGrid
from .base import Facts, Family, patched_grid, rotate_pairs

_SVG_SCRIPTS = "Sparse-VideoGen's Wan scripts: sparsity 0.30, 3 % of layers and 20 % of steps (I2V: 35 %) dense"


def _grid(transformer, inputs) -> TokenGrid:
    return patched_grid(transformer, inputs["hidden_states"].shape[2:])


def _preset(transformer, grid) -> Preset:
    image_conditioned = getattr(transformer.config, "image_dim", None) is not None
    return Preset(
        density=0.3, warmup_steps=0.35 if image_conditioned else 0.2, dense_layers=0.03, source=_SVG_SCRIPTS
    )


def _apply_rotary(x, rotary):
    return rotate_pairs(x, *rotary)


WAN = Family(
    name="wan",
    transformers={
        "WanTransformer3DModel": Facts(
            "Wan 2.1 and 2.2: T2V, I2V, FLF2V, TI2V-5B, Lucy",
            (128,),
            pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        ),
        "WanVACETransformer3DModel": Facts("Wan 2.1 VACE", (128,)),
        "WanAnimateTransformer3DModel": Facts("Wan 2.2 Animate", (128,)),
        "ChronoEditTransformer3DModel": Facts("ChronoEdit", (128,)),
        "SkyReelsV2Transformer3DModel": Facts(
            "SkyReels-V2",
            (128,),
            note="its causal (diffusion-forcing) mode is refused",
        ),
    },
    video_attention=r"(vace_)?blocks\.\d+\.attn1",
    grid=_grid,
    preset=_preset,
    rotary_argument="rotary_emb",
    apply_rotary=_apply_rotary,
)
