"""How far the core of an engine has got, as its connector tells: ``<run dir>/steps-<dp rank>.json``.

    core ──turns, patience, prompts──▶ connector ──file, once a second──▶ agent ──beats──▶ routers

A turn is the beginning or the end of a step. A core that has requests turns, also while all of them wait for KV from
elsewhere; one that hangs, or is stopped, does not, and then the file stands still.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import Incarnation

ToldT = TypeVar("ToldT")
"""What a rank tells of itself."""

class CoreSteps(msgspec.Struct, frozen=True):
    """Steps of the engine core of one data-parallel rank, or the sum over several ranks."""

    turns: Annotated[int, msgspec.Meta(ge=0)]
    """Since its start; these only grow."""
    patience_s: Annotated[float, msgspec.Meta(gt=0)]
    """A core with requests that has not turned for longer hangs: by its own longest steps, for the one that it does now."""


class PromptWork(msgspec.Struct, frozen=True):
    """Tokens of prompts that an engine computes itself; those in its cache, or that come from elsewhere, left out once that
    is known.
    """

    queued: Annotated[int, msgspec.Meta(ge=0)] = 0
    """It has them and has not computed them."""
    computed: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Since its start; these only grow."""


class WrittenSteps(msgspec.Struct, frozen=True):
    """What stands in the file. Fields that are not known are ignored."""

    incarnation: Incarnation
    """Of the engine that has written it."""
    steps: CoreSteps
    prompts: PromptWork | None = None
    """What it has of prompts, of one that tells."""


def path_of(run_dir: Path, dp_rank: int) -> Path:
    """Where it stands."""
    return run_dir / f"steps-{dp_rank}.json"


def write(run_dir: Path, dp_rank: int, steps: WrittenSteps) -> None:
    """Write it, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    run_folder.write(path_of(run_dir, dp_rank), steps)


def read(run_dir: Path, dp_rank: int) -> WrittenSteps | None:
    """What stands there; None where nobody has said anything.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    return run_folder.read(path_of(run_dir, dp_rank), WrittenSteps)


def sum_steps(ranks: list[WrittenSteps], incarnation: Incarnation, expected: int) -> CoreSteps | None:
    """The steps of all ranks of one engine; None where fewer than ``expected`` have told theirs in this life."""
    ours = _all_of_life(((one.incarnation, one.steps) for one in ranks), incarnation, expected)
    return CoreSteps(sum(one.turns for one in ours), max(one.patience_s for one in ours)) if ours else None


def sum_prompts(ranks: list[WrittenSteps], incarnation: Incarnation, expected: int) -> PromptWork | None:
    """The prompts of all ranks of one engine; None where fewer than ``expected`` have told theirs in this life."""
    ours = _all_of_life(((one.incarnation, one.prompts) for one in ranks), incarnation, expected)
    return PromptWork(sum(one.queued for one in ours), sum(one.computed for one in ours)) if ours else None


def _all_of_life(told: Iterable[tuple[Incarnation, ToldT | None]], incarnation: Incarnation, expected: int) -> list[ToldT]:
    """What was told in this life; nothing where fewer ranks than ``expected`` have told it."""
    ours = [one for life, one in told if life == incarnation and one is not None]
    return ours if len(ours) >= expected else []
