"""A hash that stands for a model: its configuration with every override, and its weights.

For a hub model the resolved commit stands for the weights, for one in a bucket its address. A local folder of up to
``WHOLE_BYTES`` is hashed whole; of a larger one the weight index and of each file the size and the safetensors header
(names, shapes, offsets). Two trainings of one architecture then look alike, so large models should be named by revision.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Final

WHOLE_BYTES: Final = 512 << 20
HEADER_MAX: Final = 256 << 20


def model_hash(source: str, commit: str, text: str, whole_bytes: int = WHOLE_BYTES) -> str:
    """32 hex digits over a model's configuration ``text`` and its weights."""
    digest = hashlib.sha256(text.encode())
    folder = Path(source)
    if not folder.is_dir():
        digest.update(f"\nhub {source} {commit}".encode())
        return digest.hexdigest()[:32]
    files = sorted(path for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")
                   for path in folder.glob(pattern))
    whole = sum(path.stat().st_size for path in files) <= whole_bytes
    for path in files:
        digest.update(f"\nfile {path.name} {path.stat().st_size}\n".encode())
        _content(digest, path, whole=whole or path.suffix == ".json")
    return digest.hexdigest()[:32]


def _content(digest: hashlib._Hash, path: Path, *, whole: bool) -> None:
    with path.open("rb") as file:
        if whole:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        elif path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            digest.update(file.read(min(length, HEADER_MAX)))
        else:
            digest.update(file.read(1 << 20))
