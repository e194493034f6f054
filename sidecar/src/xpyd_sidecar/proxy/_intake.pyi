from msgspec import Raw

from xpyd_sidecar.proxy.intake import Plain

REVISION: int

def shape(api: str, fields: dict[str, Raw], kinds: dict[str, int], size: int, most: int,
          /) -> tuple[tuple[str | bytes, ...] | None, list[str], list[Raw]]: ...
def request(data: bytes, header_bytes: int, body_bytes: int, /) -> Plain | None: ...
