from __future__ import annotations

import ast
import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from xpyd_sidecar.router.api.faults import Fault
from xpyd_sidecar.router.http import heads
from xpyd_sidecar.router.http.heads import Hosts, Media, is_loopback, name_of

LOOPBACK = Hosts("127.0.0.1", ("Models.Home", "10.0.0.7"))
EVERYWHERE = Hosts("0.0.0.0", ())


def status(check: object, *given: object, **named: object) -> int:
    """0: it is let in."""
    try:
        check(*given, **named)  # type: ignore[operator]
    except Fault as fault:
        return fault.status
    return 0


@pytest.mark.parametrize("host", ["localhost", "localhost:10001", "LocalHost:1", "localhost.", "127.0.0.1", "127.0.0.1:80",
                                  "127.9.8.7", "[::1]", "[::1]:10001", "models.home", "MODELS.home:443", "10.0.0.7:1",
                                  "localhost:"])
def test_a_router_of_this_machine_answers_for_this_machine_and_for_names_in_its_settings(host: str) -> None:
    assert status(LOOPBACK.check, host.encode()) == status(LOOPBACK.check, host.encode()) == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:10001", "localhost.evil.example", "127.0.0.1.evil.example",
                                  "evil.localhost", "10.0.0.8", "[::2]", "[::1].evil", "[::1]evil", "0.0.0.0", "128.0.0.1",
                                  "127.1", "2130706433", "localhost:1:2", "localhost:x", "user@localhost", "", "[", ":80"])
def test_it_answers_for_no_other_name(host: str) -> None:
    """A page of a web site whose name points to this machine would be of one origin with the router."""
    wanted = 400 if "@" in host else 421
    assert status(LOOPBACK.check, host.encode()) == status(LOOPBACK.check, host.encode()) == wanted
    assert status(EVERYWHERE.check, host.encode()) == (400 if "@" in host else 0)


@pytest.mark.parametrize("host", ["a b", "a ", " a", "a\tb", "a\x00", "a/b", "a\"b", "<a>", "a\\b", "\xe9"])
def test_what_cannot_be_a_host_is_malformed_wherever_a_router_listens(host: str) -> None:
    for hosts in (LOOPBACK, EVERYWHERE):
        assert status(hosts.check, host.encode("latin-1")) == 400


def test_no_host_at_all_is_a_matter_of_framing() -> None:
    assert status(LOOPBACK.check, None) == 0


@pytest.mark.parametrize(("listen", "bound"), [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True),
                                               ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-7", False)])
def test_only_a_router_on_a_loopback_address_asks_for_it(listen: str, bound: bool) -> None:
    assert is_loopback(listen.encode()) == bound
    assert status(Hosts(listen, ()).check, b"evil.example") == (421 if bound else 0)


def test_what_is_remembered_is_bounded() -> None:
    hosts = Hosts("0.0.0.0", ())
    for number in range(10 * heads.MAX_KNOWN):
        hosts.check(b"h%d" % number)
        assert len(hosts.known) <= heads.MAX_KNOWN
        assert b"h%d" % number in hosts.known
    media = Media()
    for number in range(10 * heads.MAX_KNOWN):
        media.check({b"content-type": b"application/json; a=%d" % number}, json=True)
    assert len(media.known) <= heads.MAX_KNOWN


@pytest.mark.parametrize(("host", "name"), [("a", "a"), ("A:1", "a"), ("[::1]:2", "[::1]"), ("[::1]", "[::1]"),
                                            ("a:b", "a:b"), ("[::1]x", "[::1]x"), ("a:1:2", "a:1:2"), ("[", "["), ("", ""),
                                            (":1", ":1")])
def test_a_name_is_what_stands_before_a_port(host: str, name: str) -> None:
    assert name_of(host.encode()) == name.encode()


@pytest.mark.parametrize(("kind", "right"), [
    ("application/json", True), ("application/json; charset=utf-8", True), ("Application/JSON;x", True),
    ("application/json ; charset=utf-8", False), ("text/plain", False), ("", False),
    ("text/plain, application/json", False),
    ("application/json, text/plain", False), ("application/jsonp", False), ("multipart/form-data; boundary=x", False),
    ("application/x-www-form-urlencoded", False),
])
def test_bodies_are_json_as_vllm_judges_it(kind: str, right: bool) -> None:
    media = Media()
    for _ in range(2):
        assert status(media.check, {b"content-type": kind.encode()}, json=True) == (0 if right else 415)
    assert status(media.check, {b"content-type": kind.encode()}, json=False) == 0
    assert status(media.check, {}, json=True) == 415


@pytest.mark.parametrize(("coding", "right"), [("identity", True), ("Identity ", True), ("gzip", False), ("br", False),
                                               ("identity, gzip", False), ("", True)])
def test_bodies_come_as_they_are(coding: str, right: bool) -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": coding.encode()}
    for json in (True, False):
        assert status(Media().check, headers, json=json) == (0 if right else 415)


def test_it_is_vllms_rule() -> None:
    """The function of the installed vLLM, cut out of its file (which takes long to import), tried with the same values."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "entrypoints/serve/utils/api_utils.py"
    [rule] = [node for node in ast.parse(file.read_text()).body
              if isinstance(node, ast.AsyncFunctionDef) and node.name == "validate_json_request"]

    class Asked:
        def __init__(self, kind: str) -> None:
            self.headers = {"content-type": kind}

    class Refused(Exception):
        def __init__(self, errors: list[str]) -> None:
            super().__init__(errors)

    names: dict[str, Any] = {"Request": Asked, "RequestValidationError": Refused}
    exec(compile(ast.Module([rule], []), str(file), "exec"), names)
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/json ;a",
                 "text/plain", "", "application/json,x", " application/json"):
        try:
            asyncio.run(names["validate_json_request"](Asked(kind)))
            right = True
        except Refused:
            right = False
        assert (status(Media().check, {b"content-type": kind.encode()}, json=True) == 0) == right, kind
