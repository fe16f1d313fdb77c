"""Biases that are looked up in a table: suite `bias_table`.

PyTorch's kernels get the bias of all pairs, which exists before the call, and its gradient. FlexAttention reads the
table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext.bias_tables import T5Buckets
from flash_attn_ext.cli.bench.workload import BATCH_MASK, SWIN_TABLE, T5_TABLE, Workload
from flash_attn_ext.reference import key_distance


def bias_table() -> Iterator[Workload]:
    """T5-XL has 32 buckets, and Swin's windows of 7 x 7 pixels have 13 x 13 relative places."""
    trained: dict[str, Any] = dict(extras_need_grad=True, peers=("efficient", "flex"), against="efficient")
    for batch, seqlen in ((8, 512), (2, 2048)):
        yield Workload("bias_table", "T5-XL", batch, 32, seqlen, 64, table=T5_TABLE, **trained)
    yield Workload("bias_table", "Swin windows", 4096, 6, 49, 32, table=SWIN_TABLE, mask=BATCH_MASK, **trained)


def table_of(workload: Workload, device: torch.device) -> tuple[Any, Tensor, int]:
    """Its index as our call takes it, the entry of each pair, int64 (Sq, Sk), and the number of entries."""
    if workload.table == T5_TABLE:
        distance = key_distance(workload.seqlen, workload.num_keys, "top_left", device)
        return "t5", T5Buckets().of(distance, 32), 32
    side = int(workload.seqlen**0.5)
    pixel = torch.arange(workload.seqlen, device=device)
    rows, columns = pixel // side, pixel % side
    row_offset, column_offset = (t[:, None] - t[None] + side - 1 for t in (rows, columns))
    entries = row_offset * (2 * side - 1) + column_offset
    return entries.int(), entries, (2 * side - 1) ** 2
