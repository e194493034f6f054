from xpyd_sidecar.proxy.whole import Whole

REVISION: int

def whole(data: bytes, chat: bool, name: str, created: int, log: bytearray, /) -> Whole | None: ...
