"""``python -m kvlink.proving`` is what ``scripts/prove-rdma`` runs."""

import sys

from kvlink.proving.command import main

sys.exit(main())
