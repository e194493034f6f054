"""Where the files of a LoRA adapter are, what they are, and the path by which an engine knows them.

Runs in threads of the API server: a digest of a gigabyte takes a second, a download longer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import Adapter

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads beside the configuration (``lora.lora_model``): the first that is there."""
PIECE: Final = 1 << 20
HUB: Final = (CONFIG, "adapter_model.*")
"""What is fetched of a repository."""


class AdapterMissing(Exception):
    """The files of an adapter are not there, or are none; the message says what is missing."""


def locate(adapter: Adapter) -> Path:
    """The folder with the files of an adapter, fetched from the hub where its source is a hub id.

    Raises:
        AdapterMissing: there is no such folder or repository, or the hub does not answer.
    """
    if adapter.source.startswith("/"):
        return Path(adapter.source)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (takes a second; folders do without)

    try:
        return Path(snapshot_download(adapter.source, revision=adapter.revision or None, allow_patterns=list(HUB)))
    except Exception as error:  # what the hub's client raises is not one family
        raise AdapterMissing(f"{adapter.source}: {_line(error)}") from error


def digest_of(folder: Path) -> str:
    """SHA-256 of the files that make up an adapter, in hexadecimal digits: over name, length and content of each.

    Raises:
        AdapterMissing: files are missing or cannot be read.
    """
    weights = next((name for name in WEIGHTS if (folder / name).exists()), None)
    if weights is None or not (folder / CONFIG).exists():
        what = CONFIG if weights is not None else " and ".join((CONFIG, WEIGHTS[0]))
        raise AdapterMissing(f"{folder} has no {what}" if folder.is_dir() else f"there is no folder {folder}")
    found = hashlib.sha256(b"xpyd adapter 1\n")
    try:
        for name in (CONFIG, weights):
            with (folder / name).open("rb") as file:
                found.update(f"{name} {os.fstat(file.fileno()).st_size}\n".encode())
                while piece := file.read(PIECE):
                    found.update(piece)
    except OSError as error:
        raise AdapterMissing(f"{folder / name}: {error.strerror or error}") from error
    return found.hexdigest()


def link(run_dir: Path, folder: Path) -> Path:
    """Look at the files of an adapter and make its link in the run folder; the link.

    Raises:
        AdapterMissing: files are missing or cannot be read.
        OSError: the link cannot be made.
    """
    path = adapters.link_of(run_dir, digest_of(folder))
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.absolute(), target_is_directory=True)
    os.replace(temporary, path)
    return path


def forget_links(run_dir: Path) -> None:
    """Remove the links of an engine that has gone."""
    shutil.rmtree(run_dir / adapters.LINKS, ignore_errors=True)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
