"""The sidecar's side of blocks that are elsewhere: what couriers may do, and what they are asked. Imported only where
one is configured.

1. A courier can lose bytes, never invent them: every header is checked before any of a message is used, and nothing of
   it is kept but its digests.
2. What is fetched costs engines an eighth of DRAM at most, and gives way to engines that lack room.
3. No lease and no put waits for a courier; a request to it is answered in time, whatever it does.
"""
