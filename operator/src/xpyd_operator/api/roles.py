"""``spec.prefill`` and ``spec.decode``: how many instances of a role there are, and what one of them is."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from xpyd_operator.api.base import Arguments, Count, DeviceKey, ObjectName, Part, Positive, Preserved, Quantities

ParallelSize = Annotated[int, Meta(ge=1, le=1024)]
GPU = "nvidia.com/gpu"
NO_DEVICE = "none"


class Scaling(Part, frozen=True):
    """Bounds of a role's instance count that an HPA, KEDA, `kubectl scale` or the planner sets on the role's DisaggPool."""

    min: Count
    """Fewest instances. 0 for decode: a service that nobody asks has none at all, and the first request starts them. It
    needs 0 for prefill, too, `router.placement: deployment` and `router.hold` of at least 1m."""
    max: Positive
    """Most instances."""


class Parallelism(Part, frozen=True):
    """How one instance is spread over devices."""

    tensor: ParallelSize = 1
    """Tensor-parallel size. Of the sizes of prefill and decode one must divide the other. Set it where one device does
    not hold the model, or is too slow for it.
    """
    pipeline: ParallelSize = 1
    """Pipeline-parallel size. Set it where the links between devices are slow."""
    data: ParallelSize = 1
    """Data-parallel size: ranks of one instance, each with its own KV cache. Set it for a mixture of experts whose
    ranks share the experts.
    """
    pods: Annotated[int, Meta(ge=1, le=16)] = 1
    """Pods of one instance, each with an equal share of its devices, and of its ranks where there are several; with
    `xpyd up` as many process sets on the host. They begin and end together. `resources` are those of one pod. Set it
    where an instance needs more devices than a node has.
    """
    device: DeviceKey | None = None
    """What a device is: the key of a resource, e.g. `amd.com/gpu` or `nvidia.com/mig-3g.40gb`; `none`: there are none,
    as on CPUs. Default: the devices that `resources` or `template` name, or a claim; without any `nvidia.com/gpu`.
    Where they name a key alone that xpyd knows neither as a device nor as a network, it must stand here, or what the
    device is. A key that nothing names is added, `tensor` x `pipeline` x `data` of it. Set it for other devices than
    NVIDIA's whole GPUs, and on CPUs.
    """

    @property
    def devices(self) -> int:
        """Devices of one instance, all ranks together."""
        return self.tensor * self.pipeline * self.data

    @property
    def devices_of_pod(self) -> int:
        """Devices of each pod of one instance."""
        return self.devices // self.pods


class ResourceClaim(Part, frozen=True):
    """A claim for devices (dynamic resource allocation) of the pod that its container `main` uses."""

    name: ObjectName
    """Its name among `template.spec.resourceClaims`."""
    request: ObjectName | None = None
    """One of its requests; default: all of them."""


Claims = Annotated[tuple[ResourceClaim, ...], Meta(extra={"max_items": 16})]


class Resources(Part, frozen=True):
    """Resources of the container `main`, as in Kubernetes."""

    limits: Quantities = msgspec.field(default_factory=dict)
    """Most that one instance may use, e.g. `nvidia.com/gpu: 2`."""
    requests: Quantities = msgspec.field(default_factory=dict)
    """What the scheduler reserves for one instance. Default: the limits."""
    claims: Claims = ()
    """Devices by dynamic resource allocation: claims of `template.spec.resourceClaims`."""


class RoleSpec(Part, frozen=True):
    """One role, prefill or decode: how many instances it has, and what each of them is."""

    replicas: Count | None = None
    """Number of instances; 1 when neither this nor `scaling` is given. Decode needs at least one (see `scaling`); with
    0 prefill instances decode does the prefill itself. Set it to what you have devices for.
    """
    scaling: Scaling | None = None
    """Bounds of a count that is set from outside. Not with `replicas`."""
    parallelism: Parallelism = Parallelism()
    """How one instance is spread over devices."""
    resources: Annotated[Resources, Meta(extra={"preserve": True})] | None = None
    """Resources of one instance, or of one pod of several, as in a container: `limits`, `requests` (default: the
    limits), `claims` of `template.spec.resourceClaims`. Where they name no device, `nvidia.com/gpu` is added, one per
    device (`parallelism.device`); `{}`: no resources at all. Set it for memory and processors of the pod, and to name
    other devices.
    """
    args: Arguments = ()
    """Arguments of the vLLM server for this role, after those of `engine.args`. Set it where prefill and decode should
    differ, as in `--max-num-seqs`.
    """
    template: Preserved | None = None
    """Pod template laid over `spec.template` and the pod that xpyd makes; the engine's container is `main`. Maps are
    merged, `null` takes a field away; containers, volumes, variables and ports are merged by name, mounts by path,
    other lists replaced. What xpyd needs is refused here: `xpyd render pods` shows the outcome. Not used by `xpyd up`.
    Set it for the nodes, tolerations, volumes and further containers of one role.
    """

    @property
    def min_instances(self) -> int:
        """Fewest instances of the role, and the count that a service starts with."""
        if self.scaling is not None:
            return self.scaling.min
        return 1 if self.replicas is None else self.replicas

    @property
    def max_instances(self) -> int:
        """Most instances of the role: its fixed count where it has no `scaling`."""
        return self.min_instances if self.scaling is None else self.scaling.max
