"""What the doctor has to say, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

SCHEMA: Final = 1
"""Of the JSON. It grows by new checks, new facts and new keys; a change of what is there makes it 2."""


class State(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """It works, and costs speed or room, or will be in the way one day."""
    MISSING = "missing"
    """It does not work on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and how it ended.

    Args:
        name: of the check, the same in every release.
        group: ``memory``, ``host``, ``ucx``: where it is shown.
        found: what is there, in a few words.
        advice: what to do; empty where nothing need be done.
        is_needed: without it no cluster works here.
        facts: the same for programs: JSON values.
    """

    name: str
    group: str
    state: State
    found: str
    advice: str = ""
    is_needed: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_failure(self) -> bool:
        """Whether it is needed and is not there."""
        return self.is_needed and self.state is State.MISSING

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "name": self.name,
            "group": self.group,
            "state": self.state.value,
            "needed": self.is_needed,
            "found": self.found,
            "advice": self.advice,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Served:
    """What would carry a link from here to a peer.

    Args:
        place: ``same host`` or ``another host``.
        transport: its name; None where nothing would.
        reason: why this one, and why no other.
    """

    place: str
    transport: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found."""

    findings: tuple[Finding, ...]
    links: tuple[Served, ...]
    versions: Mapping[str, str]

    @property
    def is_well(self) -> bool:
        """Whether all that is needed is there."""
        return not any(finding.is_failure for finding in self.findings)

    def needing(self, names: Iterable[str]) -> Diagnosis:
        """Return the same with these checks counted as needed."""
        wanted = set(names)
        findings = (replace(found, is_needed=found.is_needed or found.name in wanted) for found in self.findings)
        return Diagnosis(tuple(findings), self.links, self.versions)

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object, `SCHEMA` says of which shape."""
        return {
            "schema": SCHEMA,
            "ok": self.is_well,
            "versions": dict(self.versions),
            "checks": [finding.as_json() for finding in self.findings],
            "links": [
                {"place": served.place, "transport": served.transport, "reason": served.reason} for served in self.links
            ],
        }


def failed_check(name: str, group: str, error: Exception, *, state: State, is_needed: bool = False) -> Finding:
    """Return the finding that a check has failed itself."""
    return Finding(
        name=name,
        group=group,
        state=state,
        found=f"this check failed: {type(error).__name__}: {error}",
        advice="please report it, with what `kvlink doctor --json` says",
        is_needed=is_needed,
    )
