from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from certificates import write
from cryptography import x509
from router_fleet import KEY, fleet, read_answer, request_bytes

from xpyd_sidecar.contract import keys
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process import accepting
from xpyd_sidecar.router.http.server import REFUSED, Certificate

LOOPS = ("asyncio", "uvloop")


def client(most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, most
    return context


async def connect(port: int, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")


def name_of(writer: asyncio.StreamWriter) -> str:
    """The common name in the certificate of the other side."""
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return str(x509.load_der_x509_certificate(der).subject.rfc4514_string())


async def test_a_stream_over_tls_and_what_comes_in_the_clear_gets_no_answer(tmp_path: Path) -> None:
    cert, key = write(tmp_path, "one")
    async with fleet(1, 1, tls_cert_file=cert, tls_key_file=key) as f:
        reader, writer = await connect(f.router.port, client())
        for stream in (True, False):
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": stream}))
            answer = await read_answer(reader)
            assert answer.status == 200
            text = answer.text if stream else answer.json["choices"][0]["text"]
            assert text == "t0 t1 t2 "
        assert writer.get_extra_info("ssl_object").version() in {"TLSv1.2", "TLSv1.3"}
        assert name_of(writer) == "CN=one"
        writer.transport.abort()
        plain, out = await asyncio.open_connection("127.0.0.1", f.router.port)
        out.write(request_bytes("/health", method="GET"))
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                assert not (await plain.read()).startswith(b"HTTP/")
        out.transport.abort()
        await f.wait_quiet()


WEAK = "ALL:@SECLEVEL=0"
"""Ciphers that TLS 1.1 can be spoken with. With those that a server has by itself it cannot, whatever the minimum."""


def old_client() -> ssl.SSLContext:
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context = client(ssl.TLSVersion.TLSv1_1)
    context.set_ciphers(WEAK)
    return context


@pytest.fixture
def weak_ciphers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this process take any cipher."""
    right = ssl.SSLContext.load_cert_chain

    def load(self: ssl.SSLContext, *args: Any, **options: Any) -> None:
        self.set_ciphers(WEAK)
        right(self, *args, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)


async def version(port: int, context: ssl.SSLContext) -> str | None:
    """What a client speaks with whoever listens there; None where it is refused."""
    try:
        _, writer = await connect(port, context)
    except (ssl.SSLError, ConnectionError):
        return None
    spoken: str = writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    return spoken


async def test_tls_below_1_2_is_refused_whatever_the_ciphers(tmp_path: Path, weak_ciphers: None) -> None:
    cert, key = write(tmp_path, "one")
    async with fleet(1, 1, tls_cert_file=cert, tls_key_file=key) as f:
        assert await version(f.router.port, client()) == "TLSv1.3"
        assert await version(f.router.port, client(ssl.TLSVersion.TLSv1_2)) == "TLSv1.2"
        assert await version(f.router.port, old_client()) is None


async def test_the_same_old_client_is_served_where_the_minimum_is_lower(tmp_path: Path, weak_ciphers: None) -> None:
    """The control of the test above: it is the minimum alone that keeps that client out."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    context.load_cert_chain(*write(tmp_path, "one"))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    try:
        assert await version(server.sockets[0].getsockname()[1], old_client()) == "TLSv1.1"
    finally:
        server.close()


async def test_a_renewed_certificate_is_taken_without_dropping_connections(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.http.server.LOOK_S", 0.0)
    cert, key = write(tmp_path, "one")
    async with fleet(1, 1, tls_cert_file=cert, tls_key_file=key) as f:
        reader, writer = await connect(f.router.port, client())
        write(tmp_path, "two")
        names = set()
        async with asyncio.timeout(30):
            while "CN=two" not in names:
                await asyncio.sleep(0.05)
                _, other = await connect(f.router.port, client())
                names.add(name_of(other))
                other.transport.abort()
        assert names <= {"CN=one", "CN=two"}
        writer.write(request_bytes("/health", method="GET"))
        assert (await read_answer(reader)).body == b"ok\n"
        assert name_of(writer) == "CN=one"
        writer.transport.abort()


def test_a_renewal_that_is_wrong_leaves_the_old_one_in_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = write(tmp_path, "one")
    made = Certificate(cert, key)
    assert not made.reload()
    good = (tmp_path / "tls.key").read_bytes()
    (tmp_path / "other").mkdir()
    other = Path(write(tmp_path / "other", "two")[1])
    os.replace(other, key)
    assert not made.reload()
    assert not made.reload()
    assert caplog.text.count("does not belong to the certificate") == 1
    os.unlink(key)
    assert not made.reload()
    assert not made.reload()
    assert caplog.text.count("No such file") == 1
    (tmp_path / "tls.key").write_bytes(good)
    assert made.reload(), "whole again"


@pytest.mark.parametrize(("what", "words"), [
    ("no cert", "router.tls_cert_file: .*No such file"), ("no key", "router.tls_key_file: .*No such file"),
    ("garbage", "not a certificate and its key in PEM"), ("another", "does not belong"), ("locked", "passphrase"),
])
def test_files_that_are_wrong_are_named(tmp_path: Path, what: str, words: str) -> None:
    cert, key = write(tmp_path, "one", b"secret" if what == "locked" else None)
    if what == "no cert":
        os.unlink(cert)
    elif what == "no key":
        os.unlink(key)
    elif what == "garbage":
        Path(cert).write_text("nothing")
    elif what == "another":
        (tmp_path / "other").mkdir()
        key = write(tmp_path / "other", "two")[1]
    with pytest.raises(ConfigError, match=words):
        Certificate(cert, key)


async def test_over_tls_the_admin_token_is_taken_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.http.connection.of_this_host", lambda transport: False)
    cert, key = write(tmp_path, "one")
    async with fleet(1, 1, tls_cert_file=cert, tls_key_file=key) as f:
        reader, writer = await connect(f.router.admin_port, client())
        writer.write(request_bytes("/fleet", method="GET", headers={"Authorization": f"Bearer {keys.admin_token(KEY)}"}))
        assert (await read_answer(reader)).status == 200
        writer.transport.abort()
        await f.wait_quiet()


async def test_handshakes_that_nobody_ends_keep_no_client_and_no_probe_out(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 600.0)
    cert, key = write(tmp_path, "one")
    async with fleet(1, 1, tls_cert_file=cert, tls_key_file=key) as f:
        f.router.server.places.most = 4
        strangers = [await asyncio.open_connection("127.0.0.1", f.router.port) for _ in range(3 * REFUSED)]
        await f.wait(lambda: f.router.server.opening >= REFUSED, "handshakes that begin")
        for port in (f.router.admin_port, f.router.port):
            async with asyncio.timeout(60):  # a handshake may take long where nobody waits
                reader, writer = await connect(port, client())
            writer.write(request_bytes("/health", method="GET"))
            assert (await read_answer(reader)).status == 200
            writer.transport.abort()
        for _, out in strangers:
            out.transport.abort()
