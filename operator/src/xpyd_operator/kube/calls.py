"""What the operator shows to routers and agents when it calls them: a signature, which is good once and for this pod alone.

Pods with a key of before may have a sidecar that knows no signatures; they are sent the token as well, as ever, until they
are replaced. One that knows both takes either.
"""

from __future__ import annotations

from xpyd_operator.kube.facts import Facts
from xpyd_operator.render.keys import may_be_older
from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.signing import SignedCall


def to_router(key: ServiceKey, pod: Facts, method: str, path: str) -> dict[str, str]:
    """Headers of one call; another one needs others."""
    return _headers(pod, keys.derive(key, "admin call"), SignedCall(method, path, pod.instance), keys.admin_token(key))


def to_agent(key: ServiceKey, pod: Facts, path: str, body: bytes) -> dict[str, str]:
    """Headers of one POST."""
    call = SignedCall("POST", path, pod.instance, body)
    return _headers(pod, keys.derive(key, "agent call"), call, keys.agent_token(key))


def _headers(pod: Facts, secret: bytes, call: SignedCall, token: str) -> dict[str, str]:
    shown = {signing.HEADER: signing.sign(secret, call)}
    if may_be_older(pod.key):
        shown["Authorization"] = f"Bearer {token}"
    return shown
