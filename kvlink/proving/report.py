"""The report: what was tried, between which machines, over what, and what that proves. Markdown, to be pasted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RDMA_LANES: Final = ("rc", "dc", "ud", "srd", "gga")
"""How UCX's names of transports over RDMA devices begin."""

MARKS: Final = {"passed": "passed", "failed": "**FAILED**", "skipped": "skipped"}


@dataclass(slots=True)
class Report:
    """What the prover has said so far.

    Attributes:
        about: both machines; empty until known.
        carrier: what carries the link; empty without one.
        outcomes: of the steps, in their order.
        doing: the step that is under way.
    """

    about: dict[str, Any] = field(default_factory=dict)
    carrier: dict[str, Any] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    doing: str = ""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take a line of the prover's."""
        content = {name: value for name, value in line.items() if name != "kind"}
        if line["kind"] == "outcome":
            self.outcomes.append(content)
            self.doing = ""
        elif line["kind"] == "starting":
            self.doing = content["name"]
        elif line["kind"] == "about":
            self.about = content
        elif line["kind"] == "carrier" and content:
            self.carrier = content

    def take_death(self, how: str) -> None:
        """The prover's process has ended before it was done."""
        self.outcomes.append(
            {"name": self.doing or "the prover", "state": "failed", "found": f"the prover's process {how}", "rows": []}
        )

    @property
    def has_passed(self) -> bool:
        """Whether every step was run and passed."""
        return bool(self.outcomes) and all(outcome["state"] == "passed" for outcome in self.outcomes)

    def verdict(self) -> str:
        """Say what is proved, and what is not."""
        if not self.carrier:
            return "Nothing is proved: the two sides were not linked."
        over, lanes = self.carrier["transport"], self.carrier.get("lanes", [])
        by = f"{over} ({', '.join(lanes)})" if lanes else "shared memory" if over == "shm" else over
        if not self.has_passed:
            return f"Not proved over {by}: see the steps that failed."
        fabric = [lane for lane in lanes if lane.startswith(RDMA_LANES)]
        if fabric:
            return f"Proved over RDMA: everything passed over UCX's {', '.join(fabric)}."
        return (
            f"Everything passed over {by}. That proves the checks, and nothing about RDMA: "
            "run the two sides on two machines that have it."
        )

    def render(self) -> str:
        """Return the report."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "## kvlink: proof of a fabric"
        yield ""
        yield self.verdict()
        yield ""
        for side, title in (("here", "proves"), ("there", "serves")):
            if side in self.about:
                yield from _machine(title, self.about[side])
        if self.about:
            yield f"- seed {self.about['seed']}, served at {self.about['address']}"
            yield ""
        yield "| step | outcome | found |"
        yield "|---|---|---|"
        for outcome in self.outcomes:
            yield f"| {outcome['name']} | {MARKS[outcome['state']]} | {_cell(outcome['found'])} |"
        for outcome in self.outcomes:
            if outcome["rows"]:
                yield ""
                yield from _table(outcome["rows"])


def _machine(title: str, side: Mapping[str, Any]) -> Iterator[str]:
    machine, doctor = side["machine"], side["doctor"]
    found = {check["name"]: check["found"] for check in doctor["checks"]}
    yield f"- {title}: {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}"
    yield f"  - kvlink {doctor['versions']['kvlink']} on Python {doctor['versions']['python']}"
    for name in ("rdma-devices", "ucx-library", "ucx-transports"):
        if name in found:
            yield f"  - {name}: {found[name]}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(rows[0])
    yield "| " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(str(row[name]) for name in names) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
