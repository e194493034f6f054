"""How the blocks of this rank may travel: what is set, and what this machine has. Needs torch, and nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.session_bodies import Gpu, LinkName
from xpyd_sidecar.process.host_identity import host
from xpyd_sidecar.session.link_trial import Fetcher, FetchSettings, OtherLink
from xpyd_sidecar.session.receiver import Receiver
from xpyd_sidecar.transport.links import StoreReader
from xpyd_sidecar.transport.shm.serve import ShmServer
from xpyd_sidecar.transport.tcp import cipher


def check_encryption(options: KvOptions) -> None:
    """Nothing, where KV need not be encrypted, or can be.

    Raises:
        ConfigError: over the transport that is set nothing is, or there is nothing here to encrypt with.
    """
    if options.encryption != "enabled":
        return
    if options.transport in {"rdma", "nccl"}:
        raise ConfigError(f"{FIELD}.encryption: {options.transport} does not encrypt; write kv.transport: auto, tcp or shm")
    if options.transport != "shm" and (reason := cipher.lack()):
        raise ConfigError(f"{FIELD}.encryption: {reason}; mend that, or write kv.encryption: disabled")


def shared_server(options: KvOptions) -> ShmServer | None:
    """Prefill's side of the link ``shm``; None: it is not wanted, or a host cannot be told from another."""
    name = host() if options.transport in {"auto", "shm"} else ""
    return ShmServer(name, _folder(options), insists=options.transport == "shm") if name else None


def fetcher(options: KvOptions, receiver: Receiver, others: Mapping[LinkName, OtherLink],
            reader: Callable[[memoryview], StoreReader] | None = None, *, nixl: str = "",
            gpu: Gpu | None = None) -> Fetcher:
    """What decode's side can fetch over.

    Args:
        options: of this rank.
        receiver: whose fetches they are.
        others: links beside shared memory and TCP.
        reader: as of ``Fetcher``.
        nixl: its version here.
        gpu: that forms NCCL groups.
    """
    name = host() if options.transport in {"auto", "shm"} else ""
    made: dict[LinkName, OtherLink] = {**others}
    if options.transport in {"auto", "tcp"}:
        made["tcp"] = receiver.over_tcp
    settings = FetchSettings(options.transport, name, _folder(options), nixl, gpu=gpu, sums=options.checksum == "enabled",
                             encrypts=options.encryption == "enabled")
    return Fetcher(settings, receiver, made, reader)


def _folder(options: KvOptions) -> Path | None:
    return Path(options.shared_folder) if options.shared_folder else None
