import msgspec
import pytest

from xpyd_sidecar.dp.frames import Grant, Want, decode, encode
from xpyd_sidecar.errors import ProtocolError

WANT = Want(1, 1 << 61, 3, 10, 12, 1, True)
GRANT = Grant(1, 1 << 61, 12, 1, 11, False)


def test_frames_come_back_as_they_were() -> None:
    assert decode(encode(WANT), Want, "rank 3") == WANT
    assert decode(encode(GRANT), Grant, "coordinator") == GRANT


@pytest.mark.parametrize(("data", "said"), [
    (b"", "no Want"), (b"\xc1", "no Want"), (b"\x90" * 65, "65 bytes"), (encode(GRANT), "no Want"),
    (msgspec.msgpack.encode([1, 1, 0, -1, 0, 0, False]), "no Want"),
    (msgspec.msgpack.encode([2, 1, 0, 0, 0, 0, False]), "version 2, not 1")])
def test_what_is_no_frame_is_refused_with_the_peers_name(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=f"rank 3: .*{said}"):
        decode(data, Want, "rank 3")
