"""To root nothing is unreadable or unwritable; without some capabilities, modes count for root too."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
PASSES_OVER_MODES = 1 << 1 | 1 << 2 | 1 << 3  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def ordinary_user() -> Iterator[None]:
    """For this thread and those that it starts; whoever is an ordinary user stays as he is."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, found = _Header(VERSION_3, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), found) == 0
    before = found[0].effective
    found[0].effective = before & ~PASSES_OVER_MODES
    assert libc.capset(ctypes.byref(header), found) == 0
    try:
        yield
    finally:
        found[0].effective = before
        assert libc.capset(ctypes.byref(header), found) == 0
