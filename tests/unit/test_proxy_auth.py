from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.proxy.auth import ClientKeys, bearer, read_keys, require
from xpyd_sidecar.routing.faults import Fault


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
        assert keys.keys == (b"one",)
    file.unlink()
    keys.look()
    assert keys.keys == (b"one",)
    assert len([each for each in caplog.records if "not used" in each.message]) == 3, "each is told once"
    file.write_text("two\nthree\n")
    keys.look()
    assert keys.keys == (b"two", b"three")


def test_no_file_asks_for_no_key() -> None:
    keys = ClientKeys(None)
    keys.look()
    assert keys.keys == ()


@pytest.mark.parametrize(("value", "token"), [
    (b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"Basic abc", b""), (b"abc", b""), (b"", b""), (b"Bearer", b""),
])
def test_bearer_tokens(value: bytes, token: bytes) -> None:
    assert bearer({b"authorization": value}) == token


def test_only_known_keys_pass() -> None:
    require({b"authorization": b"Bearer b"}, (b"a", b"b"))
    for headers, words in (({}, "is needed"), ({b"authorization": b"Bearer c"}, "is wrong"),
                           ({b"authorization": b"Bearer \xff\xfe"}, "is wrong")):
        with pytest.raises(Fault, match=words) as caught:
            require(headers, (b"a", b"b"))
        assert caught.value.status == 401
