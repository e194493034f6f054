from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.http import auth
from xpyd_sidecar.router.http.auth import ClientKeys, Keys, bearer, read_keys, unknown


def test_keys_are_read_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(" a1 \n# comment\n\n  b2\r\n")
    assert read_keys(str(file)) == (b"a1", b"b2")


@pytest.mark.parametrize(("content", "words"), [
    (b"", "holds no key"), (b"# only a comment\n", "holds no key"), (b"good\ntwo words\n", "key 2 has characters"),
    ("schlüssel\n".encode(), "key 1 has characters"), (b"\xff\xfe", "utf-8"), (b"k\n" * 10_001, "at most 10000"),
])
def test_a_bad_key_file_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_keys(str(file))


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.api_key_file: .*none"):
        read_keys(str(tmp_path / "none"))


def test_keys_that_cannot_be_used_leave_the_old_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    keys = ClientKeys(str(file))
    for content in ("", "two words\n"):
        file.write_text(content)
        keys.look()
        keys.look()
        assert keys.keys == Keys([b"one"])
    file.unlink()
    keys.look()
    assert keys.keys == Keys([b"one"])
    assert len([each for each in caplog.records if "not used" in each.message]) == 3, "each is told once"
    file.write_text("two\nthree\n")
    keys.look()
    assert keys.keys == Keys([b"three", b"two"]) != Keys([b"two"])


def test_no_file_asks_for_no_key() -> None:
    keys = ClientKeys(None)
    keys.look()
    assert not keys.keys


@pytest.mark.parametrize(("value", "token"), [
    (b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"Basic abc", b""), (b"abc", b""), (b"", b""), (b"Bearer", b""),
])
def test_bearer_tokens(value: bytes, token: bytes) -> None:
    assert bearer({b"authorization": value}) == token


def test_only_known_keys_pass() -> None:
    assert b"b" in Keys((b"a", b"b"))
    assert b"b" not in Keys()
    for headers, words in (({}, "is needed"), ({b"authorization": b"Bearer c"}, "is wrong"),
                           ({b"authorization": b"Bearer \xff\xfe"}, "is wrong")):
        assert bearer(headers) not in Keys((b"a", b"b"))
        fault = unknown(headers)
        assert (fault.status, words in fault.message) == (401, True)


def test_one_of_ten_thousand_keys_costs_what_one_of_two_does(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Keys([b"key 0", b"key 1"]), Keys([b"key %d" % number for number in range(10_000)])
    assert len(many) == 10_000
    digested, compared = list[bytes](), list[tuple[bytes, bytes]]()
    right, digest = hmac.compare_digest, auth._digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: [compared.append((a, b)), right(a, b)][1])
    monkeypatch.setattr(auth, "_digest", lambda key: [digested.append(key), digest(key)][1])
    for keys in (few, many):
        for token in (b"key 0", b"key 1", b"key", b"key 10000", b"", b"\xff"):
            assert (token in keys) is (token in {b"key 0", b"key 1"})
    assert len(compared) == len(digested) == 12, "one comparison and one digest each"
    assert {len(each) for pair in compared for each in pair} == {32}


def test_a_key_that_is_not_there_is_not_found_by_what_stands_for_nobody() -> None:
    keys = Keys([b"a"])
    assert b"" not in keys
    assert bytes(32) not in keys
    assert b"" not in Keys()
