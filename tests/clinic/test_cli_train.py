"""What `train` and `update` print about the images and settings."""

import shutil
from pathlib import Path

from .commands import run
from .generated import write_folder


def test_an_update_says_which_columns_it_recognized(of_patients, tmp_path, capsys):
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    new = write_folder(tmp_path / "new", "delta")
    rows = [f"{path.name},delta,{int(path.stem) // 3}" for path in new.glob("*/*.png")]
    (new / "delta.csv").write_text("\n".join(["Filename,Diagnosis,Patient-ID", *rows]))
    said = run(capsys, "update", model, new, "--dry-run")
    assert said.code == 0
    assert "columns: image ← Filename, class ← Diagnosis, patient ← Patient-ID" in said.out.splitlines()
