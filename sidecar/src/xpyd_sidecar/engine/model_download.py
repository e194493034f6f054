"""``python -m xpyd_sidecar.engine.model_download MODEL [REVISION]``: download a model from a hub into the local cache.

Runs in the engine's image and needs no GPU. From the Hugging Face hub it downloads what vLLM reads when an engine starts
(``needed_files``) into the cache that ``HF_HOME`` names. With ``VLLM_USE_MODELSCOPE`` it downloads from ModelScope, into
``MODELSCOPE_CACHE``, all but copies of the weights for other programs. Files that are complete are not downloaded again,
and partial downloads are resumed.

Exit code: 0: all files are in the cache; 1: they are not (one line on stderr says why); 2: wrong usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import glob
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

FORMS: Final = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
"""Forms of weights in the order in which vLLM takes them: the first of which there are files (``DefaultModelLoader``)."""
COPIES: Final = ("original/*", "*.pth", "*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite")
"""The same weights for other programs."""
MODELSCOPE: Final = "VLLM_USE_MODELSCOPE"


class NotFetched(Exception):
    """A model could not be downloaded, e.g. as the hub does not answer, lacks it or denies access, or the disk is full."""


def needed_files(files: Iterable[str]) -> tuple[str, ...]:
    """Return the files of a model's repository that vLLM reads.

    Where there are weights in several formats, only those of the first one in ``FORMS`` are kept; ``COPIES`` never are.

    Args:
        files: paths of all files of the repository.
    """
    rest = [name for name in files if not any(fnmatch.fnmatch(name, each) for each in COPIES)]
    found = [fnmatch.filter(rest, form) for form in FORMS]
    taken = next((names for names in found if names), [])
    weights = {name for names in found for name in names}
    return tuple(name for name in rest if name in taken or name not in weights)


def fetch(model: str, revision: str | None) -> str:
    """Download the files of a model that the cache lacks, and return the path of the folder that holds them.

    Args:
        model: id of the model at the hub.
        revision: branch, tag or commit; None: the hub's default branch.

    Raises:
        NotFetched: the download failed; the message names the model and the cause.
    """
    try:
        if os.environ.get(MODELSCOPE, "").lower() in ("1", "true"):
            scope = importlib.import_module("modelscope.hub.snapshot_download")  # not in every image
            return str(scope.snapshot_download(model, revision=revision, ignore_file_pattern=list(COPIES)))
        from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 (takes a second; usage does without)

        wanted = needed_files(HfApi().list_repo_files(model, revision=revision))
        return snapshot_download(model, revision=revision, allow_patterns=[glob.escape(name) for name in wanted])
    except Exception as error:  # what the hubs' clients raise is not one family
        raise NotFetched(f"{model}: {' '.join(str(error).split()) or type(error).__name__}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, 0 or 1. Raises SystemExit: wrong usage (2), or help was asked for (0)."""
    parser = argparse.ArgumentParser(prog="xpyd_sidecar.engine.model_download",
                                     description="Bring a model of the hub into the cache.")
    parser.add_argument("model", help="the hub's id of it")
    parser.add_argument("revision", nargs="?", help="branch, tag or commit (default: the hub's default branch)")
    args = parser.parse_args(argv)
    try:
        where = fetch(args.model, args.revision)
    except NotFetched as error:
        print(f"cannot fetch {error}", file=sys.stderr)
        return 1
    print(f"{args.model} is in {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
