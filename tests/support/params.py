"""pytest parameters from data."""

from collections.abc import Iterable

import pytest
import torch

from support.cases import DTYPES, Case


def over_cases(cases: Iterable[Case]):
    return pytest.mark.parametrize("case", list(cases), ids=str)


def over_dtypes(dtypes: Iterable[torch.dtype] = DTYPES):
    return pytest.mark.parametrize("dtype", list(dtypes), ids=lambda dtype: str(dtype).removeprefix("torch."))
