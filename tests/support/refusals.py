"""What errors have to say of bad calls."""

import re

import torch

ON = "<the device>"  # among what is said: that of the call


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def assert_says(error: Exception, parts: tuple[str, ...], device: str = "cpu") -> None:
    """Each part stands in the message, and not inside of a longer word or number: "q" is not said by "query"."""
    message = str(error)
    missing = [part for part in parts if not _is_said(part.replace(ON, device), message)]
    assert not missing, f"{missing} not in: {message}"


def _is_said(part: str, message: str) -> bool:
    before, after = (r"(?<!\w)" if part[0].isalnum() else ""), (r"(?!\w)" if part[-1].isalnum() else "")
    return re.search(before + re.escape(part) + after, message) is not None
