"""``python -m flash_attn_ext bench``: measures our time beside that of peers, in the same run.

``suites`` names what is timed, as data, with ``feature_suites`` and ``model_suites``. ``workload`` makes the tensors,
``contestants``, ``peers`` and ``flex`` the calls; ``decode`` makes both for the workloads of ``decode_suites``.
``timing`` takes the times, ``rows`` makes the JSON. ``table`` prints, ``summary`` sums up and ``plot`` draws rows,
without measuring. benchmarks/bench.py of the repository adds goals and text generation.
"""
