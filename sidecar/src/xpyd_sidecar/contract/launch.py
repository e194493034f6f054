"""How the processes of a service are started: configuration structs, environment names, engine arguments.

The operator renders these, sidecar and connector read them; nobody else knows the spelling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, join_host_port

# Environment of the engine process, read by the connector. Everything else is in KvOptions.
ENV_RUN_DIR = "XPYD_RUN_DIR"
"""Folder shared by engine and agent of one instance (engine records, agent socket)."""
ENV_KEY_FILE = "XPYD_KEY_FILE"
ENV_INSTANCE = "XPYD_INSTANCE"
ENV_HOST = "XPYD_HOST"
"""Address at which peers reach this instance (a pod's IP; 127.0.0.1 locally)."""
ENV_DP_SYNC = "XPYD_DP_SYNC"
"""How data-parallel ranks are kept in step: disabled (vLLM's own waves), auto, rpc or shm."""
ENV_DP_LOOKAHEAD = "XPYD_DP_LOOKAHEAD"
"""Steps that a rank asks for at once: adaptive, or a number."""
ENV_DP_TIMEOUT_S = "XPYD_DP_TIMEOUT_S"
"""Silence after which a data-parallel rank counts as dead."""
ENV_QUEUE = "XPYD_QUEUE"
"""Which queue is under vLLM's executor of several processes: vllm (its own), or xpyd."""
ENV_API_KEY = "VLLM_API_KEY"
"""vLLM's own: an engine that has it answers nobody without that key, and routers send none."""

AGENT_SOCKET = "agent.sock"
"""Unix socket in the run folder: HTTP GET /status, POST /drain, POST /role."""

KEEP_BYTES: Final = 256 << 20
"""Host memory of a rank for copies of KV to send, on a host, where nobody has chosen."""
DEVICE_KEEP_BYTES: Final = 512 << 20
"""Copies to send on a device, at least: what one peer may have of it leaves at 10 GB/s beside steps of 30 ms."""
DEVICE_RING_BYTES: Final = 512 << 20
"""What arrives on a device passes through so much of it, at least, and by some links through as much of the host's."""
NIXL_SLOT_BYTES: Final = 256 << 20
"""Host memory that a rank reads into over NIXL, where what is read has no place of its own that an RDMA device may fill."""

CONNECTOR_CLASS = "XpydConnector"
CONNECTOR_MODULE = "xpyd_sidecar.engine.connector"


class KvOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config["xpyd"]``: the connector's settings. Sizes in bytes, times in seconds."""

    transport: Literal["auto", "tcp", "shm", "nccl", "rdma"] = "auto"
    mode: Literal["put_async", "put", "get"] = "put_async"
    checksum: Literal["enabled", "disabled"] = "enabled"
    """Whether this rank, as decode's, checks a sum of what it is given."""
    encryption: Literal["disabled", "enabled"] = "disabled"
    """Whether KV leaves the host sealed; a peer that has it otherwise is refused."""
    keep_bytes: int | None = None
    """Bound on copies that a rank of prefill holds until decode has taken them; ``host_pool_bytes`` come on top.
    None: ``KEEP_BYTES`` on a host, and on a device what the model asks for (``engine.worker.memory_sizes``)."""
    buffer_bytes: int | None = None
    """Of each rank's lookup buffer for KV that comes before decode has blocks for it. None: ``buffer_share``."""
    buffer_share: float | None = None
    """The same as a share of the rank's KV cache. Both None: a tenth of it, at most 1 GiB."""
    host_pool_bytes: int = 0
    """Of each rank, when the lookup buffer is full; and as much more for copies to send."""
    put_wait_s: float = 0.25
    """Mode put: a step waits so long at most for its KV to leave."""
    window_bytes: int = 16 << 20
    """What a decode rank has in flight from a prefill rank, at most, where it writes into blocks directly."""
    claim_s: float = 10.0
    """How long decode keeps an announcement whose own leg has not come. Both legs are sent at once, so one that is later
    than this was refused by its engine's front end, or is lost. Should it come after all, decode computes the prompt."""
    keep_ttl_s: float = 60.0
    """How long it holds them."""
    load_timeout_s: float = 30.0
    """Of silence, after which a load ends: nothing has arrived, and prefill has said of no work for it that grew."""
    load_limit_s: float = 600.0
    """From the order to load until all must be in place, whatever arrives; what the router has left bounds it, too."""
    peer_timeout_s: float = 5.0
    """Connecting, handshake, and silence on a link that has work."""
    control_port: int = 0
    """0: chosen by the kernel."""
    data_port: int = 0
    """Of rank 0; the other ranks of an engine listen on the ports after it. 0: chosen by the kernel."""
    shared_folder: str = ""
    """Folder that engines of one host share, through which they pass each other memory; empty: none, and only those of one
    network namespace do."""
    nccl_groups: int = 16
    """Peers' ranks with which this rank has an NCCL group at once, at most; each takes GPU memory (``kv.groups``)."""
    nccl_ctas: int = 4
    """Channels of such a group, 1 to 32: thread blocks on the GPU while it works, and 9.19 MiB of GPU memory each."""
    advertise_data: HostPort | None = None
    """Address announced for data when peers must take another way (address translation); counts up like ``data_port``."""


GROUP_BEAT_S: Final = 1.0
"""Between two beats of a group's leader at most: as often as its members say hello."""


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent's member is one of several that make up an instance (``contract.group``)."""

    index: int
    """From 0, the leader."""
    size: int
    layout: str
    """Hash of what all members are made of."""
    leader: HostPort = HostPort("")
    """Where the leader's agent listens; empty for the leader."""
    host: str = ""
    """Where engines of the group meet, on the leader; empty: ``advertise_host``. Nobody else need reach it."""
    over_s: float = 15.0
    """Silence of a member after which all of them end their engines and begin again."""


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent half of a sidecar: speaks for one engine."""

    role: Role
    engine: HostPort
    """Where the engine's HTTP server listens, as seen from the agent."""
    routers: tuple[HostPort, ...]
    """Membership addresses; a DNS name stands for every address it resolves to, looked up again and again."""
    advertise_host: str
    """The host on which routers reach the engine, without brackets, since in a pod Kubernetes fills it in."""
    advertise_port: int
    """The port of it."""
    model: str = ""
    """Served model name."""
    epoch: int = 1
    assignment_file: str | None = None
    """Where the role is told durably (``contract.assignment``), looked at again and again; None: nowhere."""
    listen: HostPort | None = None
    """Where the agent takes a new role over the network, by signed calls (``contract.signing``); None: by its unix socket
    alone."""
    data_parallel: int = 1
    """How many DP ranks (engine records) the engine has."""
    previous_key_file: str | None = None
    """The key that the service had before, for routers that still have it; an empty file or None: none."""
    key_mark: str = ""
    """Stands for the service's key in the fingerprint that routers hear, so that they pair within one key."""
    group: GroupConfig | None = None
    """None: the engine is all of the instance."""
    heartbeat_s: float = 3.0
    resolve_s: float = 5.0
    drain_timeout_s: float = 600.0
    startup_timeout_s: float = 1800.0

    @property
    def beat_s(self) -> float:
        """Between two beats. One agent speaks for all members of a group, so its silence tells sooner."""
        return self.heartbeat_s if self.group is None else min(self.heartbeat_s, GROUP_BEAT_S)

    @property
    def advertised_address(self) -> HostPort:
        """The engine's address, as seen from the routers."""
        return join_host_port(self.advertise_host, self.advertise_port)


LARGEST_FIT = 6
"""A router's budget has room for so many bodies of the largest size, whatever it is set to. A request has five times its
body at most (itself, what both engines get, its prompt's ids), of the seven eighths that are not for small ones: so the
largest is accepted where no other is."""


def ledger_bytes(body_budget: int, max_body: int) -> int:
    """Bytes that a router may hold for its clients: its budget, and room for the largest request in any case.

    Args:
        body_budget: bytes, as set.
        max_body: bytes of the largest body that it accepts.
    """
    return max(body_budget, LARGEST_FIT * max_body)


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router half of a sidecar."""

    host: str = "::"
    """Where it listens; ``::``: on all addresses (``listening``)."""
    port: int = 10001
    members_port: int = 30001
    admin_port: int = 10002
    """For probes, metrics, the operator and people; clients cannot take its connections."""
    policy: str = "cost"
    policy_options: dict[str, Any] = {}
    on_no_prefill: Literal["decode", "reject"] = "decode"
    failover: Literal["continue", "exact", "error"] = "continue"
    """Which streams go on elsewhere: also sampled ones that keep their distribution, those alone whose every token is
    determined, none."""
    model: str = ""
    """Served model name; requests for another one are refused with 404."""
    api_key_file: str | None = None
    """A file with one client key per line; None: clients need none."""
    hosts: tuple[str, ...] = ()
    """Names (without a port) that a router on a loopback address answers for, beside localhost, 127.0.0.0/8 and [::1]."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (``10.0.0.0/8``) of proxies, whose connections without a request so far are not counted by address."""
    cors_origins: tuple[str, ...] = ()
    """Origins (``https://app.example``) whose pages may ask the router from a browser; ``*``: all. Empty: none."""
    heartbeat_s: float = 3.0
    missed_beats: int = 3
    """Beats that must be missing before an instance is probed and, if the probe fails, evicted."""
    max_body_bytes: int = 32 << 20
    body_budget_bytes: int = 512 << 20
    """Of all that is held for clients (``http.ledger``); beyond it what comes slowly is ended, and what comes is refused.
    At least ``LARGEST_FIT`` times ``max_body_bytes``, also where this is less."""
    max_header_bytes: int = 64 << 10
    max_in_flight: int = 4096
    """Requests served at once; those beyond it wait in the queue."""
    queue_size: int = 1024
    """Requests that may wait; 0: none, a request that cannot be served now is refused."""
    queue_timeout_s: float = 30.0
    """Longest wait in the queue; then 503 with Retry-After."""
    hold_s: float = 30.0
    """How long a request is held at most where nobody can be picked and somebody is expected; 0: none is."""
    wakes: bool = False
    """The service may have no instances, and a held request starts them (``contract.waking``)."""
    max_per_instance: int = 0
    """Requests of this router that one instance serves at once; 0: found from what the engines report as waiting."""
    skip_prefill_below: int = 0
    """Prompts of fewer tokens go to decode alone; 0: none. Exact for token ids, estimated for text."""
    skip_prefill_rest: int = 0
    """Prompts that decode holds but for so many tokens go to decode alone; 0: none."""
    retry_budget: float = 0.2
    """Retries allowed, as a share of recent requests (beyond a small floor); 0: the floor alone."""
    first_token: Literal["decode", "prefill"] = "decode"  # noqa: S105  # a token of an answer
    """Who gives the first token of a stream."""
    tls_cert_file: str | None = None
    """Certificate chain for the client port, PEM; None: plain HTTP."""
    tls_key_file: str | None = None
    """Its private key, PEM, without a passphrase."""
    otlp_endpoint: str = ""
    """Where spans go (OTLP over HTTP, ``http://host:4318``); empty: nowhere."""
    request_timeout_s: float = 3600.0
    pair_timeout_s: float = 60.0
    """How long decode may wait for prefill's announcement."""
    audit: float = 0.0
    """Share of answers with KV from prefill that decode computes again without it (``router.audit``); 0: none."""
    load_limit_s: float = 600.0
    """How long it may wait for the KV after that, while prefill makes progress (``KvOptions.load_limit_s``). Decode notices
    where it makes none; a prefill leg that takes longer than both together is given up here, too."""
    resolve_s: float = 5.0
    """How often agents look up the routers' name; a router's roster is settled after one such interval and one beat."""
    receive_timeout_s: float = 30.0
    """How long a client may take to send a request (large bodies get more, by their size)."""
    listen_on_s: float = 0.0
    """How long a stopping router goes on accepting connections, while those who balance load learn that it is not ready."""
    drain_timeout_s: float = 600.0
    """How long a stopping router waits for its requests to end."""
    access_log: bool = True
    beside_engine: bool = False
    """The router runs in an engine's pod, where agents are told of it at some time, or never: ready also before that."""

    @property
    def budget_bytes(self) -> int:
        """What the router's ledger has: ``body_budget_bytes``, or what the largest request needs."""
        return ledger_bytes(self.body_budget_bytes, self.max_body_bytes)


class SidecarConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``python -m xpyd_sidecar --config FILE``: JSON of this."""

    service: ServiceName
    instance: InstanceName
    """For a router of its own: its name."""
    key_file: str
    run_dir: str
    agent: AgentConfig | None = None
    router: RouterConfig | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"


def kv_transfer_config(options: KvOptions, on_load_failure: Literal["recompute", "fail"],
                       beside: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config`` (as an object; the caller encodes it).

    ``beside``: configurations of connectors that come after ours; vLLM's MultiConnector holds them together.
    """
    policy = {"kv_load_failure_policy": on_load_failure}
    ours = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        **policy,
        "kv_connector_extra_config": {"xpyd": msgspec.to_builtins(options)},
    }
    if not beside:
        return ours
    every = [ours, *({**policy, **one} for one in beside)]
    extra = {"connectors": every}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", **policy, "kv_connector_extra_config": extra}
