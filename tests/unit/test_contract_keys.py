"""Keys: derived, named by their digest, and compared with their name when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey

MASTER = bytes(range(32))
KEY = keys.of_service(MASTER, 1, "uid-1")


def test_the_key_of_a_service_depends_on_master_generation_and_uid() -> None:
    others = [keys.of_service(*each) for each in ((MASTER, 2, "uid-1"), (MASTER, 1, "uid-2"), (bytes(32), 1, "uid-1"))]
    assert keys.of_service(MASTER, 1, "uid-1") == KEY
    assert len({KEY, *others}) == 4
    assert keys.of_service(MASTER, 1, "1") != keys.of_service(MASTER, 11, "")
    assert len(KEY) == 32


def test_its_derivation_never_changes() -> None:
    """Another one would replace the pods of every service."""
    assert KEY.hex() == "09af379027156005000184f84ce3bde5271ec2af445ade3e011244d7ea39c8e8"
    assert keys.digest(KEY)[:8] == "e1053dc8"


def test_a_file_that_is_named_for_a_key_holds_no_other(tmp_path: Path) -> None:
    path = tmp_path / keys.file_name(KEY)
    path.write_text(KEY.hex() + "\n")
    assert keys.read(path) == KEY
    path.write_text("ab" * 32)
    with pytest.raises(ValueError, match=f"it holds another key .* than the service's .{keys.digest(KEY)[:8]}"):
        keys.read(path)
    (tmp_path / "key").write_text("ab" * 32)
    assert keys.read(tmp_path / "key").hex() == "ab" * 32


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "ab" * 33])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ValueError, match="a service key is 64 hex digits"):
        keys.read(tmp_path / "key")
    assert keys.parse(text) is None


def test_a_key_of_before_may_be_none(tmp_path: Path) -> None:
    path = tmp_path / "before"
    path.write_text("\n")
    assert keys.read_before(path) is None
    path.write_text("ab" * 32)
    assert keys.read_before(path) == ServiceKey(bytes.fromhex("ab" * 32))
    path.write_text("abc")
    with pytest.raises(ValueError, match="64 hex digits"):
        keys.read_before(path)
