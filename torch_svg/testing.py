"""Small pipelines of stock diffusers classes to try things on: a trained one that ships with the package, and random
ones for fast tests. Nothing is downloaded."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch

VARIANTS = ("t2v", "two_experts", "i2v", "ti2v")

# what a pipeline with random weights can be asked for; other words are read as unknown
RANDOM_WORDS = (
    *("a", "the", "red", "blue", "yellow", "ball", "box", "moves", "left", "right", "up", "down"),
    *("over", "in", "at", "grass", "sand", "sky", "night"),
)


def tiny_wan_folder() -> Path:
    """Where the shipped pipeline lies: a folder for ``WanPipeline.from_pretrained``.

    Raises:
        FileNotFoundError: The installation carries no weights.
    """
    folder = Path(str(files("torch_svg"))) / "assets" / "tiny_wan"
    if not (folder / "model_index.json").exists():
        raise FileNotFoundError(
            f"the trained pipeline is not part of this installation: expected {folder.name}/model_index.json in the "
            "package's assets; train it with `python tools/train_tiny_wan.py`, or use random_tiny_wan_pipeline()"
        )
    return folder


def tiny_wan_pipeline(**kwargs):
    """The small text-to-video pipeline that ships with the package: a shape that moves over a background, 33 frames of
    128 x 128 pixels (9 x 16 x 16 = 2,304 video tokens, 4 heads of 64).

    Args:
        **kwargs: Passed on to ``WanPipeline.from_pretrained``; ``torch_dtype`` defaults to ``torch.float32``, the
            files are half precision.

    Returns:
        A ``diffusers.WanPipeline``. Its model card says what it can draw and with which settings.

    Raises:
        FileNotFoundError: The installation carries no weights.

    Example:
        >>> pipe = tiny_wan_pipeline()
        >>> frames = pipe("a red ball moves left over grass", **tiny_wan_settings()).frames[0]  # (33, 128, 128, 3)
    """
    from diffusers import WanPipeline

    folder = tiny_wan_folder()
    return WanPipeline.from_pretrained(folder, **{"torch_dtype": torch.float32, **kwargs})


def tiny_wan_settings() -> dict:
    """The call arguments that suit the shipped pipeline: its size, steps and guidance."""
    return {"height": 128, "width": 128, "num_frames": 33, "num_inference_steps": 16, "guidance_scale": 3.0}


def word_tokenizer(words: tuple[str, ...]):
    """A fast tokenizer of whole lower-case words that ends each text as T5 does.

    Args:
        words: The vocabulary; padding, the end of text and the unknown word come before it.

    Returns:
        A ``transformers.PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "</s>", "<unk>")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*special, *words))}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )


def random_tiny_wan_pipeline(
    seed: int = 0, *, variant: str = "t2v", layers: int = 2, heads: int = 2, head_dim: int = 16
):
    """A whole Wan pipeline with random weights, for tests: prompt to frames in about a second on a CPU.

    The VAE is 4 x 4 pixels and 4 frames a latent, the transformer's patch 1 x 2 x 2: ``height=32, width=48,
    num_frames=9`` make 3 x 4 x 6 = 72 video tokens.

    Args:
        seed: Seed of the weights; torch's global generator is left as it was.
        variant: ``"t2v"``; ``"two_experts"`` (Wan2.2: two transformers, boundary at 0.875 of the timesteps); ``"i2v"``
            (Wan2.1 image to video: image encoder and image keys in cross-attention); ``"ti2v"`` (Wan2.2 5B:
            a timestep per token).
        layers: Blocks of each transformer.
        heads: Attention heads.
        head_dim: Width of a head, even and at least 6.

    Returns:
        A ``diffusers.WanPipeline``, or a ``diffusers.WanImageToVideoPipeline`` for ``"i2v"``.

    Raises:
        ValueError: Unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown {variant=}: expected one of {VARIANTS}")
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = {
            "tokenizer": word_tokenizer(RANDOM_WORDS),
            "text_encoder": _random_text_encoder(len(RANDOM_WORDS) + 3),
            "vae": _random_vae(),
            "scheduler": diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
            ),
            "transformer": _random_transformer(variant, layers, heads, head_dim),
        }
        if variant == "two_experts":
            parts |= {"transformer_2": _random_transformer(variant, layers, heads, head_dim), "boundary_ratio": 0.875}
        if variant == "ti2v":
            parts["expand_timesteps"] = True
        if variant == "i2v":
            return diffusers.WanImageToVideoPipeline(**parts, **_random_image_encoder())
        return diffusers.WanPipeline(**parts)


def _random_transformer(variant: str, layers: int, heads: int, head_dim: int):
    from diffusers import WanTransformer3DModel

    # image to video: 4 mask channels and the encoded image come beside the noisy latents, and image keys of width 24
    image = {"in_channels": 4 + 4 + 4, "image_dim": 24, "added_kv_proj_dim": heads * head_dim}
    return WanTransformer3DModel(
        **{"in_channels": 4, **(image if variant == "i2v" else {})},
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        num_layers=layers,
        ffn_dim=64,
        text_dim=32,
        freq_dim=32,
        rope_max_seq_len=64,
    ).eval()


def _random_vae():
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_spatial=4,
    ).eval()


def _random_text_encoder(vocabulary: int):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
    ).eval()


def _random_image_encoder() -> dict:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    shape = {"image_size": 16, "patch_size": 8}
    config = CLIPVisionConfig(hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **shape)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}
