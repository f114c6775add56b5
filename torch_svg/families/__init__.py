"""The registry of served transformer families."""

from __future__ import annotations

from .allegro import ALLEGRO
from .base import Family, TextMask, forward_inputs, set_processor
from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .cosmos3 import COSMOS3
from .easyanimate import EASYANIMATE
from .framepack import FRAMEPACK
from .helios import HELIOS
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .kandinsky5 import KANDINSKY5
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
    MOCHI,
    EASYANIMATE,
    HELIOS,
    MOTIF_VIDEO,
    MINIMAX_H3,
)

__all__ = ["FAMILIES", "UNSERVED", "Family", "TextMask", "family_of", "forward_inputs", "set_processor"]


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
