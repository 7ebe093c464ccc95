"""Classes, files and patients called what a browser, a terminal, Markdown or a file system would obey."""

import csv
import re
from pathlib import Path

import pytest

import medcil

from .generated import content, write_folder
from .patients import QUICK
from .test_story import exit_code, run

NAMES = {
    "alpha": "<img src=x onerror=alert(1)>",
    "beta": "../../[bold]red[/] ![a](http://example.com)",
    "delta": "=1+1|`rm -rf`</script>",
}


def write_named(folder: Path, *colors: str) -> Path:
    write_folder(folder, *colors, images=20)
    with (folder / "images.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "patient"])
        for path in sorted(folder.glob("*/*.png")):
            patient = f"<b>../{path.parent.name}/{int(path.stem) // 2}"
            writer.writerow([path.relative_to(folder).as_posix(), NAMES[path.parent.name], patient])
    return folder


def test_names_are_text_wherever_they_appear(tmp_path):
    model = tmp_path / "place/model"
    medcil.train(
        write_named(tmp_path / "data", "alpha", "beta"), model, backbone="resnet8_cifar", exemplars=5, **QUICK
    )
    before = set(tmp_path.rglob("*"))
    said = run("update", model, write_named(tmp_path / "new", "delta"), "--set", "execution.threads=1")
    assert NAMES["delta"] in said
    assert all(
        path.is_relative_to(model) for path in set(tmp_path.rglob("*")) - before if "new" not in path.parts
    )
    for file, raw in content(model).items():
        assert re.fullmatch(r"[\w./-]+", file)
        if file.endswith(".html"):
            assert not re.search(rb"<img|<b>|</script", raw)
        if file.endswith(".md"):
            assert not re.search(rb"<img|(?<!\\)\[bold|!\[a\]", raw)
    assert "</script>" in run("history", model)
    done = medcil.erase(model, next(iter(medcil_people(model))))
    assert done.versions == ("v1", "v2")


def medcil_people(model: Path) -> dict[str, list[str]]:
    from medcil.clinic.model_dir import ModelFolder

    return ModelFolder(model).version("v1").people()


def test_a_terminal_obeys_no_name(tmp_path, capsys):
    """Data with such names is refused; a folder may have one all the same."""
    data = write_folder(tmp_path / "data", "alpha", "beta")
    (data / "alpha").rename(data / "\x1b[2Jalpha")
    assert exit_code("train", data, "--out", tmp_path / "model") == 2
    assert exit_code("history", tmp_path / "\x1b[2Jnone") == 2
    told = capsys.readouterr()
    assert "\x1b[2J" not in told.out + told.err
    assert told.err.count(r"\x1b[2J") == 2


@pytest.mark.parametrize("name", ["model/versions", "model.json"])
def test_a_class_may_be_called_like_a_file_of_ours(tmp_path, name):
    data = tmp_path / "data"
    write_folder(data, "alpha", "beta", images=20)
    rows = [
        f"{path.relative_to(data).as_posix()},{name if path.parent.name == 'beta' else 'alpha'}"
        for path in sorted(data.glob("*/*.png"))
    ]
    (data / "list.csv").write_text("\n".join(["path,label", *rows]))
    done = medcil.train(data, tmp_path / "model", backbone="resnet8_cifar", **QUICK)
    assert done.metrics["classes"][1]["name"] == name
