"""What a prefill engine of each known version of vLLM says first, as it was recorded from that version's sources.

    PYTHONPATH=… python tests/support/vllm_hellos.py        records what the vLLM on the path says into tests/data

What is by chance (incarnations) or by the machine (the instruction set, the folder of the model) is made equal. What is
left is vLLM's: its version, types, layout, and the arrays of its ranks.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from scheduled_engines import Scheduled
from vllm_places import VERSION

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.kv import messages

FILE = Path(__file__).resolve().parents[1] / "data/vllm_hellos.json"
"""By version: the frame of HELLO, base64."""


def hello(engine: Scheduled) -> messages.Hello:
    """Of an engine of this version."""
    ours = engine.connector.scheduler._hearing.ours
    assert ours is not None
    fingerprint = msgspec.structs.replace(ours.fingerprint, isa="any", model="m")
    said = ours.hello(Incarnation("0" * 32))
    return msgspec.structs.replace(said, incarnation=Incarnation("1" * 32), fingerprint=fingerprint)


def recorded() -> dict[str, messages.Hello]:
    """By version."""
    found: dict[str, messages.Hello] = {}
    for version, frame in _read().items():
        said = messages.unpack(base64.b64decode(frame))
        assert isinstance(said, messages.Hello)
        found[version] = said
    return found


def _read() -> dict[str, str]:
    known: Any = json.loads(FILE.read_text()) if FILE.exists() else {}
    return dict(known)


def main() -> None:
    """Record."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Scheduled("p", Path(folder))
        try:
            frame = messages.pack(hello(engine))[-1]
        finally:
            engine.stop()
    known = _read() | {VERSION: base64.b64encode(frame).decode()}
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(f"{VERSION}: {len(frame)} bytes")


if __name__ == "__main__":
    main()
