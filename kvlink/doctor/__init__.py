"""What this host can do for kvlink, and what to do about what it cannot: ``kvlink doctor``.

Two kinds of checks. What the kernel writes in ``/proc`` and ``/sys`` is *read*, below a root that a test may choose
(`host`, `fabric`). What only shows when it is done is *done*, in a child process with a time limit (`probes`,
`children`): a probe that crashes, hangs or is killed is a finding like any other, and never the end of the doctor. The
checks make `Finding` values and print nothing; `command` shows them, as text or as JSON, and chooses the exit status.

Nothing here needs root or an extra of kvlink, and nothing on the host is changed.
"""
