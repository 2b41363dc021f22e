"""What the multi-process tests stand on: a peer in a process of its own, memory whose bytes say whose they are, loops."""
