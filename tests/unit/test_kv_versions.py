"""The word for the versions of the KV plane."""

from __future__ import annotations

from pathlib import Path

import msgspec
from agent_fakes import record_of

from xpyd_sidecar.contract import record
from xpyd_sidecar.kv import frames, mapping, messages, peers


def test_the_word_has_every_version_that_a_peer_refuses() -> None:
    spoken = peers.SPOKEN.split(".")
    assert spoken == [str(each) for each in (messages.WIRE_VERSION, frames.WIRE_VERSION, mapping.VERSION)]


def test_a_record_of_a_release_that_said_no_versions_has_the_first_ones(tmp_path: Path) -> None:
    told = msgspec.to_builtins(record_of())
    del told["kv"]
    record.path_of(tmp_path, 0).write_bytes(msgspec.json.encode(told))
    found = record.read(tmp_path, 0)
    assert found is not None
    assert found.kv == record.FIRST_KV == "1.3.1"
