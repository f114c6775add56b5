"""Transformers that sparse video attention does not serve, and why."""

UNSERVED: dict[str, str] = {
    "LatteTransformer3DModel": (
        "its attention is factorised: within a frame, then along time, so no sequence is long enough to gain"
    ),
    "SanaVideoTransformer3DModel": "its self-attention is linear, without a softmax whose pairs could be left out",
    "SanaWMTransformer3DModel": (
        "its self-attention is linear, but for every fourth block, which computes its own without a processor"
    ),
    "SanaWMLTX2RefinerTransformer3DModel": (
        "it refines a chunk at a time against cached keys, so queries and keys are not one grid"
    ),
    "Kandinsky6SRTransformer3DModel": (
        "it has its own sparse attention (NABLA), with tokens in blocks of 8 x 8, not frame by frame"
    ),
    "AnyFlowTransformer3DModel": "its rotary embedding is complex, which XLA does not compile for a TPU",
    "AnyFlowFARTransformer3DModel": (
        "it attends in causal chunks against cached and compressed frames, so queries and keys are not one grid"
    ),
    "WanAnimate2Transformer3DModel": (
        "it attends to cached reference frames under a block mask, so queries and keys are not one grid, and its "
        "rotary embedding is complex"
    ),
    "JoyImageEditTransformer3DModel": "it makes images, which have no frames",
    "JoyImageEditPlusTransformer3DModel": "it makes images, which have no frames",
}
