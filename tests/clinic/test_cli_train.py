"""What `train` and `update` print about the images and settings."""

import shutil
from pathlib import Path

from .commands import run
from .generated import write_counts, write_folder


def test_an_update_says_which_columns_it_recognized(of_patients, tmp_path, capsys):
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    new = write_folder(tmp_path / "new", "delta")
    rows = [f"{path.name},delta,{int(path.stem) // 3}" for path in new.glob("*/*.png")]
    (new / "delta.csv").write_text("\n".join(["Filename,Diagnosis,Patient-ID", *rows]))
    said = run(capsys, "update", model, new, "--dry-run")
    assert said.code == 0
    assert "columns: image ← Filename, class ← Diagnosis, patient ← Patient-ID" in said.out.splitlines()


def test_a_fifth_of_each_class_is_sealed_and_at_most_two_hundred(of_patients, tmp_path, capsys):
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    new = write_counts(tmp_path / "new", {"delta": 1010, "epsilon": 130, "zeta": 25})
    said = run(capsys, "update", model, new, "--dry-run", "--holdout", "200")
    assert said.code == 0
    counted = {line.split()[0]: line.split()[1:] for line in said.out.splitlines()[2:5]}
    assert counted == {"delta": ["810", "200"], "epsilon": ["104", "26"], "zeta": ["20", "5"]}
    warning = "A loss of less cannot be seen: 80 points of zeta (5 sealed). Add images, or give --eval."
    assert warning in said.err.splitlines()
    said = run(capsys, "update", model, new, "--dry-run", "--holdout", "10")
    assert "40 points of epsilon (10 sealed), 40 points of delta (10 sealed)" in said.err
