"""Fixtures of all tests."""

import dataclasses
import functools
import signal
from collections.abc import Iterator
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


@pytest.fixture(autouse=True, scope="session")
def _phantom_is_drawn_once() -> Iterator[None]:
    """Draw the synthetic images of each size once per process."""
    # Not imported above: pytest reads this file before it checks shapes.
    from medcil.data.sources import DATASETS, phantom

    dataset = DATASETS["phantom"]

    @functools.cache
    def drawn(side: int, *_counts: tuple[int, ...]) -> object:
        return dataset.draw(side)

    def draw(side: int) -> object:
        return drawn(side, phantom.TRAIN_COUNTS, phantom.TEST_COUNTS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "phantom", dataclasses.replace(dataset, draw=draw))
        yield
