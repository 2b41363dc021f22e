"""The behaviour that the spec prescribes, sentence by sentence; where kvlink differs on purpose: DIFFERENCES.md."""
