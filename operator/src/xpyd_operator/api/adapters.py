"""``spec.adapters``: LoRA adapters that are served beside the model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from xpyd_operator.api.base import Part, Text
from xpyd_operator.api.source import ADAPTER_PATTERN
from xpyd_sidecar.contract import adapters


class AdapterSpec(Part, frozen=True):
    """One LoRA adapter."""

    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=adapters.NAME_PATTERN, extra={"kind": "adapter"})]
    """Name that clients ask for as `model`."""
    source: Annotated[
        str, Meta(min_length=1, max_length=512, pattern=ADAPTER_PATTERN, extra={"kind": "adapterSource"})
    ]
    """Where its files are: a folder as the engines see it (`/adapters/sql`, on a volume of `spec.template` or in the
    image), a hub id (`org/sql-lora`), or, with `xpyd up` only, a path beside the document (`./sql`). Files in a folder
    are not looked at again: write new ones to a new folder.
    """
    revision: Text | None = None
    """Hub revision (branch, tag or commit). Only with a hub id. Set it so that a new commit on the hub changes nothing
    by itself.
    """
