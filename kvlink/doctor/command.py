"""``kvlink doctor``: its arguments, the examination, and how it is shown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvlink.doctor.children import Answer, run_probes
from kvlink.doctor.fabric import choose, examine_devices, examine_ucx
from kvlink.doctor.findings import Diagnosis, Finding, Served, State, failed_check
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
    text = json.dumps(diagnosis.as_json(), indent=2) if arguments.json else show(diagnosis)
    return 0 if _say(text) and diagnosis.is_well else 1


def _say(text: str) -> bool:
    """Print as much as standard output takes: names of files and devices may be anything. Return whether it could."""
    if sys.stdout is None:
        return False
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as exc:
        with suppress(OSError):  # else the interpreter tries once more at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return isinstance(exc, BrokenPipeError)  # who has closed it has read enough
    return True


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
    devices = _guarded("rdma-devices", "ucx", lambda: examine_devices(host))
    has_cards = devices[0].state is not State.MISSING
    findings = (
        *_guarded("pool-memory", "memory", lambda: examine_sharing(host, answers), is_needed=True),
        settings,
        *examine_host(host),
        *devices,
        *_guarded("ucx-library", "ucx", lambda: examine_ucx(answers["ucx"], has_cards=has_cards)),
    )
    try:
        served = choose(findings, config)
    except Exception as exc:  # of a check that has failed, the others know nothing
        served = tuple(Served(place, None, f"not known: {exc!r}") for place in ("same host", "another host"))
    return Diagnosis(findings, served, _versions())


def _guarded(
    name: str, group: str, look: Callable[[], Iterable[Finding]], *, is_needed: bool = False
) -> tuple[Finding, ...]:
    """Return what a check finds; where it fails itself, that."""
    try:
        return tuple(look())
    except Exception as exc:  # a host that is unlike any that was thought of
        return (failed_check(name, group, exc, state=State.MISSING, is_needed=is_needed),)


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
    versions["kernel"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return versions


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    sys.exit(main())
