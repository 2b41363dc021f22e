"""What the probes of memory and sockets mean for a cluster on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvlink.doctor.children import Answer
from kvlink.doctor.findings import Finding, State
from kvlink.doctor.host import Host

_NO_ANSWER: Final = "the probe failed: "


def examine_sharing(host: Host, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Yield the findings on shared memory, from what the probes ``sharing``, ``foreign`` and ``sockets`` answered."""
    sharing = answers["sharing"]
    yield _step(
        sharing,
        "segment",
        name="pool-memory",
        works="a memfd, sealed and reserved, was made",
        advice="a pool needs memfd_create (Linux 3.17) and memory to reserve: see the finding on memory, and let the "
        "sandbox's seccomp profile allow memfd_create and fallocate",
        is_needed=True,
    )
    yield _step(
        sharing,
        "passing",
        name="descriptor-passing",
        works="a descriptor went over an abstract Unix socket, and the memory behind it was mapped",
        advice="links on one host hand descriptors over abstract Unix sockets: both processes must be in one network "
        "namespace (containers of one pod are), and the sandbox must allow SCM_RIGHTS",
        is_needed=True,
    )
    yield _step(
        sharing,
        "pidfd",
        name="process-death",
        works="the end of a process is seen at once (pidfd)",
        advice="without pidfd_open (Linux 5.3) a peer's end is seen when its connection ends, and memory that it may "
        "still write into is held back for longer",
        state=State.WARN,
    )
    yield _foreign(host, answers["foreign"])
    yield _sockets(answers["sockets"])


def _step(
    answer: Answer,
    step: str,
    *,
    name: str,
    works: str,
    advice: str,
    state: State = State.MISSING,
    is_needed: bool = False,
) -> Finding:
    outcome = _NO_ANSWER + answer.failure if answer.failure else str(answer.facts.get(step, "it did not say"))
    return Finding(
        name=name,
        group="memory",
        state=state if outcome else State.OK,
        found=outcome or works,
        advice=advice if outcome else "",
        is_needed=is_needed,
        facts={"error": outcome},
    )


def _foreign(host: Host, answer: Answer) -> Finding:
    """Judge whether peers can copy memory that a program has allocated itself: ``process_vm_readv``."""
    yama = host.read("proc/sys/kernel/yama/ptrace_scope")
    seccomp = _status(host, "Seccomp")
    plain = _NO_ANSWER + answer.failure if answer.failure else str(answer.facts.get("plain", ""))
    permitted = plain if answer.failure else str(answer.facts.get("permitted", ""))
    facts = {"error": plain, "error_when_permitted": permitted, "ptrace_scope": yama, "seccomp": seccomp}
    if not plain:
        state, found, advice = State.OK, "another process could copy memory of this one (process_vm_readv)", ""
    elif not permitted:
        state, found = State.WARN, f"only with permission: ptrace_scope is {yama}"
        advice = (
            "registered memory is staged, at half the speed, unless its owner sets "
            "ClusterConfig(permit_peer_access='peer'); or `sysctl kernel.yama.ptrace_scope=0`"
        )
    else:
        state, found = State.WARN, f"refused: {plain}"
        why = []
        if yama in ("2", "3"):
            why.append(f"ptrace_scope is {yama}: `sysctl kernel.yama.ptrace_scope=1`")
        if seccomp == "2":
            why.append("a seccomp filter is in force: let it allow process_vm_readv and process_vm_writev")
        why.append("peers must run as one user and see each other's process ids")
        advice = "registered memory is staged, at half the speed; pools are not concerned. " + "; ".join(why)
    return Finding(name="registered-memory", group="memory", state=state, found=found, advice=advice, facts=facts)


def _sockets(answer: Answer) -> Finding:
    ipv4 = _NO_ANSWER + answer.failure if answer.failure else str(answer.facts.get("ipv4", ""))
    ipv6 = ipv4 if answer.failure else str(answer.facts.get("ipv6", ""))
    facts = {"error": ipv4, "error_ipv6": ipv6}
    if not ipv4:
        with_v6 = "IPv4 and IPv6" if not ipv6 else "IPv4"
        return Finding(
            name="loopback", group="host", state=State.OK, found=f"listens on loopback, {with_v6}", facts=facts
        )
    return Finding(
        name="loopback",
        group="host",
        state=State.WARN,
        found=f"loopback does not work: {ipv4}",
        advice="listen elsewhere: listen='unix:/path', or bring loopback up: `ip link set lo up`",
        facts=facts,
    )


def _status(host: Host, name: str) -> str | None:
    for line in (host.read("proc/self/status") or "").splitlines():
        head, _, rest = line.partition(":")
        if head == name:
            return rest.strip()
    return None
