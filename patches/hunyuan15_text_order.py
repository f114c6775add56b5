"""HunyuanVideo 1.5 sorts valid text before padding by boolean indexing, which waits for the device in every forward."""

import functools
import inspect

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .patch import Patch, on_xla


def _without_waiting(forward):
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if not on_xla(*args, *kwargs.values()):
            return forward(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        inputs = call.arguments
        order = _TextOrder(inputs["image_embeds"], inputs["encoder_attention_mask_2"], inputs["encoder_attention_mask"])
        # upstream's own sorting sees masks that keep everything, on the host, where looking costs nothing
        inputs["image_embeds"] = torch.full((1,), float(order.has_image))
        for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
            inputs[name] = torch.ones(inputs[name].shape, dtype=torch.bool)
        hooks = [
            self.image_embedder.register_forward_pre_hook(order.give_image),
            self.context_embedder.register_forward_pre_hook(order.give_text_mask),
            self.transformer_blocks[0].register_forward_pre_hook(order.sort_text),
            *(block.register_forward_pre_hook(order.give_sorted_mask) for block in self.transformer_blocks),
        ]
        try:
            return forward(*call.args, **call.kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    return wrapper


class _TextOrder:
    """The order of text tokens, valid ones first, as tensors of fixed shape: one graph for prompts of any length.

    Args:
        image: (batch, image_tokens, channels), zeros where there is no image.
        glyph_mask, text_mask: (batch, tokens), nonzero where a token is valid.
    """

    def __init__(self, image: torch.Tensor, glyph_mask: torch.Tensor, text_mask: torch.Tensor):
        self.image = image
        self.text_mask = text_mask
        self.has_image = _any_nonzero(image)
        image_mask = torch.full(image.shape[:2], self.has_image, device=text_mask.device)
        # as upstream joins them: what is not there stands last
        masks = [image_mask, glyph_mask.bool(), text_mask.bool()]
        valid = torch.cat(masks if self.has_image else [*masks[1:], masks[0]], dim=1)
        self.places = torch.sort(valid.int(), dim=1, descending=True, stable=True).indices
        tokens = torch.arange(valid.shape[1], device=valid.device)
        self.sorted_mask = tokens[None] < valid.sum(dim=1, keepdim=True)

    def give_image(self, module, args):
        return (self.image, *args[1:])

    def give_text_mask(self, module, args):
        text, timestep, _ = args
        return text, timestep, self.text_mask

    def sort_text(self, module, args):
        video, text, *others = args
        text = torch.stack([row.index_select(0, places) for row, places in zip(text, self.places, strict=True)])
        return video, torch.where(self.sorted_mask[..., None], text, 0), *others

    def give_sorted_mask(self, module, args):
        video, text, conditioning, _, *others = args
        return video, text, conditioning, self.sorted_mask, *others


def _any_nonzero(tensor: torch.Tensor) -> bool:
    """Whether an input that a pipeline hands to every step is more than zeros; read from the device once."""
    version = 0 if tensor.is_inference() else tensor._version
    known_version, answer = _ANSWERS.get(tensor, (None, None))
    if known_version != version:
        answer = bool(tensor.cpu().any())
        _ANSWERS[tensor] = (version, answer)
    return answer


_ANSWERS = WeakTensorKeyDictionary()

PATCH = Patch(
    name="hunyuan15_text_order",
    what="HunyuanVideo 1.5 waits for the device a dozen times a forward, and compiles anew for every prompt length, "
    "since it sorts its text tokens by boolean indexing",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/"
    "transformer_hunyuan_video15.py#L733",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="the transformer sorts its text without boolean indexing",
    targets=(
        (
            "diffusers.models.transformers.transformer_hunyuan_video15",
            "HunyuanVideo15Transformer3DModel.forward",
        ),
    ),
    wrap=_without_waiting,
)
