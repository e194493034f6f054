"""The word for the versions of the KV plane."""

from __future__ import annotations

from xpyd_sidecar.kv import frames, mapping, messages, peers


def test_the_word_has_every_version_that_a_peer_refuses() -> None:
    spoken = peers.SPOKEN.split(".")
    assert spoken == [str(each) for each in (messages.WIRE_VERSION, frames.WIRE_VERSION, mapping.VERSION)]
