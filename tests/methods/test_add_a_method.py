"""docs/how-to/add-a-method.md, followed literally in a copy of the package: one file and one line more."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import medcil

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/add-a-method.md"
RECIPE = """
data: {name: phantom, side: 12, crop: 8}
scenario: {base: 3, increment: 2}
network: {backbone: resnet8_cifar}
memory: {per_class: 5}
training: {epochs: 1, batch_size: 64}
method: {name: lwf, temperature: 3}
execution: {device: cpu, threads: 1}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and, in it, the method on the page."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "medcil"
    shutil.copytree(Path(medcil.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (package / "methods" / "lwf.py").write_text(file, encoding="utf-8")
    table = package / "methods" / "__init__.py"
    table.write_text(table.read_text(encoding="utf-8") + line, encoding="utf-8")
    return folder


def python(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_method_on_the_page_is_a_method_like_any_other(copy, tmp_path):
    assert str(copy) in python(copy, "-c", "import medcil; print(medcil.__file__)")
    assert "LwF: cross-entropy on the new images" in python(copy, "-m", "medcil", "methods", "lwf")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    python(copy, "-m", "medcil", "run", str(recipe), "--out", str(tmp_path / "run"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["finished"]
    assert metrics["method"] == "lwf"
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [list(record["losses"]) for record in log] == [
        ["classification"],
        *[["classification", "distillation"]] * 2,
    ]


@pytest.mark.slow
def test_the_conformance_tests_pick_it_up(copy):
    checks = "lwf"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-cov", "-k", checks]
    printed = python(copy, "-m", "pytest", "tests/conformance/test_methods.py", *options)
    n_passed = int(re.search(r"(\d+) passed", printed).group(1))
    assert n_passed >= 15
