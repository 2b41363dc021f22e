"""RDMA devices, UCX, and which transport would therefore carry a link."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

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
            if port.isdigit()
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


def choose(findings: Sequence[Finding]) -> tuple[Served, ...]:
    """Say what would carry a link to a process of this host, and to one of another host."""
    by_name = {finding.name: finding for finding in findings}
    return (_same_host(by_name), _another_host(by_name))


def _same_host(by_name: Mapping[str, Finding]) -> Served:
    for name in ("pool-memory", "descriptor-passing"):
        if by_name[name].state is not State.OK:
            return Served("same host", None, f"no shared memory: {by_name[name].found}")
    reach = "registered memory too" if by_name["registered-memory"].state is State.OK else "registered memory is staged"
    return Served("same host", "shm", f"shared memory works here; {reach}")


def _another_host(by_name: Mapping[str, Finding]) -> Served:
    return Served("another host", None, f"no transport to other hosts: {by_name['rdma-devices'].found}")


def _describe(device: Mapping[str, Any]) -> str:
    ports = ", ".join(
        " ".join(filter(None, [f"port {port['port']}", port["state"], port["link_layer"], port["rate"]]))
        for port in device["ports"]
    )
    return f"{device['name']}: {ports or 'no port'}"


def _after_colon(text: str | None) -> str | None:
    return None if text is None else text.rpartition(":")[2].strip()
