"""The sidecar's side of blocks on other nodes and in a remote tier: what couriers may do, and their questions. Imported
only if a courier is configured.

1. A courier can lose bytes, never invent them: every header is checked before any of a message is used, and only its
   digests are kept.
2. Fetched blocks take an eighth of DRAM at most, and give way to engines that lack room. 3. No lease and no put waits
for a courier; a query that needs one is answered in time, whatever the courier does.
"""
