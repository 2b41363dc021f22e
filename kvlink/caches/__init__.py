"""What one cluster owns of caches: references, keys, leases, handles. Bookkeeping; only local copies are awaited."""
