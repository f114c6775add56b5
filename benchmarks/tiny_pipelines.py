"""Whole pipelines of stock classes, tokenizer to decoder, with tiny random weights: what the table of pipelines and the
scripts in the tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from torch_svg.testing import RANDOM_WORDS, random_tiny_wan_pipeline, word_tokenizer

VOCABULARY = len(RANDOM_WORDS) + 3


@dataclass(frozen=True)
class Case:
    """A pipeline and what to ask of it.

    Args:
        build: ``build() -> pipeline``, with weights from torch's global generator.
        call: Arguments of the call besides prompt and generator.
        media: ``media() -> dict``, more of them: images, conditions.
    """

    build: Callable
    call: dict
    media: Callable[[], dict] = field(default=dict)


def make(name: str):
    """The pipeline of a case, with the same random weights every time; torch's global generator stays as it was.

    Raises:
        KeyError: Unknown name; see ``CASES``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = CASES[name].build()
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        for transformer in (getattr(pipe, "transformer", None), getattr(pipe, "transformer_2", None)):
            for parameter in () if transformer is None else transformer.parameters():
                # a gate that starts at zero would hide what stands behind it
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.1)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def t5(width: int):
    """A T5 encoder and its tokenizer."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return {"text_encoder": transformers.T5EncoderModel(config), "tokenizer": word_tokenizer(RANDOM_WORDS)}


def clip(width: int):
    """A CLIP text encoder and its tokenizer, as the second pair of a pipeline."""
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )
    return {"text_encoder_2": transformers.CLIPTextModel(config), "tokenizer_2": word_tokenizer(RANDOM_WORDS)}


QWEN = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 2,
    "eos_token_id": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}


def flow_unipc():
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def wan(variant="t2v", scheduler=None):
    pipe = random_tiny_wan_pipeline(variant=variant, layers=1)
    pipe.scheduler = scheduler or pipe.scheduler
    return pipe


def wan_vae():
    return random_tiny_wan_pipeline(layers=1).vae


WAN = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 64,
}


def vace():
    # twice the latents, and the mask's 4 x 4 pixels of a latent as channels
    transformer = diffusers.WanVACETransformer3DModel(**WAN, vace_layers=[0, 1], vace_in_channels=2 * 4 + 16)
    base = wan()
    return diffusers.WanVACEPipeline(
        tokenizer=base.tokenizer, text_encoder=base.text_encoder, vae=base.vae, scheduler=flow_unipc(),
        transformer=transformer,
    )


def skyreels():
    base = wan()
    return diffusers.SkyReelsV2Pipeline(
        tokenizer=base.tokenizer, text_encoder=base.text_encoder, vae=base.vae, scheduler=flow_unipc(),
        transformer=diffusers.SkyReelsV2Transformer3DModel(**WAN),
    )


def hunyuan_vae():
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
    )


def hunyuan_video():
    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=transformers.LlamaModel(text), tokenizer=word_tokenizer(RANDOM_WORDS), transformer=transformer,
        vae=hunyuan_vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), **clip(8),
    )


# the header is as long as the real tokenizer's, which the pipeline cuts away
CHAT = (
    "{{ 'the ' * 12 }}{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ; ' }}"
    "{% endfor %}"
)


def hunyuan_video15():
    tokenizer = word_tokenizer(RANDOM_WORDS)
    tokenizer.chat_template = CHAT
    glyphs = transformers.ByT5Tokenizer()
    t5_config = transformers.T5Config(
        vocab_size=len(glyphs), d_model=8, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12,
        rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=16,
        temporal_compression_ratio=4,
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**QWEN)),
        tokenizer=tokenizer, transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=transformers.T5EncoderModel(t5_config), tokenizer_2=glyphs,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )


def cogvideox(scheduler=diffusers.CogVideoXDDIMScheduler):
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=6, sample_height=4, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=226, use_rotary_positional_embeddings=True,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
    )
    return diffusers.CogVideoXPipeline(
        transformer=transformer, vae=vae, **t5(16),
        scheduler=scheduler(
            snr_shift_scale=1.0, prediction_type="v_prediction", rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def ltx(pipeline=diffusers.LTXPipeline):
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, True, False), decoder_spatio_temporal_scaling=(True, True, True, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, patch_size=4,
        patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16, qk_norm="rms_norm_across_heads",
    )
    return pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer, **t5(16)
    )


def mochi():
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16,
        in_channels=12, qk_norm="rms_norm", text_embed_dim=16, time_embed_dim=4, max_sequence_length=256,
    )
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), vae=vae, transformer=transformer,
        **t5(16),
    )


def allegro():
    # its decoder is always tiled, 24 frames at once, with an overlap of 120 x 80 pixels
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=128,
    )
    vae.enable_tiling()
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=24, sample_width=16, sample_height=16, sample_frames=6, caption_channels=16,
    )
    return diffusers.AllegroPipeline(
        transformer=transformer, vae=vae, scheduler=diffusers.EulerAncestralDiscreteScheduler(), **t5(16)
    )


def image(height=32, width=48):
    """A picture of noise to begin a video with."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def ltx_condition():
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    return {"conditions": [LTXVideoCondition(image=image(32, 64), frame_index=0)]}


SIZE = {"height": 32, "width": 48, "num_frames": 9}
LTX_SIZE = {"height": 32, "width": 64, "num_frames": 9, "guidance_scale": 3.0}

CASES = {
    "wan_unipc": Case(wan, SIZE),
    "wan_euler": Case(lambda: wan(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)), SIZE),
    "wan_dpm": Case(
        lambda: wan(
            scheduler=diffusers.DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            )
        ),
        SIZE,
    ),
    "wan_i2v": Case(lambda: wan("i2v"), SIZE, lambda: {"image": image()}),
    "wan_vace": Case(vace, SIZE),
    "wan22_dual": Case(lambda: wan("two_experts"), SIZE),
    "hunyuan_video": Case(hunyuan_video, SIZE),
    "hunyuan_video15": Case(hunyuan_video15, SIZE),
    "cogvideox_ddim": Case(cogvideox, SIZE),
    "cogvideox_dpm": Case(lambda: cogvideox(diffusers.CogVideoXDPMScheduler), {**SIZE, "use_dynamic_cfg": True}),
    "ltx": Case(ltx, LTX_SIZE),
    "ltx_condition": Case(lambda: ltx(diffusers.LTXConditionPipeline), LTX_SIZE, ltx_condition),
    "mochi": Case(mochi, {**SIZE, "num_frames": 7}),
    "allegro": Case(allegro, {"height": 128, "width": 128, "num_frames": 24}),
    "skyreels_v2": Case(skyreels, SIZE),
}
