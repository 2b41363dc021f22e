"""What the multi-process tests stand on: peers in processes of their own, bytes that say whose they are, loops."""
