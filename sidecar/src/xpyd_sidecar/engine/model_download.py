"""``python -m xpyd_sidecar.engine.model_download MODEL [REVISION]``: bring a model of the hub into the cache.

Runs in the engine's image and asks for no device. The files are those that vLLM reads at an engine's start: all but weights
of a form that it does not choose where there are several, and copies for other programs. They go where ``HF_HOME`` says
(with ``VLLM_USE_MODELSCOPE``, ``MODELSCOPE_CACHE``). Files that are there are not fetched again, and those of which a part
is there go on.

Exit code: 0 everything is there; 1 it is not (one line on stderr says why); 2 wrong usage.
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
    """The hub does not answer, does not have the model or refuses it, or there is no room."""


def needed_files(files: Iterable[str]) -> tuple[str, ...]:
    """Those that an engine reads.

    Args:
        files: paths of all files of a repository.
    """
    rest = [name for name in files if not any(fnmatch.fnmatch(name, each) for each in COPIES)]
    found = [fnmatch.filter(rest, form) for form in FORMS]
    taken = next((names for names in found if names), [])
    weights = {name for names in found for name in names}
    return tuple(name for name in rest if name in taken or name not in weights)


def fetch(model: str, revision: str | None) -> str:
    """Fetch what is missing; the folder with the files.

    Args:
        model: the hub's id of it.
        revision: branch, tag or commit; None: the hub's default branch.

    Raises:
        NotFetched: it could not be fetched.
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
    """Run the command."""
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
