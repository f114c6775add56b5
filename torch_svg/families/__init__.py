"""The registry of served transformer families."""

from __future__ import annotations

from .allegro import ALLEGRO
from .base import Family, forward_inputs
from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .hunyuan_video import HUNYUAN_VIDEO
from .kandinsky5 import KANDINSKY5
from .ltx import LTX
from .wan import WAN

FAMILIES: tuple[Family, ...] = (WAN, HUNYUAN_VIDEO, COGVIDEOX, LTX, COSMOS, ALLEGRO, KANDINSKY5)

__all__ = ["FAMILIES", "Family", "family_of", "forward_inputs"]


def family_of(transformer) -> Family:
    """The family that serves a transformer.

    Raises:
        NotImplementedError: No family serves this class; names it and the served ones.
    """
    name = type(transformer).__name__
    for family in FAMILIES:
        if name in family.transformers:
            return family
    served = ", ".join(sorted(cls for family in FAMILIES for cls in family.transformers))
    raise NotImplementedError(
        f"sparse video attention does not serve {name}; served: {served}. The pipeline runs with its own processors"
    )
