"""The example that uses the losses outside of our own training loop."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_it_trains(capsys):
    history = runpy.run_path(str(EXAMPLE))["main"](epochs=4)
    assert history[-1] < 0.7 * history[0]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(history) == 4
    assert all("classification" in line and "margin" in line for line in printed)


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60
