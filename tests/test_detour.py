"""Registered memory that the kernel does not let a peer reach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_registered_memory_out_of_reach_takes_a_detour_through_the_pool() -> None:
    """Pulls and pushes still move the right bytes, the link says why, and the pool gets its room back."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.detour"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["is_pulled"]
    assert outcome["is_slot_pulled"]
    assert outcome["is_pushed"]
    assert outcome["pool_left"] == 0
    assert "permit_peer_access" in outcome["detour"]
    assert outcome["layerwise"] == "LLM_FEATURE_NOT_ENABLED"
