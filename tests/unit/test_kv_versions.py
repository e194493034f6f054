"""The word for the versions of the KV plane."""

from __future__ import annotations

from xpyd_sidecar.kv import mapping, messages, peers, wire


def test_the_word_has_every_version_that_a_peer_refuses() -> None:
    spoken = peers.SPOKEN.split(".")
    assert spoken == [str(each) for each in (messages.WIRE_VERSION, wire.WIRE_VERSION, mapping.VERSION)]
