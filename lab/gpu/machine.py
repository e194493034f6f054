"""What machine it is: processors, versions, GPU, torch, CUDA, NCCL. Asked in a process of its own, which CUDA goes with."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from lab.gpu.findings import Figures, NotHeldError
from lab.gpu.runner import Check

ROOT: Final = Path(__file__).resolve().parents[2]
NEEDED: Final = ("torch", "numpy", "msgspec", "cryptography", "xxhash")
VERSIONS: Final = ("vllm", "torch", "triton", "transformers", "numpy", "nccl4py", "xpyd-sidecar")
CARD: Final = "name,memory.total,driver_version,clocks.sm,clocks.mem"
CHECK: Final = Check("machine", "machine:machine", 180)


def machine(kind: str) -> Figures:
    """Facts. ``kind``: of device, ``cuda`` or ``cpu``.

    Raises:
        NotHeldError: nothing can be checked here, and why; with the facts that there are.
    """
    facts = system(ROOT)
    if missing := [name for name in NEEDED if not _there(name)]:
        raise NotHeldError(f"Python {platform.python_version()} here has no {', '.join(missing)} (torch and numpy are the "
                           "machine's, the rest travels: python -m lab.gpu_engines.pack checks)", facts)
    torch: Any = importlib.import_module("torch")
    facts |= {"cuda": torch.version.cuda}
    if kind == "cpu":
        return facts | {"gpus": 0, "gpu": "none"}
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise NotHeldError(f"there is no GPU that torch {torch.__version__} can use", facts)
    properties = torch.cuda.get_device_properties(0)
    return facts | {"gpus": torch.cuda.device_count(), "gpu": properties.name,
                    "gib": round(properties.total_memory / 2**30, 1),
                    "nccl_of_torch": ".".join(map(str, torch.cuda.nccl.version())), **_nccl()}


def system(product: Path) -> Figures:
    """What can be known without torch; ``commit`` of the product where it was written down."""
    commit = product / "commit.txt"
    return {"date": datetime.now(UTC).date().isoformat(), "card": _card(), "processors": os.cpu_count(),
            "kernel": platform.release(), "python": platform.python_version(),
            "commit": commit.read_text().strip() if commit.exists() else "of the checkout",
            "versions": {name: version for name in VERSIONS if (version := _version(name))}}


def _there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _version(name: str) -> str:
    """Empty where it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _nccl() -> Figures:
    """Of nccl4py, which loads a library of its own choice."""
    try:
        version = importlib.import_module("nccl.core").get_version()
    except (ImportError, RuntimeError, OSError) as error:
        return {"nccl": f"{type(error).__name__}: {error}"}
    return {"nccl": str(version.libnccl.version) if version.libnccl is not None else "cannot be loaded"}


def _card() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (there is no nvidia-smi)"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={CARD}", "--format=csv,noheader"], capture_output=True, text=True,
                          timeout=60, check=False)
    return done.stdout.strip() or f"nvidia-smi: exit code {done.returncode}"
