"""The twins of `triton_pools` in plain torch, one layer slice after another: what kernels must write, bit for bit."""

from __future__ import annotations

import torch

from kv_kernels.int8 import Unwritable
from kv_kernels.int8_form import Form
from kv_kernels.plain import PoolTable, into_pages, layer_slice, slice_bytes


def save(pools: PoolTable, form: Form, table: torch.Tensor, payloads: torch.Tensor, status: torch.Tensor) -> None:
    """The twin of `triton_pools.save`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for index, pages in enumerate(table.tolist()):
        for number, layer in enumerate(pools.planes):
            try:
                payloads[index, number * size : (number + 1) * size] = layer_slice(layer, pages, form)
            except Unwritable as unwritable:
                status[index] = max(int(status[index]), unwritable.flaw.value)


def load(pools: PoolTable, form: Form, table: torch.Tensor, payloads: torch.Tensor) -> None:
    """The twin of `triton_pools.load`."""
    size = slice_bytes(pools.planes[0], table.shape[1] * pools.page_tokens, form)
    for row, pages in zip(payloads, table.tolist(), strict=True):
        for number, layer in enumerate(pools.planes):
            into_pages(row[number * size : (number + 1) * size], layer, pages, 0, form)
