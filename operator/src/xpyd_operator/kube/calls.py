"""What the operator shows to routers and agents when it calls them: a signature, good once and for this pod alone."""

from __future__ import annotations

from xpyd_operator.kube.facts import Facts
from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.signing import SignedCall


def to_router(key: ServiceKey, pod: Facts, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Headers of one call; another one needs others."""
    return _headers(keys.derive(key, "admin call"), SignedCall(method, path, pod.instance, body))


def to_agent(key: ServiceKey, pod: Facts, path: str, body: bytes) -> dict[str, str]:
    """Headers of one POST."""
    return _headers(keys.derive(key, "agent call"), SignedCall("POST", path, pod.instance, body))


def _headers(secret: bytes, call: SignedCall) -> dict[str, str]:
    return {signing.HEADER: signing.sign(secret, call)}
