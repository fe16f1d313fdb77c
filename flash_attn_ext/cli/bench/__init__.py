"""``python -m flash_attn_ext bench``: measures our time beside that of peers, in the same run.

``suites`` names what is timed, as data. ``workload`` makes the tensors, ``contestants`` and ``peers`` the calls;
``decode`` and ``generate`` make both for the workloads of ``decode_suites`` and ``generate_suites``. ``timing`` takes
the times, ``rows`` makes the JSON. ``table`` prints, ``goals`` judges and ``plot`` draws rows, without measuring.
"""
