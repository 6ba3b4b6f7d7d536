"""Transfer operations on paged KV: `routes` picks what moves blocks between given pages and a payload,
`triton_pools` has the kernels for GPUs, `transfer` loads and saves on streams of their own.

Knows tensors, strides and page tables; never blocks, tiers or codecs' names.
"""
