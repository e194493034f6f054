"""The bill of materials: for each published image and platform the Python packages in it, as CycloneDX (JSON, 1.6).

What is of the distribution in an image stands in the image, in /var/lib/dpkg/status.d, where scanners look.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from images import inputs
from images.platforms import PLATFORMS
from images.tools import ROOT, run
from images.tree import EPOCH

from release import toolbox

SPEC = "1.6"
LIMIT_S = 1800.0
"""Deadline of the tools: the schema is large, and a full machine takes minutes for a file."""
_JUDGE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for path in sys.argv[1:]:
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(path, encoding="utf-8").read())
    if wrong:
        sys.exit(f"{path}: {wrong.data if hasattr(wrong, 'data') else wrong}"[:2000])
"""


def write(folder: Path, wheels: list[Path], tools: Path) -> list[Path]:
    """Write a file per image and platform; their paths.

    ``wheels``: of this release; those of an image's projects become components, with their sums.

    Raises:
        ImageError: the tool failed. Whether what it made is valid is said by `check`.
    """
    folder.mkdir(parents=True)
    made = []
    for kind in (kind for kind in inputs.KINDS if kind.published):
        for platform in PLATFORMS:
            own = [line for project in kind.projects for line in _pins(project, platform.machine, wheels)]
            target = folder / f"xpyd-{kind.name}-{platform.name}.cdx.json"
            with toolbox.temporary("bill") as name:
                asked = Path(name) / "requirements.txt"
                asked.write_text(inputs.lock(kind.name, platform).read_text() + "".join(own))
                run([str(tools.with_name("cyclonedx-py")), "requirements", "--output-reproducible", "--no-validate",
                     "--spec-version", SPEC, "--pyproject", str(ROOT / "distribution/pyproject.toml"), "-o", str(target),
                     str(asked)],
                    env={"SOURCE_DATE_EPOCH": str(EPOCH), "PYTHONPATH": ""}, timeout_s=LIMIT_S)
            made.append(target)
    return made


def _pins(project: str, machine: str, wheels: list[Path]) -> list[str]:
    """Lines of requirements for this release's wheels of one project that a machine takes."""
    return [f"xpyd-{project}=={inputs.version()} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
            for path in wheels if path.name.startswith(f"xpyd_{project}-") and path.parent.name != "pure"
            and (machine in path.name or path.name.endswith("-any.whl"))]


def check(paths: list[Path], tools: Path) -> None:
    """Whether files are bills of materials as the schema of CycloneDX wants them.

    Raises:
        ImageError: one is not; the message has the schema's words.
    """
    run([str(tools), "-c", _JUDGE, *(str(path) for path in paths)], env={"PYTHONPATH": ""}, timeout_s=LIMIT_S)
