"""Prove a fabric: what kvlink promises, tried between two machines, with a report to paste. ``scripts/prove-rdma``.

No hardware of the project's own has RDMA, so this is how a site that has it finds out, and how it tells others. One
machine serves and the other one proves::

    machine A:  scripts/prove-rdma serve 10.0.0.1:7000          prints the line to type on B
    machine B:  scripts/prove-rdma prove 10.0.0.1:7000 --key ...

Processes: `server` (A) starts *targets*, each with a cluster, and stops and kills them when it is asked to; it moves no
bytes itself. `command` (B) starts the *prover*, which links to the targets and runs `checks`: whatever happens to the
prover's process, a crash inside a C library for one, is in the report. Both sides take their `ClusterConfig` from the
environment (``KVLINK_*``), as other programs of kvlink do; where that has no secret, the key makes one.

What was proved is said by what carried the bytes, see `report`: over shared memory the same checks prove that the
checks work, and nothing about RDMA.

Modules: `pattern` (what bytes must be), `layout` (which caches), `target`, `server`, `far` (the prover's view of the
server), `checks`, `bandwidth`, `report`, `command`.
"""
