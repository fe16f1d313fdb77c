"""The commands of ``python -m flash_attn_ext``."""
