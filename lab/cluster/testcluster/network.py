"""The node of a full cluster has a network and a mount table of its own, so that nothing of the host's is touched.

                 host                          │            node (two namespaces, kept by files in the folder)
    xpyd-1a2b3c4d 10.90.0.254 ─────────────── veth ── node0 10.90.0.1:  API server, kubelet, everything
    routes to pods and Services via the node   │         cni0 10.88.0.1:  pods
    /run, /var                                 │      /run (memory), /var (in the folder): the node's own

Each has an IPv6 address beside it, or that alone (``addresses``).

kube-proxy's table, the rules that feed network policies, the pods' links, and every mount of containerd and kubelet exist
only in there. They are gone when the node's processes are dead and the two files are unmounted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from pathlib import Path

from testcluster import remains
from testcluster.addresses import DUAL, Addresses, is_v4
from testcluster.errors import ClusterError, CommandFailed, InUse, Missing
from testcluster.state import Folder

HOST_ADDRESS = DUAL.host[0]
NODE_ADDRESS = DUAL.node[0]
NODE_LINK = "node0"
QUEUE = 100
POLICY_CHAIN = "XPYD-POLICY"
ALIAS = "testcluster:"
FOLDER_LIMIT = 70
"""Characters; sockets below the folder must stay under the kernel's 108."""
_NODE_RUN_MIB = 256


def node_prefix(folder: Folder) -> tuple[str, ...]:
    """Put before a command, runs it on the node. The process keeps its id."""
    where = folder / "node"
    return ("nsenter", f"--net={where}/ns/net", f"--mount={where}/ns/mnt", "--")


def check(folder: Folder, addresses: Addresses = DUAL) -> None:
    """Whether a full cluster can be here at all.

    Raises:
        Missing: no root.
        ClusterError: the folder's path is unfit.
        InUse: another full cluster runs, or the host uses the addresses.
    """
    if os.geteuid() != 0:
        raise Missing("a full cluster needs root: it makes namespaces and control groups")
    if len(str(folder.path)) > FOLDER_LIMIT:
        raise ClusterError(f"{folder.path} has more than {FOLDER_LIMIT} characters; sockets below it would be too long")
    if folder.path.is_relative_to("/run") or folder.path.is_relative_to("/var"):
        raise ClusterError(f"{folder.path}: the node has a /run and a /var of its own; name a folder elsewhere")
    for link in sorted(remains.LINKS.iterdir()):
        alias = _alias(link)
        if alias.startswith(ALIAS) and alias != ALIAS + str(folder.path):
            raise InUse(f"a full cluster runs already, in {alias.removeprefix(ALIAS)}; take it down: a host can have one")
    ours = [ipaddress.ip_network(each) for each in (*addresses.node_ranges, *addresses.pods, *addresses.services)]
    routes = [route for family in _families(addresses)
              for route in json.loads(_run("ip", "-json", family, "route", "show", "table", "all") or "[]")]
    for route in routes:
        if route.get("dev") == remains.short_name(folder) or route["dst"] == "default":
            continue
        taken = ipaddress.ip_network(route["dst"], strict=False)
        if any(taken.version == each.version and taken.overlaps(each) for each in ours):
            raise InUse(f"the host uses {taken} ({route.get('dev')}); a full cluster needs {', '.join(map(str, ours))}")


def ensure(folder: Folder, addresses: Addresses = DUAL) -> None:
    """Make the node's namespaces and control groups. Where only a part of them is left, all is made anew.

    Raises:
        CommandFailed: the kernel refuses.
    """
    done = folder / "node" / "made"
    whole = [folder / "node/ns/net", folder / "node/ns/mnt"]
    if done.exists() and set(whole) <= set(remains.mounts(folder)) and remains.links(folder):
        return
    done.unlink(missing_ok=True)
    remains.clear(folder)
    _make_namespaces(folder)
    _make_links(folder, addresses)
    _make_cgroups(folder)
    done.touch()


def _make_namespaces(folder: Folder) -> None:
    """The mount namespace cannot be kept on a shared mount, so the folder of both files is mounted on itself."""
    kept, var = folder.sub("node/ns"), folder.sub("node/var")
    for name in ("net", "mnt"):
        (kept / name).touch()
    _run("mount", "--bind", str(kept), str(kept))
    _run("mount", "--make-private", str(kept))
    _run("unshare", f"--net={kept}/net", "true")
    _run("unshare", f"--mount={kept}/mnt", "--propagation", "slave", "true")
    for name in ("lib", "log", "tmp", "cache"):
        (var / name).mkdir(exist_ok=True)
    if not (var / "run").is_symlink():
        (var / "run").symlink_to("/run")
    _on_node(folder, "mount", "-t", "tmpfs", "-o", f"mode=755,size={_NODE_RUN_MIB}m", "node-run", "/run")
    _on_node(folder, "mount", "--bind", str(var), "/var")
    # Volumes may ask for propagation between the node and its containers.
    _on_node(folder, "mount", "--make-rshared", "/")


def _make_links(folder: Folder, addresses: Addresses) -> None:
    outside = remains.short_name(folder)
    _on_node(folder, "ip", "link", "set", "lo", "up")
    _on_node(folder, "ip", "link", "add", NODE_LINK, "type", "veth", "peer", "name", outside, "netns", str(os.getpid()))
    _run("ip", "link", "set", outside, "alias", ALIAS + str(folder.path))
    _on_node(folder, "ip", "link", "set", NODE_LINK, "up")
    _run("ip", "link", "set", outside, "up")
    for host, node, inside in zip(addresses.host, addresses.node, addresses.node_ranges, strict=True):
        bits = ipaddress.ip_network(inside).prefixlen
        at_once = () if is_v4(node) else ("nodad",)  # nobody else has it, and what binds to it must not wait
        _on_node(folder, "ip", "address", "add", f"{node}/{bits}", "dev", NODE_LINK, *at_once)
        _run("ip", "address", "add", f"{host}/{bits}", "dev", outside, *at_once)
    for host, node, pods, services in zip(addresses.host, addresses.node, addresses.pods, addresses.services, strict=True):
        family = "-4" if is_v4(node) else "-6"
        _on_node(folder, "ip", family, "route", "add", "default", "via", host, "dev", NODE_LINK)
        for wanted in (pods, services):
            _run("ip", family, "route", "add", wanted, "via", node, "dev", outside)
        _make_rules(folder, pods)


def _make_rules(folder: Folder, pods: str) -> None:
    """The node routes for its pods. New connections from and to them wait for the verdict of netpol; while it does not run
    there are none.
    """
    tables = "iptables" if is_v4(pods) else "ip6tables"
    routes = "net.ipv4.ip_forward" if is_v4(pods) else "net.ipv6.conf.all.forwarding"
    _on_node(folder, "sysctl", "-q", "-w", f"{routes}=1", f"net.bridge.bridge-nf-call-{tables}=1")
    _on_node(folder, tables, "-w", "-N", POLICY_CHAIN)
    _on_node(folder, tables, "-w", "-A", POLICY_CHAIN, "-m", "conntrack", "--ctstate", "NEW", "-j", "NFQUEUE",
             "--queue-num", str(QUEUE))
    for direction in ("-s", "-d"):
        _on_node(folder, tables, "-w", "-A", "FORWARD", direction, pods, "-j", POLICY_CHAIN)


def _families(addresses: Addresses) -> tuple[str, ...]:
    return tuple("-4" if is_v4(node) else "-6" for node in addresses.node)


def _make_cgroups(folder: Folder) -> None:
    """The kubelet wants its root group in every hierarchy; in the old cpuset one a group starts without processors."""
    for root in remains.hierarchies():
        group = root / remains.short_name(folder)
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (group / name).exists() and not (group / name).read_text().strip() and (root / name).exists():
                (group / name).write_text((root / name).read_text())


def _alias(link: Path) -> str:
    try:
        return (link / "ifalias").read_text().strip()
    except OSError:
        return ""


def _on_node(folder: Folder, *command: str) -> None:
    _run(*node_prefix(folder), *command)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
