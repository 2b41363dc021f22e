"""RDMA devices, UCX, and which transport would therefore carry a link."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvlink.config import ClusterConfig
from kvlink.doctor.children import Answer
from kvlink.doctor.findings import Finding, Served, State
from kvlink.doctor.host import Host

_DEVICES: Final = "sys/class/infiniband"


def rdma_devices(host: Host) -> list[dict[str, Any]]:
    """Return each RDMA device's ports as the kernel describes them, for JSON."""
    devices = []
    for name in host.names(_DEVICES):
        home = f"{_DEVICES}/{name}"
        ports = [
            {
                "port": int(port),
                "state": _after_colon(host.read(f"{home}/ports/{port}/state")),
                "link_layer": host.read(f"{home}/ports/{port}/link_layer"),
                "rate": host.read(f"{home}/ports/{port}/rate"),
            }
            for port in host.names(f"{home}/ports")
            if port.isdecimal()
        ]
        node = host.read(f"{home}/device/numa_node")
        devices.append(
            {
                "name": name,
                "numa_node": int(node) if node and re.fullmatch(r"\d+", node) else None,
                "firmware": host.read(f"{home}/fw_ver"),
                "ports": ports,
            }
        )
    return devices


def examine_devices(host: Host) -> Iterator[Finding]:
    """Yield what there is of RDMA: the devices, and whether this process may open them."""
    devices = rdma_devices(host)
    if not devices:
        yield Finding(
            name="rdma-devices",
            group="ucx",
            state=State.MISSING,
            found="none under /sys/class/infiniband",
            advice="links to other hosts over RDMA need a network card that can do it, and its driver",
            facts={"devices": []},
        )
        return
    active = [f"{device['name']}:{port['port']}" for device in devices for port in device["ports"] if is_active(port)]
    shown = "; ".join(_describe(device) for device in devices)
    yield Finding(
        name="rdma-devices",
        group="ucx",
        state=State.OK if active else State.WARN,
        found=shown,
        advice="" if active else "no port is active: look at cable, switch and subnet manager (`ibstat`, `rdma link`)",
        facts={"devices": devices, "active_ports": active},
    )
    nodes = [name for name in host.names("dev/infiniband") if name.startswith("uverbs")]
    yield Finding(
        name="rdma-access",
        group="ucx",
        state=State.OK if nodes else State.MISSING,
        found=f"/dev/infiniband/{', '.join(nodes)}" if nodes else "the device has no /dev/infiniband/uverbs* here",
        advice="" if nodes else "load ib_uverbs (`modprobe ib_uverbs`), or give the container --device=/dev/infiniband",
        facts={"nodes": nodes},
    )


def is_active(port: Mapping[str, Any]) -> bool:
    """Whether a port of `rdma_devices` is up."""
    return bool(port["state"] == "ACTIVE")


def examine_ucx(answer: Answer, *, has_cards: bool) -> Iterator[Finding]:
    """Yield what the probe ``ucx`` found: the library, and what it can use.

    Args:
        has_cards: whether this host has RDMA devices: a UCX that cannot use them is then a fault.
    """
    facts = answer.facts
    remedy = str(facts.get("remedy", ""))
    problem = f"looking for it failed: {answer.failure}" if answer.failure else str(facts.get("problem", ""))
    if problem:
        yield Finding(
            name="ucx-library",
            group="ucx",
            state=State.MISSING,
            found=(problem.replace(remedy, "") if remedy else problem).rstrip(" :;"),
            advice=remedy or "run `ucx_info -v` to see whether this UCX works at all",
            facts=facts,
        )
        return
    is_old = not facts["is_one_sided"]
    yield Finding(
        name="ucx-library",
        group="ucx",
        state=State.WARN if is_old else State.OK,
        found=f"UCX {facts['version']} at {facts['path']} ({facts['origin']})",
        advice="on one host it serves reads by messages only, which needs the owner's help: take UCX 1.19 or newer"
        if is_old
        else "",
        facts={name: facts[name] for name in ("version", "path", "origin", "configure_line", "is_one_sided")},
    )
    names = sorted({str(device[0]) for device in facts["devices"]})
    is_blind = has_cards and not facts["has_verbs"]
    yield Finding(
        name="ucx-transports",
        group="ucx",
        state=State.WARN if is_blind or not names else State.OK,
        found=(", ".join(names) or "none") + ("" if facts["has_verbs"] else "; built without RDMA (verbs)"),
        advice=(remedy or "run `ucx_info -d` of this UCX to see why") if is_blind or not names else "",
        facts={"devices": facts["devices"], "has_verbs": facts["has_verbs"]},
    )


def choose(findings: Sequence[Finding], config: ClusterConfig) -> tuple[Served, ...]:
    """Say what would carry a link to a process of this host, and to one of another host, under these settings."""
    by_name = {finding.name: finding for finding in findings}
    return (_same_host(by_name, config), _another_host(by_name, config))


def _same_host(by_name: Mapping[str, Finding], config: ClusterConfig) -> Served:
    """The first of the transports in the settings that works here."""
    reasons = []
    for name in config.transports or ("shm", "ucx"):
        obstacle = _no_shm(by_name) if name == "shm" else _no_local_ucx(by_name)
        if obstacle:
            reasons.append(f"{name}: {obstacle}")
            continue
        if name == "shm":
            staged = not _works(by_name, "registered-memory")
            reasons.append(f"shared memory works here; registered memory {'is staged' if staged else 'too'}")
        elif config.transports is None:
            reasons.append("if it is asked for: ClusterConfig(transports=('ucx',))")
        else:
            reasons.append("the settings ask for it")
        return Served("same host", name, "; ".join(reasons))
    return Served("same host", None, "; ".join(reasons))


def _no_shm(by_name: Mapping[str, Finding]) -> str:
    for name in ("pool-memory", "descriptor-passing"):
        if not _works(by_name, name):
            return by_name[name].found
    return ""


def _no_local_ucx(by_name: Mapping[str, Finding]) -> str:
    """UCX also needs a pool; on one host it copies through the kernel, as registered memory is copied."""
    for name in ("pool-memory", "ucx-library", "registered-memory"):
        if by_name[name].state is not State.OK:
            return f"{name}: {by_name[name].found}"
    return ""


def _another_host(by_name: Mapping[str, Finding], config: ClusterConfig) -> Served:
    """RDMA, or TCP where somebody asks for it, or nothing: what is in the way, the first thing first."""
    if config.transports is not None and "ucx" not in config.transports:
        return Served("another host", None, f"the settings allow {', '.join(config.transports)} only")
    if by_name["ucx-library"].state is State.MISSING:
        return Served("another host", None, f"ucx-library: {by_name['ucx-library'].found}")
    version = by_name["ucx-library"].facts["version"]
    peer = "the peer needs the same major and minor version"
    for name in ("rdma-devices", "rdma-access", "ucx-transports"):
        found = by_name.get(name)  # there is nothing to open where there is no device
        is_blind = name == "ucx-transports" and not by_name[name].facts["has_verbs"]
        if found is not None and (found.state is not State.OK or is_blind):
            if config.ucx.allow_tcp and config.transports is not None:
                return Served("another host", "ucx", f"UCX {version} over TCP, for trials only; {peer}")
            return Served("another host", None, f"{name}: {found.found}")
    ports = ", ".join(by_name["rdma-devices"].facts["active_ports"])
    return Served("another host", "ucx", f"UCX {version} over {ports}; {peer}")


def _works(by_name: Mapping[str, Finding], name: str) -> bool:
    return by_name[name].state is State.OK


def _describe(device: Mapping[str, Any]) -> str:
    ports = ", ".join(
        " ".join(filter(None, [f"port {port['port']}", port["state"], port["link_layer"], port["rate"]]))
        for port in device["ports"]
    )
    return f"{device['name']}: {ports or 'no port'}"


def _after_colon(text: str | None) -> str | None:
    return None if text is None else text.rpartition(":")[2].strip()
