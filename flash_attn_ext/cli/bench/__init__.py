"""``python -m flash_attn_ext bench``: our time beside PyTorch's own attention, in the same run.

``suites`` names what is timed and ``goals`` what is wanted, both as data. ``workload`` makes the tensors,
``contestants`` the calls, ``timing`` the times, ``rows`` the JSON; ``table`` prints and ``plot`` draws rows alone.
"""
