"""Names of prefixes on their way from routers to engines, and what engines hold of them on its way back."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from msgspec import Raw

from xpyd_sidecar.contract import held_prefixes, prefix_cuts
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.contract.prefix_cuts import MOST, WHOLE, PromptCut
from xpyd_sidecar.router.api.prompt import MAX_BYTES, PromptPrefix, cut_seed, prefix_of


def test_cuts_come_back_as_they_were_written() -> None:
    cuts = [PromptCut(1, 0), PromptCut(WHOLE // 3, 2**64 - 1), PromptCut(WHOLE, 7)]
    assert list(prefix_cuts.decode(prefix_cuts.encode(cuts))) == cuts
    assert list(prefix_cuts.decode("")) == []


@pytest.mark.parametrize("text", [7, None, "%%", "AAAA", base64.b64encode(b"x" * 10 * (MOST + 1)).decode(), "\udc80"])
def test_what_is_no_text_of_cuts_is_refused_by_the_fields_name(text: object) -> None:
    with pytest.raises(ValueError, match="xpyd_cuts"):
        prefix_cuts.decode(text)


def test_the_longest_prompt_has_no_more_cuts_than_an_engine_reads() -> None:
    messages = b"[" + b",".join([b'{"role":"user","content":"%b"}' % (b"x" * 900)] * (MAX_BYTES // 900)) + b"]"
    prefix = prefix_of("chat", {"messages": Raw(messages)}, b"")
    assert len(list(prefix_cuts.decode(prefix.cuts))) == len(prefix.keys) <= MOST


def test_shares_count_what_is_rendered_before_the_messages() -> None:
    tools = Raw(b"t" * 3000)
    cuts = list(prefix_cuts.decode(prefix_of("chat", {"messages": Raw(b"m" * 1000), "tools": tools}, b"").cuts))
    assert [cut.share for cut in cuts[:2]] == [(3000 + at) * WHOLE // 4000 for at in (256, 512)]
    salted = list(prefix_cuts.decode(prefix_of("chat", {"messages": Raw(b"m" * 1000), "cache_salt": tools}, b"").cuts))
    assert salted[0].share == 256 * WHOLE // 1000, "a salt is no part of the prompt"


def test_keys_are_those_of_a_service_and_of_everything_before_the_cut() -> None:
    raw = b"p" * 600
    mine, others = (PromptPrefix(raw, _seed=cut_seed(key)).keys for key in (b"mine", b"another's"))
    assert mine == PromptPrefix(raw, _seed=cut_seed(b"mine")).keys
    assert not {key for _, key in mine} & {key for _, key in others}
    assert not {key for _, key in mine} & {key for _, key in PromptPrefix(raw, (b"tools",), _seed=cut_seed(b"mine")).keys}
    assert PromptPrefix(b"", (b"ab", b"c")).keys == PromptPrefix(b"").keys == []
    beside = [PromptPrefix(raw, those).keys[0] for those in ((b"ab", b"c"), (b"a", b"bc"))]
    assert beside[0] != beside[1], "where one of them ends counts"


def test_what_is_held_is_written_whole_and_read_as_it_was(tmp_path: Path) -> None:
    life, told = Incarnation("a" * 32), HeldPrefixes(frozenset({1, 2**64 - 1}), frozenset({5}))
    assert held_prefixes.read(tmp_path, 0) is None
    held_prefixes.write(tmp_path, 0, life, told)
    assert held_prefixes.read(tmp_path, 0) == (life, told)
    assert held_prefixes.read(tmp_path, 1) is None


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"{}", b"\x93\xa1a\xc4\x03abc\xc4\x00"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    held_prefixes.path_of(tmp_path, 0).write_bytes(raw)
    with pytest.raises(ValueError, match=r"held-0\.bin"):
        held_prefixes.read(tmp_path, 0)
