"""``kvlink doctor``: its arguments, the examination, and how it is shown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvlink.doctor.children import Answer, run_probes
from kvlink.doctor.fabric import choose, examine_devices, examine_ucx
from kvlink.doctor.findings import Diagnosis, Finding, State
from kvlink.doctor.host import Host, examine_host
from kvlink.doctor.settings import read_settings
from kvlink.doctor.sharing import examine_sharing
from kvlink.wire import PROTOCOL_VERSION

Probe = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Answer]]

_TITLES: Final = {"memory": "shared memory", "host": "this host", "ucx": "other hosts"}


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this host, show what was found, and return 0, or 1 where something that is needed is missing."""
    parser = argparse.ArgumentParser(
        prog="kvlink doctor",
        description="Say what this host can do for kvlink and what to do about what it cannot. "
        "The exit status is 1 where something needed is missing.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="CHECK",
        help="count this check as needed, e.g. rdma-devices; may be given several times",
    )
    parser.add_argument(
        "--ucx-library", metavar="PATH", help="the libucp to look at; default: the one kvlink would use"
    )
    arguments = parser.parse_args(argv)
    diagnosis = examine(ucx_library=arguments.ucx_library)
    unknown = set(arguments.need) - {finding.name for finding in diagnosis.findings}
    if unknown:
        names = ", ".join(finding.name for finding in diagnosis.findings)
        parser.error(f"there is no check {', '.join(sorted(unknown))}; checks here are {names}")
    diagnosis = diagnosis.needing(arguments.need)
    if arguments.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print(show(diagnosis))
    return 0 if diagnosis.is_well else 1


def examine(
    host: Host | None = None,
    *,
    ucx_library: str | None = None,
    environ: Mapping[str, str] | None = None,
    probe: Probe = run_probes,
) -> Diagnosis:
    """Look at everything. Takes a second or two; nothing on the host is changed, and no failure of a check raises.

    Args:
        host: where to read; None for this host.
        ucx_library: the libucp to look at; None for the one that a cluster would use.
        environ: where settings are read from; None for this process's environment.
        probe: runs probes, given with their arguments.
    """
    host = host or Host()
    config, settings = read_settings(os.environ if environ is None else environ)
    library = ucx_library or config.ucx.library_path
    ucx = () if library is None else (library,)
    answers = probe({"sharing": (), "foreign": (), "sockets": (), "ucx": ucx})
    devices = tuple(examine_devices(host))
    findings = (
        *examine_sharing(host, answers),
        settings,
        *examine_host(host),
        *devices,
        *examine_ucx(answers["ucx"], has_cards=devices[0].state is not State.MISSING),
    )
    return Diagnosis(findings, choose(findings, config), _versions())


def show(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as text for people."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines = [", ".join(f"{name} {number}" for name, number in diagnosis.versions.items())]
    for group, title in _TITLES.items():
        lines += ["", title]
        for finding in diagnosis.findings:
            if finding.group == group:
                lines.append(f"  {_label(finding):<8} {finding.name:<{width}}  {finding.found}")
                if finding.advice:
                    lines.append(f"  {'':<8} {'':<{width}}  -> {finding.advice}")
    lines += ["", "what would carry a link"]
    for served in diagnosis.links:
        lines.append(f"  to {served.place}: {served.transport or 'nothing'} ({served.reason})")
    failed = [finding.name for finding in diagnosis.findings if finding.is_failure]
    lines += ["", "needed and missing: " + ", ".join(failed) if failed else "all that is needed is there"]
    return "\n".join(lines)


def _label(finding: Finding) -> str:
    if finding.state is State.MISSING and not finding.is_needed:
        return "none"  # an option that nobody has asked for
    return "MISSING" if finding.is_failure else finding.state.value


def _versions() -> dict[str, str]:
    versions = {"kvlink": _version_of("kvlink"), "protocol": str(PROTOCOL_VERSION)}
    versions["python"] = platform.python_version()
    versions |= {name: _version_of(name) for name in ("numpy", "anyio", "msgspec")}
    system = os.uname()
    versions["kernel"] = f"{system.sysname} {system.release} {system.machine}"
    return versions


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    sys.exit(main())
