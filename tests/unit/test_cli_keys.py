"""``xpyd keys``: keys go to the terminal, entries to the document, and nothing is said of a key that is wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from xpyd_operator.cli.main import main
from xpyd_sidecar.contract import tenants
from xpyd_sidecar.contract.keys import ServiceKey

SERVICE = ServiceKey(bytes(range(32)))


def test_a_new_key_has_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "search", "--tokens-per-minute", "500", "--model", "m", "--in-flight", "3"]) == 0
    out, err = capsys.readouterr()
    key = err.strip()
    assert json.loads(out) == {"name": "search", "digests": [tenants.digest_of(key)], "tokensPerMinute": 500, "inFlight": 3,
                               "models": ["m"]}
    assert key not in out


@pytest.mark.parametrize(("arguments", "words"), [
    (["keys", "new", "a b"], "name: letters"), (["keys", "new", "a", "--tokens-per-day", "0"], "it may send nothing")])
def test_a_tenant_that_a_router_would_refuse_gets_no_key(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert tenants.KEY_PREFIX not in out + err


def test_a_digest_is_made_of_what_stdin_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file = tenants.new_key(), tmp_path / "key"
    file.write_text(SERVICE.hex())

    def digest(said: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        code = main(["keys", "digest", *more])
        return code, *capsys.readouterr()

    assert digest(made + "\n")[:2] == (0, tenants.digest_of(made) + "\n")
    assert digest("letmein", "--key-file", str(file))[:2] == (0, tenants.digest_of("letmein", SERVICE) + "\n")
    for said, more, words in (("letmein", (), "was not made by"), ("", (), "one key is wanted"),
                              ("a b", (), "one key is wanted"), ("x", ("--key-file", str(tmp_path)), "cannot be read"),
                              ("x", ("--key-file", __file__), "64 hex digits")):
        code, out, err = digest(said, *more)
        assert (code, out) == (2, "")
        assert words in err
        assert "letmein" not in err


def test_a_document_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"tenants": [{"name": "a", "digests": [tenants.digest_of(tenants.new_key())]}]}))
    assert main(["keys", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 1 tenants\n"
    file.write_text('{"tenants": [{"name": "a", "digests": []}]}')
    assert main(["keys", "check", str(file)]) == 1
    assert "tenants[0] ('a'): digests: 1 to 8, not 0" in capsys.readouterr().out
    assert main(["keys", "check", str(tmp_path / "none")]) == 2
