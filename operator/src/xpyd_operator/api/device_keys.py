"""Keys of resources that are known: what each is for an engine. A key that is in none of these lists is asked about, never
guessed at (``rules_devices``).

    DEVICES    engines compute on them, one for each device of ``parallelism``
    SHARES     engines compute on them, and their number is none of devices: chips of several cores, parts of a GPU
    NETWORKS   engines reach each other by them, or pods anything else: NICs and their functions, RDMA, addresses
    BESIDE     neither: how much of a device is meant, files of devices, copies

A ``*`` at the end of a key stands for any further text.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Final


class Meaning(StrEnum):
    """What a key is."""

    DEVICE = "device"
    SHARE = "share"
    NETWORK = "network"
    BESIDE = "beside"
    UNKNOWN = "unknown"


EFA: Final = "vpc.amazonaws.com/efa"
TPU: Final = "google.com/tpu"
DEVICES: Final = (
    "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "volcano.sh/vgpu-number", "volcano.sh/gpu-number",
    "amd.com/gpu", "amd.com/spx_*", "amd.com/dpx_*", "amd.com/tpx_*", "amd.com/qpx_*", "amd.com/cpx_*",
    "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi",
    "aws.amazon.com/neuroncore", TPU,
    "huawei.com/Ascend*", "huawei.com/npu", "cambricon.com/mlu*", "cambricon.com/vmlu", "hygon.com/dcu",
    "hygon.com/dcunum", "metax-tech.com/gpu", "metax-tech.com/sgpu", "mthreads.com/gpu", "mthreads.com/vgpu",
    "iluvatar.ai/gpu", "iluvatar.ai/vgpu", "iluvatar.com/gpu", "enflame.com/gcu", "enflame.com/vgcu", "kunlunxin.com/xpu",
    "kunlunxin.com/vxpu", "birentech.com/gpu", "qualcomm.com/qaic", "furiosa.ai/rngd", "rebellions.ai/ATOM*",
)
SHARES: Final = (
    "aws.amazon.com/neuron", "aws.amazon.com/neurondevice", "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage",
    "tencent.com/vcuda-core", "tencent.com/vcuda-memory", "volcano.sh/gpu-memory",
)
NETWORKS: Final = (
    "rdma/*", "vpc.amazonaws.com/*", "networking.gke.io.networks/*", "openshift.io/*", "mellanox.com/*",
    "nvidia.com/hostdev*", "nvidia.com/mlnx*", "nvidia.com/rdma*", "nvidia.com/sriov*", "nvidia.com/roce*",
    "nvidia.com/ib*", "nvidia.com/resib*", "nvidia.com/bf_*", "intel.com/intel_sriov*", "intel.com/sriov*",
    "intel.com/mlnx*", "intel.com/ixgbe*", "aliyun/erdma", "aliyun/eni", "aliyun/member-eni", "aliyun.com/erdma",
    "tke.cloud.tencent.com/*", "vke.volcengine.com/*", "broadcom.com/*", "amd.com/nic*", "amd.com/vnic*",
)
BESIDE: Final = (
    "nvidia.com/gpumem*", "nvidia.com/gpucores", "nvidia.com/priority", "nvidia.com/gdrcopy", "nvidia.com/gdrdrv",
    "volcano.sh/vgpu-memory*", "volcano.sh/vgpu-cores", "gpu.intel.com/millicores", "gpu.intel.com/memory.max",
    "gpu.intel.com/tiles", "gpu.intel.com/i915_monitoring", "gpu.intel.com/xe_monitoring", "cambricon.com/mlu.smlu.vcore",
    "cambricon.com/mlu.smlu.vmemory", "hygon.com/dcumem", "hygon.com/dcucores", "metax-tech.com/vcore",
    "metax-tech.com/vmemory", "mthreads.com/sgpu-core", "mthreads.com/sgpu-memory", "iluvatar.ai/vcuda-core",
    "iluvatar.ai/vcuda-memory", "huawei.com/Ascend310P-memory", "huawei.com/Ascend910A-memory",
    "huawei.com/Ascend910B-memory", "huawei.com/Ascend910B2-memory", "huawei.com/Ascend910B3-memory",
    "huawei.com/Ascend910B4-memory", "devices.kubevirt.io/*", "smarter-devices/*", "github.com/fuse",
)
_LISTS: Final = ((Meaning.BESIDE, BESIDE), (Meaning.NETWORK, NETWORKS), (Meaning.SHARE, SHARES), (Meaning.DEVICE, DEVICES))
"""Asked in this order: what is said of one key holds before what is said of many."""


@cache
def _sorted() -> tuple[dict[str, Meaning], tuple[tuple[str, Meaning], ...]]:
    whole = {key: meaning for meaning, keys in _LISTS for key in keys if not key.endswith("*")}
    heads = [(key[:-1], meaning) for meaning, keys in _LISTS for key in keys if key.endswith("*")]
    return whole, tuple(heads)


def meaning(key: str) -> Meaning:
    """What a resource is by its key, whole keys before beginnings. What has no domain is Kubernetes' own: memory, cpu."""
    if "/" not in key:
        return Meaning.BESIDE
    whole, heads = _sorted()
    return whole.get(key) or next((found for head, found in heads if key.startswith(head)), Meaning.UNKNOWN)
