"""Proofs of the data link's challenge."""

from __future__ import annotations

import hmac
import itertools

import pytest

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.kv.proofs import Terms, holds, prove

KEY = bytes(range(32))
TERMS = Terms(b"p" * 32, b"d" * 32, Incarnation("1" * 32), Incarnation("2" * 32))


def test_a_holder_of_the_key_is_believed() -> None:
    assert holds(KEY, "decode", TERMS, prove(KEY, "decode", TERMS))


def test_no_other_key_side_nonce_or_incarnation_gives_the_same_proof() -> None:
    proofs = [prove(KEY, "decode", TERMS), prove(bytes(32), "decode", TERMS), prove(KEY, "prefill", TERMS),
              prove(KEY, "decode", TERMS._replace(prefill_nonce=b"x" * 32)),
              prove(KEY, "decode", TERMS._replace(decode_nonce=b"x" * 32)),
              prove(KEY, "decode", TERMS._replace(prefill=Incarnation("3" * 32))),
              prove(KEY, "decode", TERMS._replace(decode=Incarnation("3" * 32))),
              prove(KEY, "decode", Terms(b"p" * 31, b"p" + b"d" * 32, TERMS.prefill, TERMS.decode))]
    assert all(a != b for a, b in itertools.combinations(proofs, 2))
    assert not holds(KEY, "decode", TERMS, proofs[1])
    assert not holds(KEY, "decode", TERMS, b"")


@pytest.mark.parametrize("said", [True, False])
def test_proofs_are_compared_by_what_takes_the_same_time_and_by_nothing_else(said: bool,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = prove(KEY, "decode", TERMS), prove(KEY, "prefill", TERMS)
    compared: list[set[bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return said

    monkeypatch.setattr(hmac, "compare_digest", spy)
    proofs = (right, wrong, right[:-1], b"")
    assert [holds(KEY, "decode", TERMS, proof) for proof in proofs] == [said] * len(proofs)
    assert compared == [{right, proof} for proof in proofs]
