"""Random work over several processes that are killed, stopped and restarted, with every byte's origin checked.

``python -m tests.programs.stress --help``. A *supervisor* forks *workers*, each with one cluster that is linked to all
others. A worker owns caches that the others pull and an inbox that they push into, replaces them at random, and pulls
from and pushes to the others meanwhile, cancelling much of it. What must hold:

- a call that succeeds has moved exactly the bytes that it says: of the right peer, of a life and a cache of it that are
  not older than what was seen before, of the right tensor and block;
- a call that does not succeed is a typed error that names the peer, and no byte of its memory changes afterwards;
- everything ends: no call outlives its deadline, no process stops making progress;
- caches that nobody may write into hold what their owner wrote, until the owner gives them back;
- at the end a worker's pool is empty, and its process holds no more descriptors, threads and mappings than before.
"""
