from xpyd_sidecar.proxy.intake import Plain

REVISION: int

def request(data: bytes, header_bytes: int, body_bytes: int, /) -> Plain | None: ...
