"""Assert which error a call ends with, by its code."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from medcil.errors import MedcilError


@contextmanager
def raises(code: str, *words: str) -> Iterator[pytest.ExceptionInfo[MedcilError]]:
    """The block must end with this error; its message must hold these words."""
    with pytest.raises(MedcilError) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
