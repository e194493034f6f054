"""What machine it is: GPU, driver, torch, CUDA, both NCCLs. Asked in a process of its own, as every check is."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
from typing import Any

from gpu_seen import Figures, NotHeldError

NEEDED = ("torch", "numpy", "msgspec", "zmq", "xxhash")


def machine(kind: str) -> Figures:
    """Facts.

    Raises:
        NotHeldError: nothing can be checked here, and why.
    """
    missing = [name for name in NEEDED if not _there(name)]
    if missing:
        raise NotHeldError(f"Python {platform.python_version()} here has no {', '.join(missing)} (torch and numpy are the "
                           "machine's, the rest travels: python -m lab extras gpu-wheels there, --wheels here)", {})
    torch: Any = importlib.import_module("torch")
    facts: Figures = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if kind == "cpu":
        return facts | {"gpus": 0, "gpu": "none: the checks themselves are tried on the CPU"}
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise NotHeldError(f"there is no GPU that torch {torch.__version__} can use", facts)
    properties = torch.cuda.get_device_properties(0)
    return facts | {"gpus": torch.cuda.device_count(), "gpu": properties.name,
                    "gib": round(properties.total_memory / 2**30, 1), "driver": _driver(),
                    "nccl_of_torch": ".".join(map(str, torch.cuda.nccl.version())), **_nccl()}


def _there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _nccl() -> Figures:
    """Of nccl4py, which loads a library of its own choice."""
    try:
        version = importlib.import_module("nccl.core").get_version()
    except (ImportError, RuntimeError, OSError) as error:
        return {"nccl4py": f"{type(error).__name__}: {error}"}
    return {"nccl4py": str(getattr(version, "nccl4py", "there")),
            "nccl": str(version.libnccl.version) if version.libnccl is not None else "cannot be loaded"}


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                          text=True, timeout=60, check=False)
    said = done.stdout.strip().splitlines()
    return said[0] if said else f"unknown (nvidia-smi: exit code {done.returncode})"
