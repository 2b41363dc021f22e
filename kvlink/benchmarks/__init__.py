"""How fast kvlink is here: ``kvlink bench``. Nothing in the package imports this; the command line does, when asked.

Two processes of one host: the *initiator*, which the user started, and the *target*, which only owns memory. READ pulls
from the target, as a decode worker does; WRITE pushes to it, as a prefill worker does. One line of JSON per scenario.

What a number stands on: block numbers are permutations under a fixed seed, and differ between source and destination;
no destination block is used twice in a repeat; destinations are cleared before a repeat and every byte is compared
after it. The clock of an operation starts with the block numbers in numpy arrays and stops when the bytes are in place.

*The floor.* In each repeat the other half of the same permutations is copied by one loop of ``memcpy``, between two
mappings of the same memory. `x_floor` is kvlink's time over the floor's, so a slow or noisy machine slows both.

    Decision: the floor runs in the initiator, between its operations.
    Because: kvlink has no thread that spins, so there is nothing to stop, and both then use the same page tables.
    Instead of: a third process, with both sides stopped by a signal, as peers that poll need it.
    Revisit when: a transport polls.

Modules: `scenarios` (what is moved), `native` (floor and comparison), `sides` (one process's memory), `target` and
`pair` (the two processes), `measuring` and `setups` (the numbers), `accounting` (CPU time, noise, machine), `table` and
`chart` (what is shown), `rivals` (other libraries, by scripts of the same output), `scale`, `curves` and `scalechart`
(how costs grow), `command` (the arguments).
"""
