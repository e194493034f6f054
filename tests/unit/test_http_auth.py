from __future__ import annotations

import hmac
import json
from hashlib import sha256
from pathlib import Path

import pytest

from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.http import auth
from xpyd_sidecar.router.http.auth import ClientKeys, Keys, bearer, read_keys, unknown

SERVICE = ServiceKey(bytes(range(32)))


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
        keys.reload()
        keys.reload()
        assert keys.keys == Keys([b"one"])
    file.unlink()
    keys.reload()
    assert keys.keys == Keys([b"one"])
    assert len([each for each in caplog.records if "not used" in each.message]) == 3, "each is told once"
    file.write_text("two\nthree\n")
    keys.reload()
    assert keys.keys == Keys([b"three", b"two"]) != Keys([b"two"])


def test_no_file_asks_for_no_key() -> None:
    keys = ClientKeys(None)
    keys.reload()
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


def document(*entries: dict[str, object]) -> str:
    return json.dumps({"tenants": list(entries)})


def test_a_document_gives_each_tenant_its_keys(tmp_path: Path) -> None:
    made, chosen, peppers = tenants.new_key(), "letmein", tenants.pepper(SERVICE)
    file = tmp_path / "keys"
    file.write_text(document({"name": "a", "digests": [tenants.digest_of(made), tenants.digest_of(chosen, SERVICE)]},
                             {"name": "b", "digests": [tenants.digest_of(other := tenants.new_key())]}))
    keys = ClientKeys(str(file), peppers)
    for key, name in ((made, "a"), (chosen, "a"), (other, "b")):
        headers = {b"authorization": b"Bearer " + key.encode()}
        assert key.encode() in keys.keys
        assert (one := keys.tenant(headers)) is not None
        assert one.name == name == keys.name(headers) == keys.name({b"x-api-key": key.encode()})
    assert len(keys.keys) == len(keys.tenants) == 2
    for wrong in (b"", made[:-1].encode(), b"letmeiN", tenants.digest_of(made).encode(), b"xk-" + b"0" * 43):
        assert wrong not in keys.keys
        assert keys.tenant({b"authorization": b"Bearer " + wrong}) is None
        assert keys.name({b"authorization": b"Bearer " + wrong}) == ""
    assert b"letmein" not in ClientKeys(str(file), b"another pepper").keys


def test_a_tenants_key_is_compared_by_digests_that_nobody_can_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is brought: two comparisons of 32 bytes, of digests under a secret of the process."""
    made, pepper, seen, right = tenants.new_key(), tenants.pepper(SERVICE), [], hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return right(one, other)

    file = tmp_path / "keys"
    file.write_text(document({"name": "a", "digests": [tenants.digest_of(made), tenants.digest_of("letmein", SERVICE)]}))
    keys = ClientKeys(str(file), pepper).keys
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for key in (made, "letmein", made[:-1] + "_", "letmei", "", "x" * 1000):
        seen.clear()
        assert (key.encode() in keys) is (key in {made, "letmein"})
        assert len(seen) == 2
        assert {len(each) for pair in seen for each in pair} == {32}
        known = {tenants.plain(key.encode()), tenants.digest_with_pepper(pepper, key.encode())}
        assert not known & {each for pair in seen for each in pair}


def test_a_plain_digest_of_a_key_that_could_be_guessed_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(document({"name": "a", "digests": ["sha256:" + sha256(b"letmein").hexdigest()]}))
    assert b"letmein" not in ClientKeys(str(file)).keys


def test_a_bad_document_leaves_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, key, told = tmp_path / "keys", tenants.new_key(), []
    good = {"name": "a", "digests": [tenants.digest_of(key)]}
    file.write_text(document(good))
    keys = ClientKeys(str(file))
    keys.changed = lambda: told.append(keys.tenants)
    file.write_text(document(good, {**good, "name": "b"}))
    keys.reload()
    assert key.encode() in keys.keys
    assert not told
    assert [each for each in caplog.messages if "not used" in each and "'b'" in each and "'a' has it, too" in each]
    file.write_text(document({**good, "tokensPerMinute": 5}))
    keys.reload()
    assert [one.tokens_per_minute for one in told[0]] == [5]
    file.write_text("some-key\n")
    keys.reload()
    assert keys.tenants == told[1] == ()
    assert key.encode() not in keys.keys
    assert b"some-key" in keys.keys
    with pytest.raises(ConfigError, match=r"router\.api_key_file: .*tenants\[0\] \('a'\): weight is 0"):
        auth.read_clients(str(_written(file, document({**good, "weight": 0}))))


def test_a_file_of_keys_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_FILE", 1 << 20)
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        auth.read_clients(str(_written(tmp_path / "keys", "#" * ((1 << 20) + 1))))


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file
