"""Transfer operations on paged KV (floor 0): `host` for the CPU's memory, `reference` in plain torch for any device,
`transfer` for loads and saves on streams of their own.

Knows tensors, strides and page tables; never blocks, tiers or codecs' names.
"""
