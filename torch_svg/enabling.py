"""One call that turns sparse attention on for a whole pipeline, and one that turns it off again."""

from __future__ import annotations

import contextlib

from .config import SparseVideoConfig
from .families import family_of, set_processor
from .processor import SparseVideoAttnProcessor

# names under which diffusers pipelines keep their video transformers
_TRANSFORMERS = ("transformer", "transformer_2", "transformer_3", "transformer_ref")


def enable(pipe_or_transformer, config: SparseVideoConfig | None = None) -> SparseVideoAttnProcessor:
    """Sparse attention in every video self-attention of a pipeline or transformer.

    Unlike ``set_attn_processor`` this leaves every other attention module's processor in place, keeps the processors
    that it replaces for ``disable``, and serves a pipeline with two transformers in one call. Everything is checked
    before anything is changed.

    Args:
        pipe_or_transformer: A diffusers pipeline, or a transformer of a served family.
        config: What to compute; see ``SparseVideoConfig``.

    Returns:
        The processor, which has the report.

    Raises:
        NotImplementedError: A transformer is not served.
        ValueError: A pipeline without a transformer.
    """
    transformers = _transformers_of(pipe_or_transformer)
    families = [family_of(transformer) for transformer in transformers]
    disable(pipe_or_transformer)
    processor = SparseVideoAttnProcessor(config)
    for transformer, family in zip(transformers, families, strict=True):
        modules = family.video_attention_modules(transformer)
        wrapped = {path: module.processor for path, module in modules.items()}
        for module in modules.values():
            set_processor(module, processor)
        processor.bind(transformer, wrapped)
    return processor


def disable(pipe_or_transformer) -> None:
    """Gives every attention module back the processor that it had before ``enable`` or ``set_attn_processor``."""
    for transformer in _transformers_of(pipe_or_transformer):
        processors = {
            id(module.processor): module.processor
            for module in transformer.modules()
            if isinstance(getattr(module, "processor", None), SparseVideoAttnProcessor)
        }
        for processor in processors.values():
            processor.release(transformer)


@contextlib.contextmanager
def sparse_attention(pipe_or_transformer, config: SparseVideoConfig | None = None):
    """``enable`` within a block, ``disable`` after it; gives the processor."""
    processor = enable(pipe_or_transformer, config)
    try:
        yield processor
    finally:
        disable(pipe_or_transformer)


def _transformers_of(pipe_or_transformer) -> list:
    if hasattr(pipe_or_transformer, "components"):
        found = [getattr(pipe_or_transformer, name, None) for name in _TRANSFORMERS]
        found = [transformer for transformer in found if transformer is not None]
        if not found:
            raise ValueError(f"{type(pipe_or_transformer).__name__} has none of {', '.join(_TRANSFORMERS)}")
        return found
    return [pipe_or_transformer]
