"""Where the tokens of a sequence stand: a video grid and, in joint attention, a block of text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of one attention call, in the order in which they lie in memory.

    The video part is frame-major: frame, then row, then column. A joint attention carries a block of text tokens
    before (``text_first``) or after the video. Built per call from the shapes that the model gives, never stored on
    a class, so that one process can serve several resolutions.

    Args:
        frames: Latent frames after patching.
        height: Token rows of a frame.
        width: Token columns of a frame.
        text_tokens: Text tokens in the same sequence, padding included. 0 where text has its own cross-attention.
        text_first: Whether the text block stands before the video.

    Raises:
        ValueError: A side is not a positive integer, or ``text_tokens`` is negative.
    """

    frames: int
    height: int
    width: int
    text_tokens: int = 0
    text_first: bool = False

    def __post_init__(self):
        for name in ("frames", "height", "width"):
            side = getattr(self, name)
            if not isinstance(side, int) or side < 1:
                raise ValueError(f"a token grid needs positive whole sides, got {name}={side!r}")
        if not isinstance(self.text_tokens, int) or self.text_tokens < 0:
            raise ValueError(f"text_tokens must be a whole number of tokens >= 0, got {self.text_tokens!r}")

    @property
    def tokens_per_frame(self) -> int:
        return self.height * self.width

    @property
    def video_tokens(self) -> int:
        return self.frames * self.tokens_per_frame

    @property
    def tokens(self) -> int:
        return self.video_tokens + self.text_tokens

    @property
    def video_start(self) -> int:
        """Memory row of the first video token."""
        return self.text_tokens if self.text_first else 0

    @property
    def text_start(self) -> int:
        """Memory row of the first text token (the end of the sequence where there is none)."""
        return 0 if self.text_first else self.video_tokens

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError when a sequence of ``tokens`` tokens cannot be this grid."""
        if tokens != self.tokens:
            text = f" + {self.text_tokens} text" if self.text_tokens else ""
            raise ValueError(
                f"the attention got {tokens} tokens, but the grid {self.frames} x {self.height} x {self.width}{text} "
                f"has {self.tokens}: the latents' shape and the attention's sequence must belong to the same call"
            )
