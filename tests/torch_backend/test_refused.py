"""What operators are not taken for, and that each says so."""

import pytest
import torch

from flash_attn_ext.integrations.torch_backend import cudnn, flash
from support import aten

ATEN = torch.ops.aten
REFUSALS = {
    "return_debug_mask": lambda q: ATEN._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True),
    "seqused_k": lambda q: ATEN._flash_attention_forward(
        q, q, q, None, None, 4, 4, 0.0, False, False, seqused_k=torch.ones(2, dtype=torch.int32, device=q.device)
    ),
    "alibi_slopes": lambda q: ATEN._flash_attention_forward(
        q, q, q, None, None, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(4, device=q.device)
    ),
    "window_size": lambda q: ATEN._efficient_attention_forward(
        q, q, q, None, None, None, None, None, 0.0, 1, window_size=2
    ),
    "bias with cu_seqlens": lambda q: ATEN._efficient_attention_forward(
        q[:1],
        q[:1],
        q[:1],
        torch.ones(1, 1, 4, 4, device=q.device),
        *[torch.tensor([0, 4], dtype=torch.int32, device=q.device)] * 2,
        4,
        4,
        0.0,
        0,
    ),
    "max_seqlen_q and max_seqlen_k": lambda q: ATEN._efficient_attention_forward(
        *[q[:1]] * 3, None, *[torch.tensor([0, 4], dtype=torch.int32, device=q.device)] * 2, None, None, 0.0, 0, True
    ),
    "attn_bias with packed": lambda q: ATEN._cudnn_attention_forward(
        q[0],
        q[0],
        q[0],
        torch.ones(1, 1, 4, 4, device=q.device),
        *[torch.tensor([0, 4], dtype=torch.int32, device=q.device)] * 2,
        4,
        4,
        False,
    ),
}

TABLE = torch.zeros(2, 1, dtype=torch.int32)
# Parameters that only operators of newer PyTorch have.
REFUSED_BY_KERNELS = {
    "block_table": lambda q: flash.flash_forward(q, q, q, None, None, 4, 4, 0.0, False, False, block_table=TABLE),
    "num_splits": lambda q: flash.flash_forward(q, q, q, None, None, 4, 4, 0.0, False, False, num_splits=1),
    "seqused_k": lambda q: cudnn.cudnn_forward(q, q, q, None, None, None, 4, 4, True, seqused_k=TABLE[:, 0]),
    "block_table is": lambda q: cudnn.cudnn_forward(q, q, q, None, None, None, 4, 4, True, block_table=TABLE),
}


@pytest.mark.parametrize("reason", REFUSED_BY_KERNELS)
def test_refused_by_kernels(reason):
    with pytest.raises(ValueError, match=reason):
        REFUSED_BY_KERNELS[reason](torch.randn(2, 4, 4, 8))


@pytest.mark.parametrize("reason", REFUSALS)
def test_refused(reason):
    """On the CPU, where no kernel was there before, the reason is the error."""
    with aten.on_device("cpu"), pytest.raises(ValueError, match=reason):
        REFUSALS[reason](torch.randn(2, 4, 4, 8))
