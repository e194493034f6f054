"""``spec.model`` and ``spec.engine``: what is served, and by which vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from xpyd_operator.api.base import Arguments, Duration, ObjectName, Part, Preserved, SecretKeyRef, Size, Text
from xpyd_operator.api.durations import seconds
from xpyd_operator.api.source import SOURCE_PATTERN, Source, parse

DEFAULT_IMAGE = "vllm/vllm-openai:v0.32.0"


class Cache(Part, frozen=True):
    """Where downloaded weights are kept. Neither field: a folder that lives as long as its pod, without a limit."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim shared by the instances (ReadWriteMany when they run on several nodes). Not with `size`."""
    size: Size | None = None
    """Limit of a folder that lives as long as its pod, such as `40Gi`. Not with `claim`."""


class Model(Part, frozen=True):
    """What is served."""

    source: Annotated[str, Meta(min_length=1, max_length=512, pattern=SOURCE_PATTERN, extra={"kind": "source"})]
    """Hub id (`Qwen/Qwen3-8B`), absolute path in the engine image (`/models/qwen`), folder on a volume
    (`pvc://claim/path`), image that is mounted as one (`oci://registry.example/team/qwen:v1`, perhaps with a folder in it
    after the tag), bucket from which vLLM streams (`s3://bucket/path`, `gs://`, `az://`), or, with `xpyd up` only, a path
    beside the document (`./weights`)."""
    served_name: Text | None = None
    """Name that clients ask for. Default: the hub id; for the other sources the name of the service."""
    revision: Text | None = None
    """Hub revision (branch, tag or commit). Only with a hub id."""
    cache: Cache = Cache()
    """Where downloaded weights are kept."""
    token_secret: SecretKeyRef | None = None
    """Hub token for gated models."""

    @property
    def origin(self) -> Source:
        """The source, taken apart."""
        return parse(self.source)


class EnvVar(Part, frozen=True):
    """One variable of the engine's environment, as in a container."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", extra={"kind": "env"})]
    """Name of the variable. `XPYD_…`, `PYTHONPATH`, `VLLM_API_KEY` and vLLM's data-parallel addresses belong to xpyd."""
    value: Annotated[str, Meta(max_length=4096)] | None = None
    """Its value, as written (no `$(…)` is replaced). Not with `valueFrom`."""
    value_from: Preserved | None = None
    """Where its value comes from (`secretKeyRef`, `configMapKeyRef` …), as in a container; in Kubernetes only."""


class Engine(Part, frozen=True):
    """vLLM itself, the same for both roles."""

    image: Annotated[str, Meta(min_length=1, max_length=512)] = DEFAULT_IMAGE
    """Any image with vLLM 0.32 or 0.33; xpyd adds its own part when a pod starts. Not used by `xpyd up`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the node pulls the image."""
    args: Arguments = ()
    """Arguments of the vLLM server, one per item, for both roles. Those that xpyd sets itself are refused."""
    env: Annotated[tuple[EnvVar, ...], Meta(extra={"max_items": 64, "merge_key": "name"})] = ()
    """Environment of the vLLM server."""
    startup_timeout: Duration = "30m"
    """How long an engine may take from its start until it is ready, download of weights included."""
    dp_step_sync: Literal["auto", "rpc", "shm", "disabled"] = "auto"
    """How data-parallel ranks agree on the next step: by RPC, through shared memory, or as vLLM does it
    (`disabled`)."""
    queue: Literal["auto", "vllm", "xpyd"] = "auto"
    """What carries an engine's calls to its workers, where it has several devices: vLLM's own queue, or that of xpyd, which
    notices workers that are lost and, between pods, asks for the service's key. `auto`: xpyd's where `parallelism.pods` is
    above 1, else vLLM's."""

    @property
    def startup_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.startup_timeout)


