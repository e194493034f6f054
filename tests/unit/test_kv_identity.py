"""The identity of a prompt differs whenever its KV would."""

from __future__ import annotations

import itertools

from xpyd_sidecar.kv.identity import MediaItem, identity

SAME = ([1, 2, 3], [MediaItem("cat", 0, 2)], ("adapter", "/a"), "salt")


def test_equal_prompts_have_equal_identities() -> None:
    assert identity(*SAME) == identity(tuple(SAME[0]), *SAME[1:])
    assert len(identity([5])) == 32


def test_every_part_counts() -> None:
    others = [
        SAME,
        ([1, 2, 4], *SAME[1:]),
        ([1, 2], *SAME[1:]),
        (SAME[0], [MediaItem("dog", 0, 2)], *SAME[2:]),
        (SAME[0], [MediaItem("cat", 1, 2)], *SAME[2:]),
        (SAME[0], [], *SAME[2:]),
        (*SAME[:2], ("adapter", "/b"), SAME[3]),
        (*SAME[:2], None, SAME[3]),
        (*SAME[:3], "pepper"),
        (*SAME[:3], None),
        (*SAME[:3], ""),
    ]
    found = [identity(*one) for one in others]
    assert all(a != b for a, b in itertools.combinations(found, 2))


def test_parts_do_not_run_into_each_other() -> None:
    assert identity([1], lora=("ab", "c")) != identity([1], lora=("a", "bc"))
    assert identity([1], [MediaItem("a", 1, 1), MediaItem("b", 1, 1)]) != identity([1], [MediaItem("ab", 1, 1)])
