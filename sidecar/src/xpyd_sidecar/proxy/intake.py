"""A read that is exactly one plain request for generation, taken in one call where that was compiled (``_intake``); and
what requests of its shape have in common, and the outlines of bodies (``_shape``).

Belongs here: the choice. XPYD_PLAIN=1 in the environment leaves every read to the parser.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar import built
from xpyd_sidecar.routing import outline, shapes

REVISION, SHAPE_REVISION = 4, 2
"""Of what both have in common; grow with every change of ``_intake.c`` and of ``_shape.c``."""
Plain = tuple[str, bytes, dict[bytes, bytes], bytes]
"""Path, the same as it was written, headers (names in lower case; of repeated ones the first), body."""
Take = Callable[[bytes, int, int], Plain | None]


def _nothing(data: bytes, header_bytes: int, body_bytes: int) -> Plain | None:  # noqa: ARG001 (the compiled one's names)
    """The request that ``data`` is, within these limits. None: it is none, or a case for the parser (here: always)."""
    return None


take: Take = _nothing
looked: shapes.Looked = shapes.looked
judged: outline.Judge = outline.judged
message: Callable[[bytes, bytes, shapes.Form, tuple[bytes, ...]], bytes] = shapes.message
try:
    from xpyd_sidecar.proxy import _intake, _shape

    built.check("the shortcuts", _intake.REVISION, REVISION)
    built.check("the shortcuts", _shape.REVISION, SHAPE_REVISION)
    take = _intake.request
    looked, message, judged = _shape.looked, _shape.message, _shape.judged
except ImportError:  # not built, or for another machine: everything works without
    pass
