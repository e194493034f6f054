"""Which versions of the KV plane an engine speaks, as one word: ``control.data.geometry``, such as ``1.3.1``.

Engines whose words differ cannot exchange KV, whatever their fingerprints: each would refuse what the other says. So the
word goes into the engine's record, and from there into what its agent tells routers (``agent.beat``).
"""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.kv import frames, mapping, messages

SPOKEN: Final = f"{messages.WIRE_VERSION}.{frames.WIRE_VERSION}.{mapping.VERSION}"
