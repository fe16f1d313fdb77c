"""torch.export, then a package of AOTInductor that loads and runs without the module."""

import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package

import flash_attn_ext


class Model(torch.nn.Module):
    """Attention with options of each type, where one result is not there (no bias: no residual), and a step with a
    cache that it writes. One model, since compiling takes nearly all of the time."""

    def forward(self, q, k, v, mask, slopes, step):
        options = dict(mask=mask, alibi_slopes=slopes, causal="bottom_right", window=(30, None), softcap=5.0)
        out, lse = flash_attn_ext.attention(q * 2, k, v, **options, return_lse=True)
        dropped = flash_attn_ext.attention(q, k, v, dropout_p=0.3)
        return out + 1, lse, dropped, flash_attn_ext.attention_with_kvcache(**step)


def arguments(length: int, device: str) -> tuple:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, 16, device=device) for heads in (4, 2, 2))
    step = {name: torch.randn(2, 2, rows, 16, device=device) for name, rows in CACHE_ROWS.items()}
    step["q"] = torch.randn(2, 4, 1, 16, device=device)
    step["cache_seqlens"] = torch.tensor([3, 19], dtype=torch.int32, device=device)
    return q, k, v, torch.rand(2, 1, 1, length, device=device) < 0.8, torch.rand(4, device=device), step


CACHE_ROWS = {"k_cache": 32, "v_cache": 32, "k_new": 1, "v_new": 1}


def test_a_package_loads_and_runs(device, tmp_path):
    """With other lengths, with caches that it writes in place, and with the dropout bits of an eager call."""
    length = torch.export.Dim("length", min=2, max=512)
    first = arguments(40, device)
    shapes = ({2: length}, {2: length}, {2: length}, {3: length}, None, dict.fromkeys(first[-1]))
    with torch.no_grad():
        program = torch.export.export(Model(), first, dynamic_shapes=shapes)
        package = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2")))
        for n in (40, 129):
            packaged, eager = arguments(n, device), arguments(n, device)
            torch.manual_seed(7)
            expected_results = Model()(*eager)
            torch.manual_seed(7)
            for ours, expected in zip(package(*packaged), expected_results, strict=True):
                torch.testing.assert_close(ours, expected)
            for name in ("k_cache", "v_cache"):
                assert torch.equal(packaged[-1][name], eager[-1][name])
