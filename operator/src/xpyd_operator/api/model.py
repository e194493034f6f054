"""``spec.model`` and ``spec.engine``: what is served, and by which vLLM."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from xpyd_operator.api.base import Arguments, Duration, LabelKey, ObjectName, Part, Preserved, SecretKeyRef, Text
from xpyd_operator.api.durations import seconds
from xpyd_operator.api.source import SOURCE_PATTERN, Source, parse

DEFAULT_IMAGE = "vllm/vllm-openai:v0.32.0"


class Cache(Part, frozen=True):
    """Where downloaded weights and compiled kernels are kept."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim shared by the instances (ReadWriteMany when they run on several nodes), for weights and for
    what vLLM compiles. Default: a folder that lives as long as its pod, bounded by its limit of `ephemeral-storage`
    alone. Set it where weights are large, or instances start often. Who can write there can run code in engines.
    """


class Model(Part, frozen=True):
    """What is served."""

    source: Annotated[str, Meta(min_length=1, max_length=512, pattern=SOURCE_PATTERN, extra={"kind": "source"})]
    """Hub id (`Qwen/Qwen3-8B`), absolute path in the engine image (`/models/qwen`), folder on a volume
    (`pvc://claim/path`), image that is mounted as one (`oci://registry.example/team/qwen:v1`, perhaps with a folder in it
    after the tag), bucket from which vLLM streams (`s3://bucket/path`, `gs://`, `az://`), or, with `xpyd up` only, a path
    beside the document (`./weights`)."""
    served_name: Text | None = None
    """Name that clients ask for. Default: the hub id; for the other sources the name of the service. Set it where
    clients know the model by another name.
    """
    revision: Text | None = None
    """Hub revision (branch, tag or commit). Only with a hub id. Set it so that a new commit on the hub changes nothing
    by itself.
    """
    cache: Cache = Cache()
    """Where downloaded weights and compiled kernels are kept."""
    prefetch: bool = False
    """Images are pulled, and kept, on every node that an instance may run on, by a pod of a DaemonSet; and while there
    are no instances, weights are fetched from the hub onto `cache.claim`. Not used by `xpyd up`. Set it where instances
    start seldom and must start soon, as with `scaling: {min: 0}`, and name the nodes in the roles' templates.
    """
    token_secret: Annotated[SecretKeyRef, Meta(extra={"preserve": True})] | None = None
    """Hub token for gated models: `name` of a Secret in the namespace of the service, and `key` in it. Set it where the
    hub asks for one.
    """

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


Variable = Annotated[EnvVar, Meta(extra={"preserve": True})]


class Engine(Part, frozen=True):
    """vLLM itself, the same for both roles."""

    image: Annotated[str, Meta(min_length=1, max_length=512)] = DEFAULT_IMAGE
    """Any image with vLLM 0.32 or 0.33; xpyd adds its own part when a pod starts. Not used by `xpyd up`. Set it for
    another vLLM, or for a copy in your registry.
    """
    args: Arguments = ()
    """Arguments of the vLLM server, one per item, for both roles. Those that xpyd sets itself are refused. Set it for
    what vLLM itself can do, such as `--max-model-len`.
    """
    env: Annotated[tuple[Variable, ...], Meta(extra={"max_items": 64, "merge_key": "name"})] = ()
    """Environment of the vLLM server, as in a container: `name` with `value` (as written, no `$(…)` is replaced), or in
    Kubernetes with `valueFrom`. `XPYD_…`, `PYTHONPATH`, `VLLM_API_KEY` and vLLM's data-parallel addresses belong to
    xpyd. Set it for vLLM's own variables, proxies and certificates.
    """
    startup_timeout: Duration = "30m"
    """How long an engine may take from its start until it is ready, download of weights included. Set it where weights
    take longer to come.
    """
    topology: LabelKey | None = None
    """Key of a label of nodes, e.g. `nvidia.com/gpu.clique`: all pods of one instance of several (`parallelism.pods`) are
    on nodes with one value of it. Set it where only some nodes share a fast network. Not used by `xpyd up`.
    """

    @property
    def startup_timeout_s(self) -> float:
        """Seconds."""
        return seconds(self.startup_timeout)


