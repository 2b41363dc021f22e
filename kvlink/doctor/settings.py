"""The settings that clusters made by `ClusterConfig.from_environ` would have in this process's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from kvlink.config import ClusterConfig
from kvlink.doctor.findings import Finding, State
from kvlink.errors import ParameterError
from kvlink.ucxconfig import UcxConfig

_NOT_OF_CLUSTERS: Final = frozenset({"KVLINK_PYTHON", "KVLINK_VENV", "KVLINK_STRESS", "KVLINK_TEST_FOLDER"})
"""Of the repository's scripts and tests."""


def read_settings(environ: Mapping[str, str]) -> tuple[ClusterConfig, Finding]:
    """Return the settings, the defaults where they are not acceptable, and what there is to say of them."""
    given = sorted(name for name in environ if name.startswith("KVLINK_") and name not in _NOT_OF_CLUSTERS)
    unknown = [name for name in given if name not in _known()]
    facts = {"variables": given, "unknown": unknown}
    try:
        config = ClusterConfig.from_environ(environ)
    except ParameterError as exc:
        return ClusterConfig(), Finding(
            name="settings",
            group="host",
            state=State.MISSING,
            found=str(exc),
            advice="correct the variable: ClusterConfig.from_environ refuses it, and so no such cluster starts",
            is_needed=True,
            facts=facts,
        )
    if unknown:
        return config, Finding(
            name="settings",
            group="host",
            state=State.WARN,
            found=f"no setting is called {', '.join(unknown)}",
            advice="a name is KVLINK_ and that of a field of ClusterConfig, or KVLINK_UCX_ and one of UcxConfig",
            facts=facts,
        )
    found = f"from {', '.join(given)}, else the defaults" if given else "the defaults: no KVLINK_ variable is set"
    return config, Finding(name="settings", group="host", state=State.OK, found=found, facts=facts)


def _known() -> frozenset[str]:
    of_clusters = {f"KVLINK_{field.name.upper()}" for field in fields(ClusterConfig)} - {"KVLINK_UCX"}
    of_ucx = {f"KVLINK_UCX_{field.name.upper()}" for field in fields(UcxConfig)} - {"KVLINK_UCX_OPTIONS"}
    return frozenset({"KVLINK_SECRET_FILE", *of_clusters, *of_ucx})
