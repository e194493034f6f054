from __future__ import annotations

import pytest
import zmq

from xpyd_sidecar.process import sockets


@pytest.mark.parametrize(("seconds", "third"), [(15.0, 5), (3.0, 1), (0.5, 1)])
def test_the_kernel_is_told_when_a_silent_connection_is_dead(seconds: float, third: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        sockets.find_dead(socket, seconds)
        assert socket.getsockopt(zmq.TCP_MAXRT) == round(1000 * seconds)
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert [socket.getsockopt(option) for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL)] == [third, third]
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) in (0, -1), "no pings of ZMQ beside it"
    finally:
        socket.close(linger=0)
        context.term()

