import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from PIL import Image
from plotly.offline import get_plotlyjs

from medcil.errors import InvalidInput
from medcil.report.page import comparison_rows, findings, write_report
from medcil.report.runs import read_run

from .fake_runs import CLASS_NAMES, write_run, write_three

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def page_of(*runs: Path, **options: Any) -> str:
    """The page without the embedded library, whose own text is not ours to judge."""
    text = write_report(runs, runs[0].parent / "report.html", **options).read_text(encoding="utf-8")
    before, library, after = text.partition(get_plotlyjs())
    assert library
    assert get_plotlyjs() not in after
    return before + after


def charts_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    charts: dict[str, Any] = json.loads(found[1])
    return charts


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = write_three(tmp_path)
    page = unescape(page_of(*runs))
    records = [read_run(run) for run in runs]
    for row in comparison_rows(records):
        assert all(value in page for value in row.values())
    assert all(sentence in page for sentence in findings(records))
    assert f"<b>{comparison_rows(records)[2]['Forgetting']}</b>" in page
    assert page.count('role="tab"') == 3


def test_one_run_has_no_comparison(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    record = read_run(tmp_path / "run")
    assert "Side by side" not in page
    assert 'role="tab' not in page
    assert f"{100 * (record.last.recall[0] or 0):.1f}%" in page
    assert all(name in page for name in CLASS_NAMES)
    assert "method.alpha" in page
    assert "2.11.0" in page
    assert page.count("data:image/png;base64,") == 35


def test_every_chart_is_placed_and_valid(tmp_path: Path) -> None:
    page = page_of(*write_three(tmp_path))
    charts = charts_in(page)
    assert set(re.findall(r'data-chart="([^"]+)"', page)) == set(charts)
    assert {"compare-balanced", "compare-forgetting", "run2-confusion3", "run0-losses"} <= set(charts)
    for chart in charts.values():
        go.Figure({"data": chart["data"], "layout": chart["layout"]})  # raises on an unknown property
    confusion = charts["run2-confusion3"]
    assert confusion["counts"] == [list(row) for row in read_run(tmp_path / "balanced").last.confusion or ()]
    assert all(abs(sum(row) - 1) < 0.01 for row in confusion["data"][0]["z"])


def test_phases_of_one_name_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    place = {"task": 1, "phase": "learn"}
    phases = {1: [4.0, 3.0, 2.0], 2: [1.0, 0.5]}
    lines = [
        {**place, "phase_number": number, "epoch": epoch, "losses": {"classification": loss}, "total": loss}
        for number, losses in phases.items()
        for epoch, loss in enumerate(losses, start=1)
    ]
    again = {**lines[1], "losses": {"classification": 3.5}}  # run again after a stop: counts once
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, again]))
    (curve,) = charts_in(page_of(run))["run0-losses"]["data"]
    assert (curve["x"], curve["y"]) == ([1, 2, 3, 4, 5], [4.0, 3.5, 2.0, 1.0, 0.5])


def test_curves_show_the_steps(tmp_path: Path) -> None:
    charts = charts_in(page_of(*write_three(tmp_path)))
    curve = charts["compare-balanced"]
    assert curve["layout"]["xaxis"]["ticktext"][0] == "1<br>(3)"
    assert curve["data"][2]["customdata"][1] == ["balanced", "2: basal cell, vascular"]
    step = read_run(tmp_path / "balanced").steps[1]
    assert curve["data"][2]["y"][1] == pytest.approx(100 * (step.balanced or 0), abs=0.01)


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(*write_three(tmp_path))
    targets = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", page)
    assert targets
    assert all(target.startswith("data:") for target in targets)
    assert not re.search(r"@import|url\(|https?://", page)
    assert "default-src 'none'" in page


def test_the_page_is_small_enough_to_mail(tmp_path: Path) -> None:
    runs = write_three(tmp_path)
    assert write_report(runs, tmp_path / "report.html").stat().st_size < 8e6


def test_pictures_stay_within_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medcil.report.page.PICTURE_BUDGET", 8000)
    page = page_of(write_run(tmp_path / "run"))
    pictures = re.findall(r'src="(data:[^"]+)"', page)
    assert 0 < sum(map(len, pictures)) <= 8000
    n_shown = page.count('alt="nevus, exemplar')
    assert f"5 stored, {n_shown} shown" in page


def test_pictures_can_be_left_out(tmp_path: Path) -> None:
    assert "data:image" not in page_of(write_run(tmp_path / "run"), show_exemplars=False)


def test_large_and_broken_exemplars_do_not_stop_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = run / "tasks/03/state/exemplars"
    Image.new("L", (300, 200), 90).save(folder / "0000.png")
    (folder / "0001.png").write_bytes(b"not a picture")
    (folder / "0002.png").unlink()
    page = page_of(run)
    assert page.count("data:image/webp;base64,") == 1
    assert "5 stored, 3 shown" in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    names = (HOSTILE, *CLASS_NAMES[1:])
    runs = [write_run(tmp_path / m, m, class_names=names, label=m + HOSTILE) for m in ("balanced", "distill")]
    page = page_of(*runs)
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 3
    assert "<img src=x" not in page
    assert charts_in(page)["run0-confusion1"]["names"][0].startswith("&lt;/script&gt;")


def test_synthetic_images_are_announced(tmp_path: Path) -> None:
    banner = "Synthetic images: phantom. No clinical meaning."
    footer = "Research use; not a medical device."
    synthetic = page_of(write_run(tmp_path / "a"))
    real = page_of(write_run(tmp_path / "b", synthetic=False))
    assert banner in synthetic
    assert "Synthetic images" not in real
    assert footer in synthetic
    assert footer in real


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", n_steps=2))
    assert "This run is unfinished (2 of 3 steps)" in page
    assert "not yet" in page


def test_one_step_and_bare_metrics_are_enough(tmp_path: Path) -> None:
    step = {"step": 1, "classes": ["a", "b"], "n_old": 0}
    bare = {"steps": [step], "task_sizes": None, "inherent_counts": None, "class_names": ["a", "b"]}
    run = write_run(tmp_path / "run", n_steps=1, **bare)
    for name in ("log.jsonl", "config.yaml", "environment.json", "tasks/01/state/manifest.json"):
        (run / name).unlink()
    page = page_of(run)
    assert set(charts_in(page)) == {"run0-progress"}


def test_runs_that_differ_are_shown_with_a_warning(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "distill", dataset="other")]
    page = page_of(*runs)
    assert "compare with care" in page
    assert "Which class suffers" not in page


def test_the_page_is_a_function_of_its_runs(tmp_path: Path) -> None:
    runs = write_three(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    first = write_report(runs, folder / "report.html")
    second = write_report(runs, tmp_path / "new" / "page.html")
    assert first.read_bytes() == second.read_bytes()
    assert str(tmp_path) not in first.read_text(encoding="utf-8")
    assert [path.name for path in folder.iterdir()] == ["report.html"]


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    with pytest.raises(InvalidInput):
        write_report([tmp_path / "nowhere"], out)
    with pytest.raises(InvalidInput, match="at least one run"):
        write_report([], out)
    assert out.read_text() == "old"
