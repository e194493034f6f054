"""Is it ready? One question over HTTP; the answer is a sentence about what is wrong, empty when all is well."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from testcluster.pki import Pki

TIMEOUT_S = 3.0


def plain(url: str) -> str:
    """A plain HTTP server answers 200."""
    return _fault(url, None)


def own_certificate(url: str) -> str:
    """An HTTPS server of this cluster that signed its own certificate a moment ago answers 200."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _fault(url, context)


def trusted(url: str, pki: Pki, client: str, method: str = "GET") -> str:
    """An HTTPS server with the cluster's certificate answers 200 to this client."""
    return _fault(url, _context(pki, client), method)


class MadeAgain:
    """An object of the API that a controller keeps is removed once, and is there again: the controllers work.

    The controller manager calls itself healthy long before it has started its controllers, and ends itself when the API
    server goes away meanwhile.
    """

    def __init__(self, url: str, pki: Pki, client: str) -> None:
        self._url = url
        self._pki = pki
        self._client = client
        self._removed = False

    def __call__(self) -> str:
        """See Probe."""
        if not self._removed:
            fault = trusted(self._url, self._pki, self._client, "DELETE")
            if fault and not fault.startswith(f"{self._url}: 404"):
                return fault
            self._removed = True
        return trusted(self._url, self._pki, self._client)


def exists(path: Path) -> str:
    """A socket or file is there."""
    return "" if path.exists() else f"{path} does not exist"


def _context(pki: Pki, client: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki.certificate("ca")))
    context.load_cert_chain(pki.certificate(client), pki.key(client))
    return context


def _fault(url: str, context: ssl.SSLContext | None, method: str = "GET") -> str:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        with error:
            lines = error.read().decode("utf-8", "replace").splitlines()
        failed = [line for line in lines if line.startswith("[-]")]
        return f"{url}: {error.code} {'; '.join(failed or lines[:3])}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {error}"
    return ""
