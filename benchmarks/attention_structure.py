"""Where the heads of a video transformer look: the share of attention near the query's frame, and at its place."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from torch_svg.grid import TokenGrid
from torch_svg.interception import intercept_core
from torch_svg.routing import sample_rows


@dataclass
class AttentionStructure:
    """Attention mass of sampled queries, collected while a pipeline runs.

    Attributes:
        masses: (forward, layer) -> (heads, 2) mean mass within one frame of the query's, and within one token of the
            query's place over all frames.
        uniform: The same two shares if attention were uniform.
    """

    grid: TokenGrid
    rows: tuple[int, ...] = ()
    masses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.rows = self.rows or sample_rows(self.grid, 64)
        token = torch.arange(self.grid.video_tokens)
        frame, place = token // self.grid.tokens_per_frame, token % self.grid.tokens_per_frame
        row, column = place // self.grid.width, place % self.grid.width
        sampled = torch.tensor(self.rows) - self.grid.video_start
        near = [(values[sampled, None] - values[None]).abs() <= 1 for values in (frame, row, column)]
        # (2, sampled rows, tokens)
        self.regions = torch.stack([near[0], near[1] & near[2]]).float()
        self.uniform = self.regions.mean((1, 2))

    def record(self, forward: int, layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        """Keep the masses of the first clip of a batch; query and key are (batch, tokens, heads, head_dim)."""
        sampled = query[0, list(self.rows)].transpose(0, 1).float()
        scores = sampled @ key[0].permute(1, 2, 0).float() * query.shape[-1] ** -0.5
        self.masses[forward, layer] = torch.einsum("hqk,rqk->hr", scores.softmax(-1), self.regions) / len(self.rows)

    def by_layer(self) -> torch.Tensor:
        """(layers, heads, 2) mean over forwards."""
        layers = 1 + max(layer for _, layer in self.masses)
        return torch.stack(
            [torch.stack([m for (_, at), m in self.masses.items() if at == layer]).mean(0) for layer in range(layers)]
        )


@contextlib.contextmanager
def observed(transformer, structure: AttentionStructure):
    """Within the block, every self-attention of a Wan transformer reports to `structure`; results stay the same."""
    modules = [block.attn1 for block in transformer.blocks]
    stock = [module.processor for module in modules]
    for layer, module in enumerate(modules):
        module.set_processor(_Observer(stock[layer], layer, structure))
    try:
        yield structure
    finally:
        for module, processor in zip(modules, stock, strict=True):
            module.set_processor(processor)


class _Observer:
    _attention_backend = None
    _parallel_config = None

    def __init__(self, processor, layer: int, structure: AttentionStructure):
        self.processor, self.layer, self.structure = processor, layer, structure
        self.forwards = 0

    def __call__(self, attn, hidden_states, *args, **kwargs):
        def core(query, key, value, mask, scale):
            self.structure.record(self.forwards, self.layer, query, key)
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)

        with intercept_core(self.processor, core):
            output = self.processor(attn, hidden_states, *args, **kwargs)
        self.forwards += 1
        return output
