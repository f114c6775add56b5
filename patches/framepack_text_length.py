"""Framepack cuts text to its valid length on the host: it waits for the device, and each prompt length is a graph."""

import functools
import inspect

import torch

from .patch import Patch, on_xla


def _masking(forward):
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if not on_xla(*args, *kwargs.values()):
            return forward(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        text_mask = call.arguments["encoder_attention_mask"]
        image_tokens = call.arguments["image_embeds"].shape[1]
        # upstream counts a mask that keeps everything, on the host, where counting costs nothing
        call.arguments["encoder_attention_mask"] = torch.ones(text_mask.shape, dtype=torch.long)

        def give_text_mask(module, args):
            text, timestep, _ = args
            return text, timestep, text_mask

        def give_joint_mask(module, args):
            video, text, conditioning, _, *others = args
            # text tokens stand behind those of the video and the image
            ahead = video.shape[1] + image_tokens
            keep = torch.cat([text_mask.new_ones((len(text_mask), ahead)), text_mask], dim=1).bool()
            return video, text, conditioning, keep[:, None, None], *others

        blocks = [*self.transformer_blocks, *self.single_transformer_blocks]
        hooks = [self.context_embedder.register_forward_pre_hook(give_text_mask)]
        hooks += [block.register_forward_pre_hook(give_joint_mask) for block in blocks]
        try:
            return forward(*call.args, **call.kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    return wrapper


PATCH = Patch(
    name="framepack_text_length",
    what="Framepack waits for the device in every forward, and compiles anew for every prompt length, since it cuts "
    "the text to its valid tokens on the host",
    upstream="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/transformers/"
    "transformer_hunyuan_video_framepack.py#L331",
    versions={"diffusers": ">=0.41,<0.43", "torch_xla": "==2.9.*"},
    delete_when="the transformer masks padded text instead of cutting it off",
    targets=(
        (
            "diffusers.models.transformers.transformer_hunyuan_video_framepack",
            "HunyuanVideoFramepackTransformer3DModel.forward",
        ),
    ),
    wrap=_masking,
)
