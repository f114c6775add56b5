"""Every family: real transformer classes with tiny random weights, and inputs with odd sides and padded text."""

import copy

import diffusers
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, HunyuanVideoTransformer3DModel

import torch_svg
from torch_svg import SparseVideoAttnProcessor, SparseVideoConfig

SPARSE = SparseVideoConfig(density=0.4, warmup_steps=0, dense_layers=0)
TEXT = 10


def hunyuan_video():
    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )


def hunyuan_inputs(text_lengths):
    generator = torch.Generator().manual_seed(0)
    batch = len(text_lengths)
    mask = (torch.arange(TEXT)[None] < torch.tensor(text_lengths)[:, None]).long()
    return {
        "hidden_states": torch.randn(batch, 4, 3, 6, 10, generator=generator),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16, generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox(patch_size_t=None):
    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=10, sample_height=6, sample_frames=9, patch_size=2,
        patch_size_t=patch_size_t, temporal_compression_ratio=4, max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=patch_size_t is not None,
    )


def cogvideox_inputs(batch, frames=3, rotary=None):
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(batch, frames, 4, 6, 10, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT, 16, generator=generator),
        "timestep": torch.full((batch,), 500),
        "image_rotary_emb": rotary,
    }


def cogvideox15_inputs(batch):
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    return cogvideox_inputs(batch, 4, get_3d_rotary_pos_embed(16, ((0, 0), (3, 5)), (3, 5), 2))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WAN = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 16, "out_channels": 16, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 64,
}


def wan_inputs(channels=16, text=12, **more):
    return {
        "hidden_states": random(2, channels, 3, 6, 10), "timestep": torch.full((2,), 500),
        "encoder_hidden_states": random(2, text, 32), **more,
    }


def vace():
    return diffusers.WanVACETransformer3DModel(**WAN, vace_layers=[0, 1], vace_in_channels=48)


def animate():
    return diffusers.WanAnimateTransformer3DModel(
        **{**WAN, "in_channels": 36}, latent_channels=16, image_dim=16, added_kv_proj_dim=48,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def animate_inputs():
    return wan_inputs(
        36, 512, encoder_hidden_states_image=random(2, 257, 16), pose_hidden_states=random(2, 16, 2, 6, 10),
        face_pixel_values=random(2, 3, 8, 16, 16),
    )


def chronoedit():
    return diffusers.ChronoEditTransformer3DModel(**{**WAN, "in_channels": 36}, image_dim=16, added_kv_proj_dim=48)


def ltx():
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16, qk_norm="rms_norm_across_heads",
    )


def ltx_inputs():
    return {
        "hidden_states": random(2, 45, 4), "encoder_hidden_states": random(2, TEXT, 16),
        "timestep": torch.full((2,), 500.0), "num_frames": 3, "height": 3, "width": 5,
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).float(),
    }


def cosmos():
    return diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type=None,
    )


def cosmos_inputs():
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "timestep": torch.full((2,), 5.0),
        "encoder_hidden_states": random(2, 12, 16), "fps": 30,
    }


def allegro():
    return diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=24, sample_width=10, sample_height=6, sample_frames=3, caption_channels=16,
    )


def allegro_inputs():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *tables, frames, rows, columns = get_3d_rotary_pos_embed_allegro(12, ((0, 0), (3, 5)), (3, 5), 3)
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T.reshape(3, 1, -1)
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "encoder_hidden_states": random(2, TEXT, 16),
        "timestep": torch.full((2,), 500),
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).float(),
        "image_rotary_emb": (tuple(tables), tuple(places)),
    }


def kandinsky5():
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
    )


def kandinsky5_inputs():
    return {
        "hidden_states": random(2, 3, 6, 10, 4), "encoder_hidden_states": random(2, TEXT, 12),
        "timestep": torch.full((2,), 500.0), "pooled_projections": random(2, 8),
        "visual_rope_pos": (torch.arange(3), torch.arange(3), torch.arange(5)), "text_rope_pos": torch.arange(TEXT),
    }


def hunyuan_video15():
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=12,
        rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )


def hunyuan15_inputs(text_lengths=(TEXT, 4), image=True):
    batch = len(text_lengths)
    lengths = torch.tensor(text_lengths)[:, None]
    return {
        "hidden_states": random(batch, 4, 3, 3, 5), "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, TEXT, 16),
        "encoder_attention_mask": (torch.arange(TEXT)[None] < lengths).long(),
        "encoder_hidden_states_2": random(batch, 6, 8, seed=1),
        "encoder_attention_mask_2": (torch.arange(6)[None] < lengths // 2).long(),
        "image_embeds": random(batch, 5, 12, seed=2) * image,
    }


def mochi():
    return diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16,
        in_channels=4, out_channels=None, qk_norm="rms_norm", text_embed_dim=16, time_embed_dim=4,
        max_sequence_length=TEXT,
    )


def mochi_inputs():
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "encoder_hidden_states": random(2, TEXT, 16),
        "timestep": torch.full((2,), 500),
        "encoder_attention_mask": torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]]),
    }


def framepack():
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6), has_image_proj=True, image_proj_dim=12,
        has_clean_x_embedder=True,
    )


def framepack_inputs(text_lengths):
    batch = len(text_lengths)
    return {
        **hunyuan_inputs(text_lengths), "image_embeds": random(batch, 5, 12), "indices_latents": torch.arange(5, 8),
        "latents_clean": random(batch, 4, 2, 6, 10, seed=1), "indices_latents_clean": torch.tensor([0, 4]),
        "latents_history_2x": random(batch, 4, 2, 6, 10, seed=2), "indices_latents_history_2x": torch.tensor([1, 2]),
        "latents_history_4x": random(batch, 4, 4, 6, 10, seed=3), "indices_latents_history_4x": torch.arange(4),
    }


# older frames at full size, and in patches twice and four times as large, which are padded to whole ones
FRAMEPACK_HISTORY = 2 * 3 * 5 + 1 * 2 * 3 + 1 * 1 * 2


LTX2 = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16,
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8, "num_layers": 2, "caption_channels": 16, "pos_embed_max_pos": 20,
}


def ltx2_inputs(conditions=0, **more):
    mask = (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).float()
    return {
        "hidden_states": random(2, 45 + conditions, 4), "audio_hidden_states": random(2, 9, 4),
        "encoder_hidden_states": random(2, TEXT, 16), "audio_encoder_hidden_states": random(2, TEXT, 16, seed=1),
        "timestep": torch.full((2,), 500.0), "encoder_attention_mask": mask, "audio_encoder_attention_mask": mask,
        "num_frames": 3, "height": 3, "width": 5, "audio_num_frames": 9, "fps": 24.0, **more,
    }


def ltx23():
    return diffusers.LTX2VideoTransformer3DModel(
        **LTX2, rope_type="split", gated_attn=True, cross_attn_mod=True, audio_gated_attn=True,
        audio_cross_attn_mod=True, perturbed_attn=True,
    )


def ltx23_inputs():
    sigma = torch.full((2,), 500.0)
    # one row skips attention in one block
    perturbed = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([0.0, 1.0])}
    return ltx2_inputs(sigma=sigma, audio_sigma=sigma, use_cross_timestep=True, **perturbed)


def easyanimate():
    return diffusers.EasyAnimateTransformer3DModel(
        attention_head_dim=16, num_attention_heads=2, in_channels=4, out_channels=4, num_layers=2, mmdit_layers=1,
        patch_size=2, text_embed_dim=16, text_embed_dim_t5=12, time_embed_dim=8, time_position_encoding_type="3d_rope",
    )


def easyanimate_inputs():
    return {
        "hidden_states": random(2, 4, 3, 6, 10), "timestep": torch.full((2,), 500),
        "encoder_hidden_states": random(2, TEXT, 16), "encoder_hidden_states_t5": random(2, 6, 12),
    }


def consisid():
    return diffusers.ConsisIDTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=10, sample_height=6, sample_frames=9, patch_size=2,
        max_text_seq_length=TEXT, use_rotary_positional_embeddings=True, is_train_face=True, cross_attn_interval=1,
        cross_attn_dim_head=8, cross_attn_num_heads=2, LFE_id_dim=2, LFE_vit_dim=2, LFE_depth=5, LFE_dim_head=8,
        LFE_num_heads=2, LFE_num_id_token=1, LFE_num_querie=1, LFE_output_dim=21, LFE_ff_mult=1, LFE_num_scale=1,
    )


def consisid_inputs():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    rotary = get_3d_rotary_pos_embed(16, ((0, 0), (3, 5)), (3, 5), 3)
    return {**cogvideox_inputs(2, 3, rotary), "id_cond": random(2, 2), "id_vit_hidden": [random(2, 2, 2)]}


def cosmos25():
    return diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type=None, img_context_dim_in=8, img_context_num_tokens=4,
        img_context_dim_out=24,
    )


def cosmos25_inputs():
    return {**cosmos_inputs(), "encoder_hidden_states": (random(2, 12, 16), random(2, 4, 8))}


def cosmos3(**more):
    return diffusers.Cosmos3OmniTransformer(
        head_dim=16, hidden_size=32, intermediate_size=64, latent_channel=4, latent_patch_size=2,
        num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, patch_latent_dim=16, vocab_size=64,
        rope_axes_dim=(4, 2, 2), **more,
    )


def cosmos3_action():
    return cosmos3(action_gen=True, action_dim=3, num_embodiment_domains=4)


def cosmos3_inputs(text=7, action=0):
    video, generator = 45, torch.Generator().manual_seed(0)
    places = torch.arange(text, text + video)
    inputs = {
        "input_ids": torch.randint(0, 64, (text,), generator=generator), "text_indexes": torch.arange(text),
        "position_ids": torch.randint(0, 20, (3, text + video + action), generator=generator), "und_len": text,
        "sequence_length": text + video + action, "vision_tokens": [random(1, 4, 3, 6, 10)],
        "vision_token_shapes": [(3, 3, 5)], "vision_sequence_indexes": places, "vision_mse_loss_indexes": places,
        "vision_timesteps": torch.full((video,), 500.0), "vision_noisy_frame_indexes": [torch.arange(3)],
    }
    if action:
        places = torch.arange(text + video, text + video + action)
        inputs |= {
            "action_tokens": [random(action, 3)], "action_token_shapes": [(action, 1, 1)],
            "action_sequence_indexes": places, "action_mse_loss_indexes": places,
            "action_timesteps": torch.full((action,), 500.0), "action_noisy_frame_indexes": [torch.arange(action)],
            "action_domain_ids": [torch.tensor(1)],
        }
    return inputs


def motif_video(**more):
    return diffusers.MotifVideoTransformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=2, patch_size=2, patch_size_t=1, text_embed_dim=16, rope_axes_dim=(4, 6, 6), **more,
    )


def motif_video_decoder():
    return motif_video(
        num_decoder_layers=1, enable_text_cross_attention_dual=True, enable_text_cross_attention_single=True,
        image_embed_dim=12,
    )


def motif_inputs(**more):
    return {
        "hidden_states": random(2, 9, 3, 6, 10), "timestep": torch.full((2,), 500.0),
        "encoder_hidden_states": random(2, TEXT, 16),
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]])).long(), **more,
    }


def helios():
    return diffusers.HeliosTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_dim=(4, 4, 4), is_amplify_history=True,
    )


def helios_inputs(history=True):
    inputs = {
        "hidden_states": random(2, 4, 3, 6, 10), "timestep": torch.full((2,), 500),
        "encoder_hidden_states": random(2, TEXT, 16),
    }
    if history:
        inputs["indices_hidden_states"] = torch.arange(8, 11).expand(2, -1)
        for age, first, frames in (("short", 6, 2), ("mid", 4, 2), ("long", 0, 4)):
            inputs[f"latents_history_{age}"] = random(2, 4, frames, 6, 10, seed=first)
            inputs[f"indices_latents_history_{age}"] = torch.arange(first, first + frames).expand(2, -1)
    return inputs


def minimax_h3():
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=12, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=32,
        in_channels=4, audio_in_channels=4, patch_size=(1, 2, 2), text_dim=16, freq_dim=16, time_embed_hidden_dim=24,
        time_embed_dim=12, rope_freq_dim=2,
    )


def minimax_inputs(text=7, conditions=1, audio=4):
    frame = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0))

    def frames_at(*times):
        return [torch.cat([torch.full((15, 1), time), frame], dim=1) for time in times]

    words = torch.stack([torch.arange(float(text)), torch.zeros(text), torch.zeros(text)], dim=1)
    sound = torch.tensor([[text + i, 0.0, 0.0] for i in range(audio)]).reshape(audio, 3)
    start = float(text)
    # a frame to begin with has the time of the first one
    positions = [words, *frames_at(*[start] * conditions), sound, *frames_at(start, start + 2, start + 4)]
    ahead = text + 15 * conditions
    tokens = ahead + audio + 45
    tags = torch.tensor([1] * text + [0] * (15 * conditions) + [2] * audio + [0] * 45)
    return {
        "hidden_states": random(2, 15 * conditions + 45, 16), "audio_hidden_states": random(2, audio, 4),
        "encoder_hidden_states": random(2, text, 16), "timestep": torch.tensor([0.5, 0.0]),
        "timestep_indices": torch.zeros(tokens, dtype=torch.long), "token_tags": tags,
        "position_ids": torch.cat(positions), "text_indices": torch.arange(text),
        "video_indices": torch.cat([torch.arange(text, ahead), torch.arange(ahead + audio, tokens)]),
        "audio_indices": torch.arange(ahead, ahead + audio),
    }


def kandinsky6():
    return diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=16, patch_size=(1, 2, 2),
        model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6), visual_cond=False,
        in_audio_dim=5, out_audio_dim=5,
    )


def kandinsky6_inputs():
    return {
        "hidden_states": random(2, 3, 6, 10, 4), "encoder_hidden_states": random(2, TEXT, 12),
        "pooled_projections": random(2, 8), "timestep": torch.full((2,), 500.0),
        "audio_hidden_states": random(2, 6, 5),
        "encoder_attention_mask": (torch.arange(TEXT)[None] < torch.tensor([[TEXT], [4]]))[:, None, None],
    }


# name: (model, inputs, grid, tokens of other kinds before the video where there are some behind it too)
CASES = {
    "hunyuan_video": (hunyuan_video, lambda: hunyuan_inputs([TEXT, 4]), (3, 3, 5)),
    "cogvideox": (cogvideox, lambda: cogvideox_inputs(2), (3, 3, 5)),
    "cogvideox15": (lambda: cogvideox(patch_size_t=2), lambda: cogvideox15_inputs(2), (2, 3, 5)),
    "wan": (lambda: diffusers.WanTransformer3DModel(**WAN), wan_inputs, (3, 3, 5)),
    "wan_i2v": (
        lambda: diffusers.WanTransformer3DModel(**{**WAN, "in_channels": 36}, image_dim=16, added_kv_proj_dim=48),
        lambda: wan_inputs(36, 512, encoder_hidden_states_image=random(2, 257, 16)), (3, 3, 5),
    ),
    "vace": (vace, lambda: wan_inputs(control_hidden_states=random(2, 48, 3, 6, 10, seed=1)), (3, 3, 5)),
    "animate": (animate, animate_inputs, (3, 3, 5)),
    "chronoedit": (
        chronoedit, lambda: wan_inputs(36, 512, encoder_hidden_states_image=random(2, 257, 16)), (3, 3, 5)
    ),
    "skyreels": (lambda: diffusers.SkyReelsV2Transformer3DModel(**WAN), wan_inputs, (3, 3, 5)),
    "ltx": (ltx, ltx_inputs, (3, 3, 5)),
    "cosmos": (cosmos, cosmos_inputs, (3, 3, 5)),
    "allegro": (allegro, allegro_inputs, (3, 3, 5)),
    "kandinsky5": (kandinsky5, kandinsky5_inputs, (3, 3, 5)),
    "hunyuan_video15": (hunyuan_video15, hunyuan15_inputs, (3, 3, 5)),
    "hunyuan_video15_t2v": (hunyuan_video15, lambda: hunyuan15_inputs(image=False), (3, 3, 5)),
    "mochi": (mochi, mochi_inputs, (3, 3, 5)),
    "framepack": (framepack, lambda: framepack_inputs([TEXT, 4]), (3, 3, 5), FRAMEPACK_HISTORY),
    "framepack_alone": (framepack, lambda: framepack_inputs([4]), (3, 3, 5), FRAMEPACK_HISTORY),
    "ltx2": (lambda: diffusers.LTX2VideoTransformer3DModel(**LTX2), ltx2_inputs, (3, 3, 5)),
    "ltx2_conditions": (
        lambda: diffusers.LTX2VideoTransformer3DModel(**LTX2),
        lambda: ltx2_inputs(7, video_coords=random(2, 3, 52, 2).abs()), (3, 3, 5),
    ),
    "ltx23": (ltx23, ltx23_inputs, (3, 3, 5)),
    "easyanimate": (easyanimate, easyanimate_inputs, (3, 3, 5)),
    "consisid": (consisid, consisid_inputs, (3, 3, 5)),
    "cosmos25": (cosmos25, cosmos25_inputs, (3, 3, 5)),
    "cosmos3": (cosmos3, cosmos3_inputs, (3, 3, 5)),
    "cosmos3_action": (cosmos3_action, lambda: cosmos3_inputs(action=4), (3, 3, 5), 7),
    "motif_video": (motif_video, motif_inputs, (3, 3, 5)),
    "motif_video_decoder": (motif_video_decoder, lambda: motif_inputs(image_embeds=random(2, 5, 12)), (3, 3, 5)),
    "helios": (helios, helios_inputs, (3, 3, 5)),
    "helios_first_chunk": (helios, lambda: helios_inputs(history=False), (3, 3, 5)),
    "minimax_h3": (minimax_h3, minimax_inputs, (3, 3, 5)),
    "minimax_h3_silent": (minimax_h3, lambda: minimax_inputs(audio=0), (3, 3, 5)),
    "kandinsky6": (kandinsky6, kandinsky6_inputs, (3, 3, 5)),
}


def sparse_config(grid):
    """0.4 of the pairs; of two frames, the sink alone has half of them."""
    return SPARSE if grid[0] > 2 else SPARSE.replace(density=0.6)


# compiling for XLA:CPU takes seconds a case: by default the families with joint text stand for the others there
ON_XLA_BY_DEFAULT = ("hunyuan_video", "cogvideox15")


def on_cpu_and_xla(names=CASES):
    """Parameters (name, device); on XLA:CPU most of them are slow."""
    return [
        pytest.param(name, device, id=f"{name}-{device}", marks=() if quick else pytest.mark.slow)
        for name in names
        for device in ("cpu", "xla")
        for quick in [device == "cpu" or name in ON_XLA_BY_DEFAULT]
    ]


def make_case(name):
    build, inputs, grid, *leading = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            # a gate that starts at zero would hide what attention does
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.3)
    return lambda: copy.deepcopy(model), inputs(), grid, sum(leading)


@torch.no_grad()
def run(transformer, inputs, device="cpu"):
    def move(x):
        if isinstance(x, (tuple, list)):
            return type(x)(map(move, x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    def tensors(x):
        return [x] if isinstance(x, torch.Tensor) else [y for part in x or () for y in tensors(part)]

    transformer.to(device)
    outputs = tensors(transformer(**{name: move(x) for name, x in inputs.items()}, return_dict=False))
    if len(outputs) > 1:
        # rows of a batch stay rows, where all outputs have them
        rows = len(outputs[0]) if len({len(x) for x in outputs}) == 1 else 1
        outputs = [torch.cat([x.reshape(rows, -1) for x in outputs], dim=1)]
    return outputs[0].cpu()


def put_on(transformer, config=None):
    """Sets the processor as a user would: by diffusers' own call where the class has it."""
    if not hasattr(transformer, "set_attn_processor"):
        return torch_svg.enable(transformer, config)
    processor = SparseVideoAttnProcessor(config)
    transformer.set_attn_processor(processor)
    return processor
