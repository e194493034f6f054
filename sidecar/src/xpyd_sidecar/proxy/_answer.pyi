from xpyd_sidecar.proxy.whole import Whole

REVISION: int

def take(data: bytes, chat: bool, name: str, created: int, log: bytearray, /) -> Whole | None: ...
