"""The registry of served transformer families."""

from __future__ import annotations

from dataclasses import dataclass

from .allegro import ALLEGRO
from .base import Facts, Family, TextMask, forward_inputs, set_processor
from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .cosmos3 import COSMOS3
from .easyanimate import EASYANIMATE
from .framepack import FRAMEPACK
from .helios import HELIOS
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .kandinsky5 import KANDINSKY5, KANDINSKY6
from .ltx import LTX
from .ltx2 import LTX2
from .minimax_h3 import MINIMAX_H3
from .mochi import MOCHI
from .motif_video import MOTIF_VIDEO
from .unserved import UNSERVED
from .wan import WAN

FAMILIES: tuple[Family, ...] = (
    WAN,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO15,
    FRAMEPACK,
    COGVIDEOX,
    LTX,
    LTX2,
    COSMOS,
    COSMOS3,
    ALLEGRO,
    KANDINSKY5,
    KANDINSKY6,
    MOCHI,
    EASYANIMATE,
    HELIOS,
    MOTIF_VIDEO,
    MINIMAX_H3,
)

__all__ = [
    "FAMILIES", "UNSERVED", "Entry", "Facts", "Family", "TextMask", "catalogue", "family_of", "forward_inputs",
    "set_processor",
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A row of the table of models.

    Args:
        transformer: Name of the diffusers class.
        family: Name of the family that serves it, or None.
        sparse: "yes" or "no".
        reason: Why not, where it is not served.
        models: Released models that use the class.
        head_dims: Channels of a head in those.
        text: Where text stands.
        masks: What becomes of padded text: masked by "key lengths" in the kernel, by the model in its
            "cross-attention", or "attended" as it is.
        others: Other tokens in the video's sequence, which stay exact.
        grid: What the grid is read from.
        note: What is not served, or costs more than expected.
        pipelines: diffusers pipelines that the tests run whole.
    """

    transformer: str
    family: str | None
    sparse: str
    reason: str = ""
    models: str = ""
    head_dims: tuple[int, ...] = ()
    text: str = ""
    masks: str = ""
    others: str = ""
    grid: str = ""
    note: str = ""
    pipelines: tuple[str, ...] = ()


def catalogue() -> list[Entry]:
    """Every video transformer of diffusers, served or not, as the registry has it."""
    served = [
        Entry(
            transformer=name,
            family=family.name,
            sparse="yes",
            models=facts.models,
            head_dims=facts.head_dims,
            text=family.text,
            masks=family.masks,
            others=family.others,
            grid=family.grid_source,
            note=facts.note,
            pipelines=facts.pipelines,
        )
        for family in FAMILIES
        for name, facts in family.transformers.items()
    ]
    return served + [Entry(name, None, "no", reason) for name, reason in UNSERVED.items()]


def family_of(transformer) -> Family:
    """The family that serves a transformer.

    Raises:
        NotImplementedError: No family serves this class; says why, or names the served ones.
    """
    name = type(transformer).__name__
    for family in FAMILIES:
        if name in family.transformers:
            return family
    if name in UNSERVED:
        raise NotImplementedError(
            f"sparse video attention does not serve {name}: {UNSERVED[name]}. The pipeline runs with its own processors"
        )
    served = ", ".join(sorted(cls for family in FAMILIES for cls in family.transformers))
    raise NotImplementedError(
        f"sparse video attention does not serve {name}; served: {served}. The pipeline runs with its own processors"
    )
