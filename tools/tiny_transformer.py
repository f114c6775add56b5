"""Third stage: a WanTransformer3DModel and its text encoder, trained together by flow matching.

Small clips first, where a step is cheap, then clips of the final size; the rotary positions carry over. Both processors
below compute what diffusers' WanAttnProcessor computes, in forms that are quicker to train on a CPU.

An earlier run of 4,850 steps never learnt left from right. Two things are otherwise now; the first was seen to be the
cause (attention to padding alone in two of four blocks), whether the second is needed was not tried by itself:

- Prompts are padded briefly at first (`Phase.padded`). A Wan pipeline attends to its padding, and 500 equal keys take
  nearly all attention of a network that has not yet learnt to look at words; it settles there, and the words get no
  gradient.
- A token must know its own place before "left" can mean "right in the first frame, left in the last", and rotary
  positions tell it only relative ones. `PlaceHead` asks for the place and is left behind after the training.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tools.checkpoints import load_checkpoint, log_line, save_checkpoint
from tools.muon import Muon, Together, split_parameters

TRANSFORMER_CONFIG = {
    "patch_size": (1, 1, 1),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 12,
    "out_channels": 12,
    "text_dim": 64,
    "freq_dim": 128,
    "ffn_dim": 768,
    "num_layers": 4,
    "rope_max_seq_len": 64,
}
TEXT_CONFIG = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
TEXT_TOKENS = 10
CAPTION_DROPOUT = 0.1
# the block whose output must tell a token's place in phases that ask for it
PLACE_BLOCK = 1


@dataclass(frozen=True)
class Phase:
    """A stretch of training on clips of one size.

    `shift` moves the noise levels up, as larger clips need; `place` weighs the error of each token's place in the loss.
    `padded` are the lengths to which prompts are padded.
    """

    size: int
    steps: int
    batch: int
    shift: float
    place: float = 0.0
    padded: tuple[int, ...] = (16,)


class TextToVideo(nn.Module):
    """The two trained parts in one module, so that they share an optimizer and a checkpoint."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        super().__init__()
        self.transformer = WanTransformer3DModel(**TRANSFORMER_CONFIG)
        self.text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **TEXT_CONFIG))


class PlaceHead(nn.Module):
    """Reads each token's place (frame, row, column; -1 to 1) off a block's output. Left behind after the training."""

    def __init__(self, block: nn.Module, width: int):
        super().__init__()
        self.read = nn.Linear(width, 3)
        self.seen = None
        block.register_forward_hook(self._keep)

    def _keep(self, block, inputs, output):
        self.seen = output

    def error(self, grid: tuple[int, int, int]) -> torch.Tensor:
        """Mean squared error over the last forward of the block; 1/3 is what a guess at the middle gets."""
        sides = [torch.linspace(-1, 1, side) for side in grid]
        places = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 2)
        guessed = self.read(F.layer_norm(self.seen.float(), self.seen.shape[-1:]))
        return F.mse_loss(guessed, places.expand_as(guessed))


class SelfAttention:
    """Rotary positions as one small matrix product instead of strided writes, and fused norms."""

    def __init__(self, head_dim: int):
        even = torch.arange(0, head_dim, 2)
        self.swap_pairs = torch.zeros(head_dim, head_dim)
        self.swap_pairs[even + 1, even], self.swap_pairs[even, even + 1] = -1.0, 1.0

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        query, key, value = _heads(attn, hidden_states, hidden_states)
        cos, sin = (table.transpose(1, 2).to(query.dtype) for table in rotary_emb)
        swap_pairs = self.swap_pairs.to(query.dtype)
        query = query * cos + (query @ swap_pairs) * sin
        key = key * cos + (key @ swap_pairs) * sin
        # the plain form trains faster than the fused one here, whose backward pass is slow at a head width of 64
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        return attn.to_out[0]((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class CaptionAttention:
    """Cross-attention to a short text whose one padding key stands for all of them.

    A pipeline pads the text with zeros to some length and attends to the padding too. Equal keys weigh as one key with
    the logarithm of their number added to its score.
    """

    def __init__(self):
        self.score_bias = None

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        query, key, value = _heads(attn, hidden_states, encoder_hidden_states)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + self.score_bias.to(query.dtype)
        return attn.to_out[0]((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def _heads(attn, query_states, key_states) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed query, key and value, (batch, heads, tokens, head_dim)."""
    query, key, value = attn.to_q(query_states), attn.to_k(key_states), attn.to_v(key_states)
    query = F.rms_norm(query, query.shape[-1:], attn.norm_q.weight.to(query.dtype), attn.norm_q.eps)
    key = F.rms_norm(key, key.shape[-1:], attn.norm_k.weight.to(key.dtype), attn.norm_k.eps)
    return tuple(part.unflatten(2, (attn.heads, -1)).transpose(1, 2) for part in (query, key, value))


def padding_bias(lengths: torch.Tensor, padded_length: int) -> torch.Tensor:
    """Score biases (batch, 1, 1, TEXT_TOKENS): 0 for words, the logarithm of the padding for the key after them."""
    position = torch.arange(TEXT_TOKENS)
    bias = torch.where(position < lengths[:, None], 0.0, -math.inf)
    bias = torch.where(position == lengths[:, None], (padded_length - lengths[:, None]).float().log(), bias)
    return bias[:, None, None]


def flow_matching_loss(
    model: TextToVideo, caption_attention: CaptionAttention, tokens: dict, latents: torch.Tensor, phase: Phase
) -> torch.Tensor:
    """Mean squared error of the velocity (noise - latents) at one random noise level per clip.

    Args:
        tokens: `input_ids` and `attention_mask`, (batch, TEXT_TOKENS).
        latents: Normalised latents (batch, channels, frames, height, width).
    """
    level = torch.sigmoid(1.2 * torch.randn(len(latents)))
    level = phase.shift * level / (1 + (phase.shift - 1) * level)
    noise = torch.randn_like(latents)
    weight = level.view(-1, 1, 1, 1, 1)
    lengths = tokens["attention_mask"].sum(1)
    caption_attention.score_bias = padding_bias(lengths, phase.padded[torch.randint(len(phase.padded), ())])
    with torch.autocast("cpu", torch.bfloat16):
        text = model.text_encoder(**tokens).last_hidden_state * tokens["attention_mask"][..., None]
        noisy = (1 - weight) * latents + weight * noise
        velocity = model.transformer(noisy, level * 1000, text, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - latents)


def train_transformer(
    run: Path,
    tokenizer: PreTrainedTokenizerFast,
    data: dict[int, tuple[list[str], torch.Tensor]],
    phases: tuple[Phase, ...],
    warmup: int = 50,
) -> TextToVideo:
    """Train through the phases or take them up at the last checkpoint; returns the averaged weights.

    Args:
        data: For each clip size, captions and normalised latents.
        phases: Trained one after the other; the learning rate falls to zero over the last third of all steps.

    Under `torch.distributed` every process takes its share of a batch, and gradients are averaged.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(1)
    model, average = TextToVideo(tokenizer), TextToVideo(tokenizer).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    # Muon is for the matrices inside the blocks; embeddings and the last projection are AdamW's
    matrices, _ = split_parameters([model.transformer.blocks])
    in_blocks = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in in_blocks]
    place_head = PlaceHead(model.transformer.blocks[PLACE_BLOCK], model.transformer.proj_out.in_features)
    optimizer = Together(
        Muon(matrices, lr=4e-3),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95)),
        torch.optim.AdamW(place_head.parameters(), lr=2e-3),
    )
    first = load_checkpoint(run / "transformer.pt", model, average, optimizer, place_head=place_head)
    caption_attention, self_attention = CaptionAttention(), SelfAttention(TRANSFORMER_CONFIG["attention_head_dim"])
    for block in model.transformer.blocks:
        block.attn1.set_processor(self_attention)
        block.attn2.set_processor(caption_attention)

    schedule = [phase for phase in phases for _ in range(phase.steps)]
    total = len(schedule)
    for step in (bar := tqdm(range(first, total), initial=first, total=total, desc="transformer", disable=rank > 0)):
        phase = schedule[step]
        # a step's data and noise follow from its number alone, so that a resumed run is the same run
        torch.manual_seed(step * ranks + rank)
        captions, latents = data[phase.size]
        batch = phase.batch // ranks
        chosen = torch.randint(len(captions), (batch,))
        kept = torch.rand(batch) >= CAPTION_DROPOUT
        texts = [captions[i] if keep else "" for i, keep in zip(chosen.tolist(), kept, strict=True)]
        tokens = tokenizer(texts, padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt")
        tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        loss = flow_matching_loss(model, caption_attention, tokens, latents[chosen].float(), phase)
        place = place_head.error(latents.shape[2:]) if phase.place else torch.zeros(())
        (loss + phase.place * place).backward()
        if ranks > 1:
            average_gradients(model, ranks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(min(1, (step + 1) / warmup, (total - step) / (total / 3)))
        decay = min(0.998, (step + 1) / (step + 20))
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 1 - decay)
        if rank > 0:
            continue
        bar.set_postfix(size=phase.size, loss=f"{loss.item():.4f}", place=f"{place.item():.3f}")
        log_line(run / "transformer.log", step=step + 1, size=phase.size, loss=loss.item(), place=place.item())
        if (step + 1) % 50 == 0 or step + 1 == total:
            save_checkpoint(run / "transformer.pt", step + 1, model, average, optimizer, place_head=place_head)
    return average


def average_gradients(model: nn.Module, ranks: int) -> None:
    """Replace each gradient by its mean over all processes, in one transfer."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = (flat / ranks).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
