"""Released video transformers at their own size, with the inputs that their pipelines hand them.

Sizes are the default height, width and frames of each pipeline (of the model card where the pipeline's default is a
short clip, as Mochi's); configurations are those of the checkpoints, or of the class where its defaults are the
checkpoint. Batch 2 where the pipeline runs both guidance branches in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Released:
    """One released transformer at one size.

    Args:
        checkpoint: Name of the checkpoint.
        transformer: Name of the diffusers class.
        config: Arguments of the class that differ from its defaults.
        cut: Arguments that leave one layer of every kind.
        inputs: ``inputs(make) -> dict``, the forward's arguments: ``make.noise(*shape, dtype=bf16)`` gives a tensor
            whose values do not matter, ``make.values(tensor)`` one whose values do.
        grid: (frames, height, width) in tokens, as the family must find it.
        batch: Rows of the batch.
        real_weights: Weights whose values the forward looks at.
        patches: Names of the patches (``torch_svg.patches``) without which the forward waits for the device.
    """

    checkpoint: str
    transformer: str
    config: dict
    cut: dict
    inputs: Callable[[object], dict]
    grid: tuple[int, int, int]
    batch: int = 1
    real_weights: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()


_WAN_14B = {"num_attention_heads": 40, "ffn_dim": 13824}
_WAN_IMAGE = {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120}


def _wan(latents, channels=16, timesteps=None, **more):
    def inputs(make):
        shapes = {name: make.noise(*shape) for name, shape in more.items()}
        return {
            "hidden_states": make.noise(1, channels, *latents),
            "timestep": make.values(torch.full((1, *timesteps) if timesteps else (1,), 500)),
            "encoder_hidden_states": make.noise(1, 512, 4096),
            **shapes,
        }

    return inputs


def _padding(batch, tokens, valid):
    """A padding mask (batch, tokens): ``valid`` tokens of the first row, two fewer of the next."""
    lengths = valid - 2 * torch.arange(batch)
    return (torch.arange(tokens)[None] < lengths[:, None]).long()


def _hunyuan_video(latents, **more):
    def inputs(make):
        return {
            "hidden_states": make.noise(1, 16, *latents),
            "timestep": make.values(torch.tensor([500])),
            "encoder_hidden_states": make.noise(1, 256, 4096),
            "encoder_attention_mask": make.values(_padding(1, 256, 100)),
            "pooled_projections": make.noise(1, 768),
            "guidance": make.values(torch.tensor([6000.0]).to(BF16)),
            **{name: part(make) for name, part in more.items()},
        }

    return inputs


def _framepack(make):
    # what the pipeline of the inverted sampling order hands over in its first section
    sections = [1, 0, 9, 1, 2, 16]
    first, _, new, clean, twice, four_times = torch.arange(sum(sections)).split(sections)
    places = {
        "indices_latents": new,
        "indices_latents_clean": torch.cat([first, clean]),
        "indices_latents_history_2x": twice,
        "indices_latents_history_4x": four_times,
    }
    latents = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
    return {
        **_hunyuan_video((9, 90, 160))(make),
        "image_embeds": make.noise(1, 729, 1152),
        **{name: make.noise(1, 16, frames, 90, 160) for name, frames in latents.items()},
        **{name: make.values(indices) for name, indices in places.items()},
    }


def _hunyuan_video15(make):
    return {
        "hidden_states": make.noise(1, 65, 31, 45, 80),
        "timestep": make.values(torch.tensor([500.0]).to(BF16)),
        "encoder_hidden_states": make.noise(1, 1000, 3584),
        "encoder_attention_mask": make.values(_padding(1, 1000, 300)),
        "encoder_hidden_states_2": make.noise(1, 256, 1472),
        "encoder_attention_mask_2": make.values(_padding(1, 256, 40)),
        "image_embeds": make.values(torch.zeros(1, 729, 1152, dtype=BF16)),
    }


def _cogvideox(frames, height, width, tokens, channels=16, **more):
    """``frames``, ``height`` and ``width`` of the latents, ``tokens`` per axis after patching."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    def inputs(make):
        rotary = get_3d_rotary_pos_embed(64, ((0, 0), tokens[1:]), tokens[1:], tokens[0])
        return {
            "hidden_states": make.noise(2, frames, channels, height, width),
            "encoder_hidden_states": make.noise(2, 226, 4096),
            "timestep": make.values(torch.full((2,), 500)),
            "image_rotary_emb": tuple(make.values(table) for table in rotary),
            **{name: part(make) for name, part in more.items()},
        }

    return inputs


def _ltx(make):
    return {
        "hidden_states": make.noise(2, 21 * 16 * 22, 128),
        "encoder_hidden_states": make.noise(2, 128, 4096),
        "timestep": make.values(torch.full((2,), 500.0)),
        "encoder_attention_mask": make.values(_padding(2, 128, 40)),
        "num_frames": 21, "height": 16, "width": 22, "rope_interpolation_scale": (8 / 25, 32, 32),
    }  # fmt: skip


def _ltx2(make):
    mask = _padding(2, 1024, 300)
    return {
        "hidden_states": make.noise(2, 16 * 16 * 24, 128),
        "audio_hidden_states": make.noise(2, 126, 128),
        "encoder_hidden_states": make.noise(2, 1024, 3840),
        "audio_encoder_hidden_states": make.noise(2, 1024, 3840),
        "timestep": make.values(torch.full((2,), 500.0)),
        "encoder_attention_mask": make.values(mask),
        "audio_encoder_attention_mask": make.values(mask),
        "num_frames": 16, "height": 16, "width": 24, "audio_num_frames": 126, "fps": 24.0,
    }  # fmt: skip


def _cosmos(latents, channels, text=None, **more):
    def inputs(make):
        return {
            "hidden_states": make.noise(1, channels, *latents),
            "timestep": make.values(torch.tensor([0.5]).to(BF16)),
            "encoder_hidden_states": text(make) if text else make.noise(1, 512, 1024),
            **more,
        }

    return inputs


def _cosmos3(make):
    text, video = 512, 48 * 23 * 40
    places = make.values(torch.arange(text, text + video))
    return {
        "input_ids": make.values(torch.zeros(text, dtype=torch.long)),
        "text_indexes": make.values(torch.arange(text)),
        "position_ids": make.values(torch.arange(text + video).expand(3, -1).contiguous()),
        "und_len": text,
        "sequence_length": text + video,
        "vision_tokens": [make.noise(1, 48, 48, 45, 80)],
        "vision_token_shapes": [(48, 23, 40)],
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": places,
        "vision_timesteps": make.values(torch.full((video,), 500.0)),
        "vision_noisy_frame_indexes": [make.values(torch.arange(48))],
    }


def _allegro(make):
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *tables, frames, rows, columns = get_3d_rotary_pos_embed_allegro(96, ((0, 0), (45, 80)), (45, 80), 22)
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T.reshape(3, 1, -1)
    tables = [tuple(map(make.values, table)) if isinstance(table, tuple) else make.values(table) for table in tables]
    return {
        "hidden_states": make.noise(2, 4, 22, 90, 160),
        "encoder_hidden_states": make.noise(2, 512, 4096),
        "timestep": make.values(torch.full((2,), 500)),
        "encoder_attention_mask": make.values(_padding(2, 512, 100)),
        "image_rotary_emb": (tuple(tables), tuple(make.values(place) for place in places)),
    }


def _kandinsky5(make):
    # without a picture to begin with: 16 channels of noise, 16 of the picture and its mask
    return {
        "hidden_states": make.noise(1, 31, 64, 96, 33),
        "encoder_hidden_states": make.noise(1, 128, 3584),
        "timestep": make.values(torch.tensor([500.0])),
        "pooled_projections": make.noise(1, 768),
        "visual_rope_pos": tuple(make.values(torch.arange(side)) for side in (31, 32, 48)),
        "text_rope_pos": make.values(torch.arange(128)),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def _kandinsky6(make):
    return {
        "hidden_states": make.noise(1, 31, 64, 96, 33),
        "encoder_hidden_states": make.noise(1, 256, 3584),
        "pooled_projections": make.noise(1, 768),
        "timestep": make.values(torch.tensor([500.0])),
        "audio_hidden_states": make.noise(1, 218, 20),
        "encoder_attention_mask": make.values(_padding(1, 256, 100).bool()[:, None, None]),
    }


def _mochi(make):
    return {
        "hidden_states": make.noise(2, 12, 28, 60, 106),
        "encoder_hidden_states": make.noise(2, 256, 4096),
        "timestep": make.values(torch.full((2,), 500)),
        "encoder_attention_mask": make.values(_padding(2, 256, 100).bool()),
    }


def _easyanimate(make):
    return {
        "hidden_states": make.noise(2, 16, 13, 64, 64),
        "timestep": make.values(torch.full((2,), 500)),
        "encoder_hidden_states": make.noise(2, 256, 3584),
    }


def _helios(make):
    long, mid, first, short, new = torch.arange(16 + 2 + 1 + 1 + 9).split([16, 2, 1, 1, 9])
    indices = {
        "indices_hidden_states": new,
        "indices_latents_history_short": torch.cat([first, short]),
        "indices_latents_history_mid": mid,
        "indices_latents_history_long": long,
    }
    return {
        "hidden_states": make.noise(1, 16, 9, 48, 80),
        "timestep": make.values(torch.tensor([500])),
        "encoder_hidden_states": make.noise(1, 512, 4096),
        **{name: make.values(places[None]) for name, places in indices.items()},
        **{
            f"latents_history_{age}": make.noise(1, 16, frames, 48, 80)
            for age, frames in (("short", 2), ("mid", 2), ("long", 16))
        },
    }


def _motif_video(make):
    return {
        "hidden_states": make.noise(1, 33, 31, 92, 160),
        "timestep": make.values(torch.tensor([500.0]).to(BF16)),
        "encoder_hidden_states": make.noise(1, 512, 4096),
        "encoder_attention_mask": make.values(_padding(1, 512, 100)),
    }


def _minimax_h3(make):
    text, audio, (frames, height, width) = 512, 2 * 207, (37, 24, 42)
    video = frames * height * width
    tokens = text + audio + video
    places = torch.cartesian_prod(*(torch.arange(float(side)) for side in (frames, height, width)))
    sound = torch.zeros(audio, 3)
    sound[:, 0] = text + torch.arange(float(audio))
    words = torch.zeros(text, 3)
    words[:, 0] = torch.arange(float(text))
    places[:, 0] += text
    return {
        "hidden_states": make.noise(1, video, 96, dtype=F32),
        "audio_hidden_states": make.noise(1, audio, 32, dtype=F32),
        "encoder_hidden_states": make.noise(1, text, 5120),
        "timestep": make.values(torch.tensor([0.5, 0.5])),
        "timestep_indices": make.values(torch.zeros(tokens, dtype=torch.long)),
        "token_tags": make.values(torch.tensor([1] * text + [2] * audio + [0] * video)),
        "position_ids": make.values(torch.cat([words, sound, places])),
        "text_indices": make.values(torch.arange(text)),
        "audio_indices": make.values(torch.arange(text, text + audio)),
        "video_indices": make.values(torch.arange(text + audio, tokens)),
    }


_ONE = {"num_layers": 1}
_ONE_OF_EACH = {"num_layers": 1, "num_single_layers": 1}

RELEASED: dict[str, Released] = {
    "wan-1.3b": Released(
        "Wan2.1-T2V-1.3B", "WanTransformer3DModel", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        _ONE, _wan((21, 60, 104)), (21, 30, 52),
    ),
    "wan-14b-480p": Released(
        "Wan2.1-T2V-14B", "WanTransformer3DModel", _WAN_14B, _ONE, _wan((21, 60, 104)), (21, 30, 52)
    ),
    "wan-14b-720p": Released(
        "Wan2.1-T2V-14B", "WanTransformer3DModel", _WAN_14B, _ONE, _wan((21, 90, 160)), (21, 45, 80)
    ),
    "wan-14b-i2v-480p": Released(
        "Wan2.1-I2V-14B-480P", "WanTransformer3DModel", {**_WAN_14B, **_WAN_IMAGE}, _ONE,
        _wan((21, 60, 104), 36, encoder_hidden_states_image=(1, 257, 1280)), (21, 30, 52),
    ),
    "wan2.2-ti2v-5b": Released(
        "Wan2.2-TI2V-5B", "WanTransformer3DModel",
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}, _ONE,
        _wan((31, 44, 80), 48, timesteps=(27280,)), (31, 22, 40),
    ),
    "wan-vace-14b": Released(
        "Wan2.1-VACE-14B", "WanVACETransformer3DModel", _WAN_14B, {**_ONE, "vace_layers": [0]},
        _wan((21, 60, 104), control_hidden_states=(1, 96, 21, 60, 104)), (21, 30, 52),
    ),
    "wan-animate-14b": Released(
        "Wan2.2-Animate-14B", "WanAnimateTransformer3DModel", {**_WAN_14B, **_WAN_IMAGE},
        {**_ONE, "inject_face_latents_blocks": 1},
        _wan(
            (21, 90, 160), 36, encoder_hidden_states_image=(1, 257, 1280), pose_hidden_states=(1, 16, 20, 90, 160),
            face_pixel_values=(1, 3, 77, 512, 512),
        ),
        (21, 45, 80), real_weights=("motion_encoder.motion_synthesis_weight",),
    ),
    "chronoedit-14b": Released(
        "ChronoEdit-14B", "ChronoEditTransformer3DModel", {**_WAN_14B, **_WAN_IMAGE}, _ONE,
        _wan((21, 60, 104), 36, encoder_hidden_states_image=(1, 257, 1280)), (21, 30, 52),
    ),
    "skyreels-v2-14b": Released(
        "SkyReels-V2-T2V-14B-540P", "SkyReelsV2Transformer3DModel", {**_WAN_14B, "num_layers": 40}, _ONE,
        _wan((25, 68, 120)), (25, 34, 60),
    ),
    "hunyuan-video": Released(
        "HunyuanVideo", "HunyuanVideoTransformer3DModel", {}, _ONE_OF_EACH, _hunyuan_video((33, 90, 160)), (33, 45, 80)
    ),
    "hunyuan-video-1.5": Released(
        "HunyuanVideo-1.5-720p_t2v", "HunyuanVideo15Transformer3DModel", {"task_type": "t2v", "target_size": 960},
        _ONE, _hunyuan_video15, (31, 45, 80), patches=("hunyuan15_text_order",),
    ),
    "framepack": Released(
        "FramePackI2V_HY", "HunyuanVideoFramepackTransformer3DModel",
        {"has_image_proj": True, "has_clean_x_embedder": True}, _ONE_OF_EACH, _framepack, (9, 45, 80),
        patches=("framepack_text_length",),
    ),
    "cogvideox-5b": Released(
        "CogVideoX-5b", "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}, _ONE,
        _cogvideox(13, 60, 90, (13, 30, 45)), (13, 30, 45), 2,
    ),
    "cogvideox-1.5-5b": Released(
        "CogVideoX1.5-5B", "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True, "patch_size_t": 2,
            "sample_frames": 81, "sample_height": 96, "sample_width": 170, "patch_bias": False,
        },
        _ONE, _cogvideox(22, 96, 170, (11, 48, 85)), (11, 48, 85), 2,
    ),
    "consisid": Released(
        "ConsisID-preview", "ConsisIDTransformer3DModel",
        {
            "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True, "in_channels": 32,
            "is_train_face": True,
        },
        {**_ONE, "cross_attn_interval": 1},
        _cogvideox(
            13, 60, 90, (13, 30, 45), 32, id_cond=lambda make: make.noise(2, 1280),
            id_vit_hidden=lambda make: [make.noise(2, 577, 1024) for _ in range(5)],
        ),
        (13, 30, 45), 2,
    ),
    "ltx": Released("LTX-Video-2B", "LTXVideoTransformer3DModel", {}, _ONE, _ltx, (21, 16, 22), 2),
    "ltx-2": Released("LTX-2-19B", "LTX2VideoTransformer3DModel", {}, _ONE, _ltx2, (16, 16, 24), 2),
    # the padding mask is one more input channel, which the class would resize with torchvision
    "cosmos-1-7b": Released(
        "Cosmos-1.0-Diffusion-7B-Text2World", "CosmosTransformer3DModel",
        {"in_channels": 17, "concat_padding_mask": False}, _ONE, _cosmos((16, 88, 160), 17, fps=30), (16, 44, 80),
    ),
    "cosmos-2-14b": Released(
        "Cosmos-Predict2-14B-Video2World", "CosmosTransformer3DModel",
        {
            "in_channels": 18, "concat_padding_mask": False, "num_attention_heads": 40, "num_layers": 36,
            "rope_scale": (20 / 24, 2.0, 2.0), "extra_pos_embed_type": None,
        },
        _ONE, _cosmos((24, 88, 160), 18, fps=16), (24, 44, 80),
    ),
    "cosmos-2.5-2b": Released(
        "Cosmos-Predict2.5-2B", "CosmosTransformer3DModel",
        {
            "in_channels": 18, "concat_padding_mask": False, "num_attention_heads": 16, "num_layers": 28,
            "rope_scale": (1.0, 3.0, 3.0), "extra_pos_embed_type": None, "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 100352, "img_context_dim_in": 1152,
        },
        _ONE,
        _cosmos(
            (24, 88, 160), 18, lambda make: (make.noise(1, 512, 100352), make.noise(1, 256, 1152)), fps=16
        ),
        (24, 44, 80),
    ),
    "cosmos-3": Released(
        "Cosmos 3 (class defaults)", "Cosmos3OmniTransformer", {}, {"num_hidden_layers": 1}, _cosmos3,
        (48, 23, 40),
    ),
    "allegro": Released("Allegro", "AllegroTransformer3DModel", {}, _ONE, _allegro, (22, 45, 80), 2),
    "kandinsky-5-lite": Released(
        "Kandinsky-5.0-T2V-Lite", "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True,
        },
        {"num_text_blocks": 1, "num_visual_blocks": 1}, _kandinsky5, (31, 32, 48),
    ),
    "kandinsky-5-pro": Released(
        "Kandinsky-5.0-T2V-Pro", "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 4096, "ff_dim": 16384, "visual_cond": True,
            "time_dim": 1024, "axes_dims": (32, 48, 48), "num_visual_blocks": 60,
        },
        {"num_text_blocks": 1, "num_visual_blocks": 1}, _kandinsky5, (31, 32, 48),
    ),
    "kandinsky-6": Released(
        "Kandinsky 6 (class defaults)", "Kandinsky6Transformer3DModel", {},
        {"num_text_blocks": 1, "num_visual_blocks": 1}, _kandinsky6, (31, 32, 48),
    ),
    "mochi": Released("mochi-1-preview", "MochiTransformer3DModel", {}, _ONE, _mochi, (28, 30, 53), 2),
    "easyanimate": Released(
        "EasyAnimateV5.1-12b-zh", "EasyAnimateTransformer3DModel",
        {"in_channels": 16, "out_channels": 16, "patch_size": 2}, {"num_layers": 1, "mmdit_layers": 1}, _easyanimate,
        (13, 32, 32), 2,
    ),
    "helios": Released("Helios (class defaults)", "HeliosTransformer3DModel", {}, _ONE, _helios, (9, 24, 40)),
    "motif-video": Released(
        "Motif-Video (class defaults)", "MotifVideoTransformer3DModel", {}, _ONE_OF_EACH, _motif_video, (31, 46, 80)
    ),
    "minimax-h3": Released(
        "MiniMax-H3 (class defaults)", "MiniMaxH3Transformer3DModel", {}, _ONE, _minimax_h3, (37, 24, 42)
    ),
}  # fmt: skip
