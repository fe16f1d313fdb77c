"""Which CUDA files are compiled for another kind of CPU."""

# One of each folder: the ones that compile fastest.
KERNELS = (
    *("library/gpu", "kernels/derivatives/plain_tiles", "kernels/sm80/sm80_backend", "kernels/sm90/sm90_backend"),
    *(f"kernels/common/{name}" for name in ("cache/append_kv", "float64/float64_attention", "masks/block_mask")),
    *(f"kernels/common/{name}" for name in ("repair/repair", "sums/delta")),
    *(f"kernels/sm80/{name}/instances/{name}_short_bias" for name in ("forward", "backward")),
    *("kernels/sm80/forward/split/instances/forward_split_wide", "kernels/sm80/tangents/instances/tangents_f32"),
    "kernels/sm90/forward/instances/forward_alibi_f16",
    "kernels/sm90/forward/single_tile/instances/single_tile",
    *(f"kernels/sm90/backward/key_stationary/{name}" for name in ("key_tile_list", "instances/key_stationary_f16")),
    "kernels/sm90/backward/query_stationary/instances/query_stationary",
    "kernels/sm90/backward/exact_delta/instances/exact_delta",
    "kernels/sm90/backward/two_pass/instances/two_pass_wide_f16",
)
