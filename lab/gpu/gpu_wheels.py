"""What the checks need beside torch, installed from a folder of wheels into a folder of its own; no registry is asked.

Versions and hashes are those of ``requirements/gpu.txt``. Of cuda-bindings there are two, for the CUDA that torch was made
for. Nothing of the machine is changed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
CUDA = "import torch; print(torch.version.cuda or '')"


def install(wheels: Path, target: Path, *, python: str = sys.executable, cuda: str | None = None) -> str:
    """Install into ``target``; what went wrong, or nothing. ``cuda``: of torch, which is asked where it is not given."""
    if not list(wheels.glob("*.whl")):
        return f"{wheels}: there are no wheels (python -m lab extras gpu-wheels downloads them, where there is a registry)"
    version = cuda if cuda is not None else _cuda(python)
    lists = ["gpu.txt", *([f"gpu-cu{version.partition('.')[0]}.txt"] if version else [])]
    if absent := [name for name in lists if not (ROOT / "requirements" / name).exists()]:
        return f"CUDA {version}: there is no requirements/{absent[0]}"
    if python == sys.executable and importlib.util.find_spec("pip") is None:
        return f"{python} has no pip"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
               "--no-compile", "--find-links", str(wheels), "--require-hashes", "--target", str(target),
               *(part for name in lists for part in ("-r", str(ROOT / "requirements" / name)))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"pip has not ended after {LIMIT_S} s"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-4:]
        return "\n".join([*said, f"{wheels} has wheels for {', '.join(_pythons(wheels))} (of GPU_PYTHONS)"])
    return ""


def _pythons(wheels: Path) -> list[str]:
    """The Pythons that compiled wheels there are for, as tags."""
    return sorted({path.stem.split("-")[2] for path in wheels.glob("*.whl")} - {"py3"})


def _cuda(python: str) -> str:
    """The CUDA of that Python's torch; empty where it has none."""
    done = subprocess.run([python, "-c", CUDA], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.stdout.strip() if not done.returncode else ""
