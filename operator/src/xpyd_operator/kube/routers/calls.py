"""What the operator shows to routers and agents when it calls them: a signature, good once and for this pod alone."""

from __future__ import annotations

from typing import NamedTuple

import aiohttp

from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.render.paths import AGENT_PORT
from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.signing import SignedCall
from xpyd_sidecar.process.patience import timeout_with_grace
from xpyd_sidecar.process.whole_answer import read_whole

NEVER = aiohttp.ClientTimeout(total=None)
"""The deadline of ``ask_router`` comes before what was answered while this process did not run."""


class RouterAnswer(NamedTuple):
    """What a router answered with 200."""

    body: bytes
    call: str
    """What the operator showed."""
    signature: str
    """What the router showed; empty: nothing."""

    def is_signed(self, key: ServiceKey) -> bool:
        """Whether the one who answered has this key of the service."""
        return signing.answers(keys.derive(key, "admin call"), self.call, self.signature, self.body)


async def ask_router(session: aiohttp.ClientSession, pod: Facts, key: ServiceKey | None, method: str, path: str, *,
                     body: bytes = b"", tls: bool, timeout_s: float, most: int) -> RouterAnswer | None:
    """Make one signed call to the admin port of a router; None: it was not answered, or not with 200. While a service goes
    over to HTTPS, or back, pods of both kinds are there, so both are tried.

    Args:
        session: to call with.
        pod: the router's.
        key: of its service, as the pod has it; None: not known, and nobody is asked.
        method: of HTTP.
        path: on the admin port.
        body: JSON; empty: none.
        tls: whether routers should speak HTTPS by now.
        timeout_s: for each try.
        most: bytes of an answer; a longer one counts as none.
    """
    if key is None or not pod.admin_port:
        return None
    for scheme in ("https", "http") if tls else ("http", "https"):
        shown = to_router(key, pod, method, path, body)
        headers = {**shown, "Content-Type": "application/json"} if body else shown
        try:
            # The certificate is the clients': it names the Service, not the address of a pod.
            async with timeout_with_grace(timeout_s), session.request(
                    method, f"{scheme}://{join_host_port(pod.ip, pod.admin_port)}{path}", data=body or None, timeout=NEVER,
                    headers=headers, allow_redirects=False, ssl=False) as got:
                if got.status != 200:
                    return None
                said = await read_whole(got.content, most)
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError):
            continue
        return RouterAnswer(said, shown[signing.HEADER], got.headers.get(signing.HEADER, ""))
    return None


async def tell_agent(session: aiohttp.ClientSession, pod: Facts, key: ServiceKey | None, said: tuple[str, bytes],
                     timeout_s: float) -> str:
    """Make one signed POST to the agent of a pod; empty where the agent took it, else why not, in words. ``said``: path and
    body.
    """
    path, body = said
    if key is None:
        return "its key is not known"
    url = f"http://{join_host_port(pod.ip, AGENT_PORT)}{path}"
    asked = session.post(url, data=body, headers=to_agent(key, pod, path, body),
                         timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False)
    try:
        async with asked as answer:
            return "" if answer.status < 300 else f"status {answer.status}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return str(error) or type(error).__name__


def to_router(key: ServiceKey, pod: Facts, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Headers of one call; another one needs others."""
    return _headers(keys.derive(key, "admin call"), SignedCall(method, path, pod.instance, body))


def to_agent(key: ServiceKey, pod: Facts, path: str, body: bytes) -> dict[str, str]:
    """Headers of one POST."""
    return _headers(keys.derive(key, "agent call"), SignedCall("POST", path, pod.instance, body))


def _headers(secret: bytes, call: SignedCall) -> dict[str, str]:
    return {signing.HEADER: signing.sign(secret, call)}
