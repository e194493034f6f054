"""CURVE on ZMQ sockets, from the service key (``contract.keys`` has the theory).

Belongs here: the few lines that put keys on a socket, so that every part does it alike. Does not belong here: what is
said over the socket.

One key pair per purpose serves both ends: the server proves itself with the secret, and a client can only speak to a
server whose public key it can derive. A client without the service key never completes the handshake; ZMQ tells neither
side why, so the caller's deadline is what notices.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from xpyd_sidecar.contract import keys


def key_pair(key: keys.ServiceKey, purpose: keys.Purpose) -> tuple[bytes, bytes]:
    """``(public, secret)`` of one purpose, 40 bytes of Z85 each."""
    secret = z85.encode(keys.derive(key, purpose))
    return zmq.curve_public(secret), secret


def serve(socket: zmq.Socket[Any], key: keys.ServiceKey, purpose: keys.Purpose) -> None:
    """Make ``socket`` the CURVE server of ``purpose``; call it before ``bind``."""
    socket.curve_publickey, socket.curve_secretkey = key_pair(key, purpose)
    socket.curve_server = True


def connect(socket: zmq.Socket[Any], key: keys.ServiceKey, purpose: keys.Purpose) -> None:
    """Make ``socket`` a CURVE client of the server of ``purpose``; call it before ``connect``."""
    public, secret = key_pair(key, purpose)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = public
