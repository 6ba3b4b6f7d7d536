"""Transfer operations on paged KV: `routes` picks what moves blocks between given pages and a payload,
`triton_raw` and `triton_int8` are the kernels for GPUs, `transfer` loads and saves on streams of their own.

Knows tensors, strides and page tables; never blocks, tiers or codecs' names.
"""
