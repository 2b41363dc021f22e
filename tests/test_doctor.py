"""The doctor: what it finds on this machine, what it says of hosts that lack something, and that nothing stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from kvlink import cli
from kvlink.doctor import host as host_checks
from kvlink.doctor import probes
from kvlink.doctor.children import Answer, run_probes
from kvlink.doctor.command import examine, show
from kvlink.doctor.fabric import rdma_devices
from kvlink.doctor.findings import Diagnosis, Finding, State
from kvlink.doctor.host import Host, show_nbytes
from kvlink.transports.ucx.library import Device, UcxReport
from tests.support import sandbox
from tests.support.peer import PATHS

WELL: Final[dict[str, Answer]] = {
    "sharing": Answer({"segment": "", "passing": "", "pidfd": ""}),
    "foreign": Answer({"plain": "", "permitted": ""}),
    "sockets": Answer({"ipv4": "", "ipv6": ""}),
    "ucx": Answer(
        asdict(
            UcxReport(
                version="1.22.0",
                path="/usr/lib/libucp.so.0",
                origin="system",
                configure_line="--with-verbs",
                has_verbs=True,
                is_one_sided=True,
                devices=(Device("rc_mlx5", "mlx5_0:1"), Device("cma", "memory")),
            )
        )
    ),
}

# A host as the kernel writes it: the files that the doctor reads, and nothing else.
PLAIN: Final[dict[str, str]] = {
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\nHugePages_Free: 0\n"
    "Hugepagesize: 2048 kB\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max open files            8192                 1048576              files\n"
    "Max locked memory         8388608              8388608              bytes\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Name:\tpython\nSeccomp:\t0\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
}

CARD: Final[dict[str, str]] = {
    "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002\n",
    "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "dev/infiniband/uverbs0": "",
}


def host_of(root: Path, *layers: Mapping[str, str], without: str = "nothing") -> Host:
    """Write a host's files below `root`; later ones replace earlier ones, and those that begin with `without` go."""
    files = {name: text for layer in layers for name, text in layer.items() if not name.startswith(without)}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


def diagnose(host: Host | None = None, environ: Mapping[str, str] | None = None, /, **answers: Answer) -> Diagnosis:
    """Examine a host whose probes go well, but for those given, with these variables and no others."""

    def probe(probes: Mapping[str, Sequence[str]]) -> Mapping[str, Answer]:
        return {name: {**WELL, **answers}[name] for name in probes}

    return examine(host, environ=environ or {}, probe=probe)


def ucx(**changes: Any) -> Answer:
    """Return what the probe of UCX says of a good library, but for `changes`."""
    return Answer({**WELL["ucx"].facts, **changes})


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    """Return the finding of that name."""
    return next(found for found in diagnosis.findings if found.name == name)


def run_doctor(*, expected_status: int, inside: Sequence[str] = ()) -> dict[str, Any]:
    """Run ``kvlink doctor --json`` in a process of its own, inside another program if one is given."""
    command = [*inside, sys.executable, "-W", "error", "-m", "kvlink", "doctor", "--json"]
    done = subprocess.run(command, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (expected_status, ""), done.stdout
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_this_machine_is_well() -> None:
    """`kvlink doctor` in a process of its own really does what it says, ends with 0 and writes nothing else."""
    said = run_doctor(expected_status=0)
    states = {check["name"]: check["state"] for check in said["checks"]}
    assert said["ok"] is True
    assert states["pool-memory"] == states["descriptor-passing"] == "ok"
    assert said["links"][0]["transport"] == "shm"


@pytest.mark.skipif(not sandbox.IS_POSSIBLE, reason="the sandbox is for x86-64")
def test_a_sandbox_is_seen_by_trying() -> None:
    """Calls that a seccomp filter refuses are found missing, each by its check, and the status tells."""
    refused = [sandbox.MEMFD_CREATE, sandbox.PROCESS_VM_READV, sandbox.PIDFD_OPEN]
    inside = [sys.executable, "-m", "tests.support.sandbox", *map(str, refused), "--"]
    said = run_doctor(expected_status=1, inside=inside)
    states = {check["name"]: check["state"] for check in said["checks"]}
    assert said["ok"] is False
    assert (states["pool-memory"], states["descriptor-passing"]) == ("missing", "missing")
    assert (states["process-death"], states["registered-memory"]) == ("warn", "warn")
    assert states["loopback"] == "ok"
    assert said["links"][0]["transport"] is None


def test_shape_of_the_json_is_kept(tmp_path: Path) -> None:
    """A program that reads schema 1 finds every key and every check where it was."""
    said = json.loads(json.dumps(diagnose(host_of(tmp_path, PLAIN, CARD)).as_json()))
    assert said["schema"] == 1
    assert {"schema", "ok", "versions", "checks", "links"} <= set(said)
    assert {"kvlink", "protocol", "python", "numpy", "anyio", "msgspec", "kernel"} <= set(said["versions"])
    names = {check["name"] for check in said["checks"]}
    assert names >= {
        *("pool-memory", "descriptor-passing", "process-death", "registered-memory", "loopback", "memory", "cores"),
        *("open-files", "locked-memory", "huge-pages", "transparent-huge-pages", "numa", "event-loops"),
        *("rdma-devices", "rdma-access", "ucx-library", "ucx-transports"),
    }
    assert len(names) == len(said["checks"])
    for check in said["checks"]:
        assert set(check) == {"name", "group", "state", "needed", "found", "advice", "facts"}
        assert check["state"] in {"ok", "warn", "missing"}
        assert check["found"]
        assert check["advice"] or check["state"] == "ok"
    assert [link["place"] for link in said["links"]] == ["same host", "another host"]


def test_text_shows_every_check_and_every_advice(tmp_path: Path) -> None:
    """Nothing that was found is left out for people."""
    diagnosis = diagnose(host_of(tmp_path, PLAIN, CARD), foreign=Answer({"plain": "no", "permitted": "no"}))
    text = show(diagnosis)
    for found in diagnosis.findings:
        assert found.name in text
        assert found.found in text
        assert found.advice in text


# The probes' answer or the host's files that lack something; the check that says so, its state, words in it, and
# whether the doctor's status tells.
LACKS: Final[dict[str, tuple[dict[str, Any], dict[str, str], str, State, str, bool]]] = {
    "no memfd": (
        {"sharing": Answer({"segment": "Operation not permitted", "passing": "x", "pidfd": ""})},
        {},
        *("pool-memory", State.MISSING, "not permitted", True),
    ),
    "no passing": (
        {"sharing": Answer({"segment": "", "passing": "refused", "pidfd": ""})},
        {},
        *("descriptor-passing", State.MISSING, "network namespace", True),
    ),
    "no pidfd": (
        {"sharing": Answer({"segment": "", "passing": "", "pidfd": "no pidfd_open"})},
        {},
        *("process-death", State.WARN, "Linux 5.3", False),
    ),
    "a probe that crashes": (
        {"sharing": Answer({}, "its process was ended by SIGSEGV")},
        {},
        *("pool-memory", State.MISSING, "SIGSEGV", True),
    ),
    "Yama": (
        {"foreign": Answer({"plain": "Operation not permitted", "permitted": ""})},
        {"proc/sys/kernel/yama/ptrace_scope": "1\n"},
        *("registered-memory", State.WARN, "permit_peer_access", False),
    ),
    "Yama for good": (
        {"foreign": Answer({"plain": "Operation not permitted", "permitted": "Operation not permitted"})},
        {"proc/sys/kernel/yama/ptrace_scope": "2\n"},
        *("registered-memory", State.WARN, "ptrace_scope=1", False),
    ),
    "seccomp": (
        {"foreign": Answer({"plain": "Function not implemented", "permitted": "Function not implemented"})},
        {"proc/self/status": "Seccomp:\t2\n"},
        *("registered-memory", State.WARN, "seccomp filter", False),
    ),
    "no loopback": (
        {"sockets": Answer({"ipv4": "Cannot assign requested address", "ipv6": "x"})},
        {},
        *("loopback", State.WARN, "unix:", False),
    ),
    "few descriptors": (
        {},
        {"proc/self/limits": "Max open files            1024                 4096                 files\n"},
        *("open-files", State.WARN, "about 96 links", False),
    ),
    "little memory": (
        {},
        {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 262144 kB\n"},
        *("memory", State.WARN, "256 MiB", False),
    ),
    "a small control group": (
        {},
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": str(2**29),
            "sys/fs/cgroup/box/memory.current": "0",
        },
        *("memory", State.WARN, "control group", False),
    ),
    "locked memory beside a card": (
        {},
        CARD,
        *("locked-memory", State.WARN, "ulimit -l unlimited", False),
    ),
    "a card without a cable": (
        {},
        {**CARD, "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"},
        *("rdma-devices", State.WARN, "no port is active", False),
    ),
    "no card": ({}, {}, "rdma-devices", State.MISSING, "network card", False),
    "no UCX": (
        {"ucx": ucx(problem="there is no libucp", remedy="pip install 'kvlink[ucx]'")},
        {},
        *("ucx-library", State.MISSING, "pip install", False),
    ),
    "an old UCX": ({"ucx": ucx(is_one_sided=False)}, {}, "ucx-library", State.WARN, "1.19 or newer", False),
    "a UCX that is blind to the card": (
        {"ucx": ucx(has_verbs=False, remedy="this UCX cannot use mlx5_0: install one with verbs")},
        CARD,
        *("ucx-transports", State.WARN, "install one with verbs", False),
    ),
    "no huge pages": ({}, {}, "huge-pages", State.MISSING, "vm.nr_hugepages", False),
    "huge pages all in use": (
        {},
        {"proc/meminfo": "MemAvailable: 4194304 kB\nHugePages_Total: 8\nHugePages_Free: 0\nHugepagesize: 2048 kB\n"},
        *("huge-pages", State.WARN, "all are in use", False),
    ),
}


@pytest.mark.parametrize("case", LACKS)
def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path, case: str) -> None:
    """A host that lacks one thing: the right check says so and what to do; only what is needed makes it unwell."""
    answers, files, name, state, words, is_failure = LACKS[case]
    diagnosis = diagnose(host_of(tmp_path, PLAIN, files), **answers)
    found = finding(diagnosis, name)
    assert found.state is state
    assert words in f"{found.found} {found.advice}"
    assert found.advice
    assert diagnosis.is_well is not is_failure


# What the host has besides PLAIN, what UCX says, and what would then carry a link to another host, with words of why.
CHOICES: Final[dict[str, tuple[dict[str, str], Answer, dict[str, str], str | None, str]]] = {
    "all is there": (CARD, ucx(), {}, "ucx", "UCX 1.22.0 over mlx5_0:1"),
    "no card": ({}, ucx(), {}, None, "rdma-devices: none"),
    "no library": (CARD, ucx(problem="there is no libucp", remedy="install"), {}, None, "there is no libucp"),
    "the wheel": (CARD, ucx(has_verbs=False), {}, None, "built without RDMA"),
    "UCX crashes": (CARD, Answer({}, "its process was ended by SIGSEGV"), {}, None, "SIGSEGV"),
    "shm alone": (CARD, ucx(), {"KVLINK_TRANSPORTS": "shm"}, None, "the settings allow shm only"),
    "TCP": ({}, ucx(), {"KVLINK_TRANSPORTS": "shm,ucx", "KVLINK_UCX_ALLOW_TCP": "yes"}, "ucx", "over TCP, for trials"),
    "TCP, UCX not asked for": ({}, ucx(), {"KVLINK_UCX_ALLOW_TCP": "yes"}, None, "rdma-devices: none"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_carries_a_link_is_told_with_the_reason(tmp_path: Path, case: str) -> None:
    """Another host is reached by UCX over RDMA, over TCP if that is asked for, or not, and the obstacle is named."""
    files, answer, environ, transport, words = CHOICES[case]
    here, there = diagnose(host_of(tmp_path, PLAIN, files), environ, ucx=answer).links
    assert here.transport == "shm"
    assert (there.place, there.transport) == ("another host", transport)
    assert words in there.reason


NO_PASSING: Final = Answer({"segment": "", "passing": "refused", "pidfd": ""})
NO_UCX: Final = ucx(problem="there is no libucp")

# The settings, what fails, and what then carries a link on this host.
HERE: Final[dict[str, tuple[str | None, dict[str, Answer], str | None]]] = {
    "all is well": (None, {}, "shm"),
    "UCX is asked for": ("ucx", {}, "ucx"),
    "UCX is asked for and is not there": ("ucx", {"ucx": NO_UCX}, None),
    "either, UCX first": ("ucx,shm", {"ucx": NO_UCX}, "shm"),
    "no descriptors can be passed": (None, {"sharing": NO_PASSING}, "ucx"),
    "nothing works": (None, {"sharing": NO_PASSING, "ucx": NO_UCX}, None),
}


@pytest.mark.parametrize("case", HERE)
def test_what_carries_a_link_on_this_host(tmp_path: Path, case: str) -> None:
    """The first transport of the settings that works is named; where none does, each says why."""
    transports, answers, expected = HERE[case]
    environ = {} if transports is None else {"KVLINK_TRANSPORTS": transports}
    here, _ = diagnose(host_of(tmp_path, PLAIN), environ, **answers).links
    assert here.transport == expected
    assert here.reason


def test_settings_of_the_environment_are_looked_at(tmp_path: Path) -> None:
    """A value that no cluster takes makes the host unwell, a name that no setting has is pointed out."""
    host = host_of(tmp_path, PLAIN)
    found = finding(diagnose(host, {"KVLINK_LIVENESS_S": "soon"}), "settings")
    assert (found.state, found.is_failure) == (State.MISSING, True)
    assert "KVLINK_LIVENESS_S" in found.found
    found = finding(diagnose(host, {"KVLINK_TRANSPORT": "ucx", "KVLINK_VENV": "x"}), "settings")
    assert (found.state, found.facts["unknown"]) == (State.WARN, ["KVLINK_TRANSPORT"])
    found = finding(diagnose(host, {"KVLINK_LIVENESS_S": "3", "KVLINK_UCX_RAILS": "2"}), "settings")
    assert (found.state, found.facts["unknown"]) == (State.OK, [])


def test_the_library_of_the_settings_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    """``KVLINK_UCX_LIBRARY_PATH`` is what clusters will open; an argument goes before it."""
    asked: list[Sequence[str]] = []

    def probe(probes: Mapping[str, Sequence[str]]) -> Mapping[str, Answer]:
        asked.append(probes["ucx"])
        return WELL

    host, environ = host_of(tmp_path, PLAIN), {"KVLINK_UCX_LIBRARY_PATH": "/opt/libucp.so"}
    examine(host, environ=environ, probe=probe)
    examine(host, environ=environ, ucx_library="/mine", probe=probe)
    assert asked == [("/opt/libucp.so",), ("/mine",)]


def test_a_card_that_the_container_may_not_open(tmp_path: Path) -> None:
    """The device is in /sys and its node is not in /dev: the usual slip with containers is named."""
    diagnosis = diagnose(host_of(tmp_path, PLAIN, CARD, without="dev/"))
    assert finding(diagnosis, "rdma-access").state is State.MISSING
    assert "--device=/dev/infiniband" in finding(diagnosis, "rdma-access").advice


def test_devices_are_read_as_the_kernel_describes_them(tmp_path: Path) -> None:
    """Name, node, firmware and ports, as numbers where they are numbers."""
    port = {"port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)"}
    assert rdma_devices(host_of(tmp_path, CARD)) == [
        {"name": "mlx5_0", "numa_node": 1, "firmware": "28.39.1002", "ports": [port]}
    ]


def test_an_empty_host_is_no_reason_to_fail(tmp_path: Path) -> None:
    """Without /proc, without /sys, without an answer of any probe, there still is a diagnosis."""
    silent = dict.fromkeys(WELL, Answer({}, "did not answer"))
    diagnosis = diagnose(Host(tmp_path / "nothing"), **silent)
    assert not diagnosis.is_well
    assert diagnosis.links[0].transport is None
    assert show(diagnosis)


def test_strange_files_are_no_reason_to_fail(tmp_path: Path) -> None:
    """Files with other things in them than they should have are as good as none."""
    rubbish = dict.fromkeys(PLAIN, "\x00 [ : 7 \n\n:::\nMax open files\nMemAvailable: x\nSeccomp\n")
    assert show(diagnose(host_of(tmp_path, rubbish)))


def test_a_check_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the doctor's own is told under the check's name, and the other checks are made."""

    def numa(host: Host) -> Finding:
        raise ZeroDivisionError("a kernel that nobody thought of")

    checks = tuple(numa if check.__name__ == "numa" else check for check in host_checks.EXAMINATIONS)
    monkeypatch.setattr(host_checks, "EXAMINATIONS", checks)
    diagnosis = diagnose(host_of(tmp_path, PLAIN))
    assert finding(diagnosis, "numa").state is State.WARN
    assert "a kernel that nobody thought of" in finding(diagnosis, "numa").found
    assert finding(diagnosis, "event-loops").state is State.OK
    assert diagnosis.is_well


def test_need_makes_an_option_a_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--need`` turns the status to 1 where that check is not satisfied; a check that does not exist is refused."""
    monkeypatch.setattr("kvlink.doctor.command.Host", lambda: host_of(tmp_path, PLAIN))
    defaults: dict[str, Any] = {"ucx_library": None, "environ": {}, "probe": lambda probes: WELL}
    monkeypatch.setattr(examine, "__kwdefaults__", defaults)
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--need", "rdma-devices"]) == 1
    assert cli.main(["doctor", "--need", "memory"]) == 0
    with pytest.raises(SystemExit) as refused:
        cli.main(["doctor", "--need", "luck"])
    assert refused.value.code == 2


def test_a_probe_that_dies_hangs_or_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed, silent for ever, raising or unknown: each is a failure in words, and the others answer all the same."""
    package = tmp_path / "sitecustomize.py"  # loaded by every child: it makes the probes what their names say
    package.write_text(
        "import os, sys, time\n"
        "name = sys.orig_argv[-1]\n"
        "if name == 'crash': os.abort()\n"
        "if name == 'hang': time.sleep(600)\n"
        "if name == 'noise': print('hello'); os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    started = time.monotonic()
    answers = {
        **run_probes({"hang": ()}, timeout_s=0.5),
        **run_probes({"sockets": (), "crash": (), "noise": (), "unknown": ()}),
    }
    assert time.monotonic() - started < 10
    assert answers["sockets"].facts["ipv4"] == ""
    assert answers["crash"].failure == "its process was ended by SIGABRT"
    assert answers["hang"].failure == "did not answer within 0.5 s"
    assert "status 0" in answers["noise"].failure
    assert answers["unknown"].failure == "KeyError: 'unknown'"


def test_without_processes_there_is_still_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no child can be started, that is what every probe says."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "no process could be started" in run_probes({"sharing": ()})["sharing"].failure


def test_what_the_host_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memfd that is refused, and a kernel without pidfd, come out as texts and not as exceptions."""

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.delattr(os, "pidfd_open")
    facts = probes.probe_sharing()
    assert "Operation not permitted" in facts["segment"]
    assert facts["passing"] == facts["segment"]
    assert "pidfd_open" in facts["pidfd"]


def test_bytes_are_shown_as_people_write_them() -> None:
    """Units of 1024, one digit where there is something to tell."""
    assert [show_nbytes(n) for n in (0, 512, 1536, 2**20, 3 * 2**29, 2**41)] == [
        *("0 B", "512 B", "1.5 KiB", "1 MiB", "1.5 GiB", "2 TiB")
    ]
