"""Which files of which packages travel, and which stay because the machine has them. Pure.

The machine has torch with CUDA, Triton, transformers and numpy, so an environment that vLLM runs in shrinks from 6 GB to
some 100 MB, packed.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Final

VLLM: Final = "0.32.0"
TORCH: Final = "2.11.0"
LIBRARIES: Final = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
"""Of vLLM, each some 15 MB when other chips' code is out of it: its own kernels, and attention in 16 bits."""
SMALL_LIBRARIES: Final = ("vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so")
CHIPS: Final = (80, 90)
"""Hopper; some kernels have code for Ampere alone, which Hopper runs."""

THERE: Final = (
    "torch", "torch-*", "torchgen", "functorch", "triton*", "nvidia*", "cuda*", "transformers*", "numpy*", "sympy*",
    "mpmath*", "networkx*", "numba*", "llvmlite*", "opencv*", "cv2", "PIL", "pillow*", "tokenizers", "tokenizers-*",
    "hf_xet*", "uvloop", "uvloop-*", "pygments*", "setuptools*", "pip", "pip-*")
"""The machine's own. Most are not even installed by ``requirements/gpu-engines.txt``; an environment that has them is no
reason to carry them."""
UNUSED: Final = ("bin", "share", "py_spy*", "vllm", "vllm-*", "xpyd_*")
"""What is ours and what is vLLM's travels apart."""
NOT_IN: Final = ("*/__pycache__/*", "*.pyi", "*.pyc", "*/tests/*", "mistral_common/data/*", "pycountry/locales/*",
                 "pycountry/databases/*", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "*.hpp", "*.cuh",
                 "*.h", "*.c", "*.pyx", "*.pxd", "*/swagger-ui-bundle.js*")


def travels(path: str) -> bool:
    """Of an environment's packages: whether a file (its path there) is carried. Names of packages count at the top alone,
    since vLLM has modules named ``triton_…`` and ``cuda.py`` of its own.
    """
    top = path.split("/", 1)[0]
    return not any(fnmatch(top, name) for name in (*THERE, *UNUSED)) and not _left_out(path)


def travels_of_vllm(path: str) -> bool:
    """Of vLLM's wheel: Python, what describes the package, and the small libraries."""
    if path in SMALL_LIBRARIES:
        return True
    plain = path.endswith((".py", ".json", ".jinja", "METADATA", "entry_points.txt", "RECORD", "WHEEL", "top_level.txt"))
    configs = fnmatch(path, "vllm/model_executor/layers/*/configs/*")  # tuned for one shape of experts each
    return plain and not configs and not path.endswith("RECORD") and not _left_out(path)


def travels_as_installed(path: str) -> bool:
    """Of packages that travel whole: all but what Python has compiled."""
    return "__pycache__/" not in path


def _left_out(path: str) -> bool:
    return any(fnmatch(f"/{path}", f"*/{name}") or fnmatch(path, name) for name in NOT_IN)


NIXL_VERSION: Final = "1.5.1"
NIXL: Final = ("nixl", "nixl-cu13")


def travels_of_nixl(path: str) -> bool:
    """Of NIXL's wheels."""
    return not path.endswith((".pyi", "RECORD"))
