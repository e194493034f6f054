"""Where a stream goes on inside a character, and which of the other engine's text is its own.

An engine gives text when a character is whole. One whose prompt ends inside a character has nothing to begin from, and
gives the text of its whole prompt with the first character that it completes (vLLM ``v1/engine/detokenizer.py``):

    prompt's ids              p r o m p t   g e n e r a t e d   ½
    the client has                          G
    ids that are drawn                                            ½   …
    the first text            P             G                   日     the part behind G is new

P is known only where the client sent it as text, and even then a tokenizer may give it back otherwise; G is known. So the
new part is what stands behind G, at the end of that text, if there is one such place alone.
"""

from __future__ import annotations

from typing import Final

MAX_NEW: Final = 32
"""Characters that the tokens from the seam to the first whole character may have."""
MAX_PLAIN: Final = 256
"""Characters of a first text that is only new."""
MIN_KNOWN: Final = 8
"""Characters before the seam that must be known: fewer may stand anywhere."""


class Seam:
    """What the client has, as the other engine will say it again."""

    __slots__ = ("_inside", "_known")

    def __init__(self, whole: str, said: str, *, inside: bool) -> None:
        """``said``: what the client has; ``whole``: with the prompt's text before it, where that is known.

        ``inside``: the last id had no text, so it is inside a character. Else several came at once, and it may be.
        """
        self._known = tuple(dict.fromkeys(one for one in (whole, said) if len(one) >= MIN_KNOWN))
        self._inside = inside

    def own(self, channel: str, text: str) -> str | None:
        """The new part of the first text; None where it cannot be told."""
        if channel not in {"text", "content"}:
            return None
        for known in self._known:
            places = [at for at in range(max(0, len(text) - MAX_NEW), len(text)) if text.endswith(known, 0, at)]
            if places:
                return text[places[0]:] if len(places) == 1 else None
        return None if self._inside or len(text) > MAX_PLAIN else text


NOWHERE: Final = Seam("", "", inside=True)
"""Nothing can be told."""
