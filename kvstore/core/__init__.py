"""The store itself: one lock, keys only.

1. The store knows keys, places and digests. Tokens, pages and payload bytes stay with its clients. 2. One lock guards
all tables. Nothing is read, hashed, written or waited for while it is held. 3. A block is readable when all its parts
are committed and its parent is readable; it goes leaf first, as a whole. 4. A pinned block is neither evicted nor
moved; a slot is not reused while a late reader may have it mapped. 5. Bytes are used only after a check: MAC, name,
generation and digest, at each hop between tiers. 6. Every miss has a reason, and every limit in effect is reported.
"""
