from xpyd_sidecar.router.relay.plain import Whole

REVISION: int

def take(data: bytes, chat: bool, name: str, created: int, log: bytearray, /) -> Whole | None: ...
