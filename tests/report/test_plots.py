import subprocess
import sys
from pathlib import Path

import pytest

from medcil.report.plots import write_figures

from .fake_runs import write_run, write_three


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    runs = write_three(tmp_path)
    first = write_figures(runs, tmp_path / "first")
    second = write_figures(runs, tmp_path / "second")
    names = [f"{name}.{kind}" for name in ("accuracy", "forgetting") for kind in ("pdf", "svg", "png")]
    assert [path.name for path in first] == names
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "first").glob("*.part"))


@pytest.mark.parametrize("label", ["$5 $x_{", "_hidden", "a label " * 20])
def test_any_label_can_be_drawn(tmp_path: Path, label: str) -> None:
    runs = [write_run(tmp_path / "a", label=label), write_run(tmp_path / "b", n_steps=1)]
    assert all(path.stat().st_size > 1000 for path in write_figures(runs, tmp_path / "out"))


def test_reports_need_no_torch() -> None:
    check = "import sys, medcil.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
