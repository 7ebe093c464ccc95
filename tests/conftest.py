"""Fixtures of all tests."""

import signal
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Started in a shell's background, Ctrl-C would be unheard by every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder}, which is not there")
    return folder
