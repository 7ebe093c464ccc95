"""Fixtures of all tests."""

import contextlib
import dataclasses
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Started in a shell's background, Ctrl-C would be unheard by every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.version_info < (3, 12):
        sys.settrace = _again_where_refused(sys.settrace)


def _again_where_refused(settrace: Callable[[object], None]) -> Callable[[object], None]:
    """Coverage traces every thread. CPython 3.11 refuses that now and then, where two threads begin at once,
    and then does not run the thread.
    """

    def settrace_again(function: object) -> None:
        for _ in range(1000):
            with contextlib.suppress(RuntimeError):
                return settrace(function)
            time.sleep(0.001)
        return settrace(function)

    return settrace_again


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder}, which is not there")
    return folder


@pytest.fixture(scope="session")
def shared_weights() -> Path:
    """The folder of real weights beside the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "weights"
    if not folder.is_dir():
        pytest.skip(f"needs the real weights in {folder}, which is not there")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _no_weights_are_registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the user has registered away from the tests, and what they register away from the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data_home")))
        yield


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for registered weights of one test alone."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data_home"))
    return tmp_path / "data_home"


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
