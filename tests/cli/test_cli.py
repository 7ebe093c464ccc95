"""The command line: what it prints, which code it ends with, and what it leaves on the disk."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import medcil.experiments.run
from medcil.build import RunConfig, load_recipe, method_settings, resolve
from medcil.cli.main import main
from medcil.data.sources import DATASETS
from medcil.experiments.run import demo_configs
from medcil.methods import METHODS, PRESETS

from ..conformance.subjects import FROZEN, UNTRAINED

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TINY = """
label: tiny
data: {name: phantom, side: 12, crop: 10}
scenario: {base: 4, increment: 3}
network: {backbone: resnet8_cifar}
memory: {per_class: 2}
training: {epochs: 2, batch_size: 128}
method: {name: balanced}
execution: {device: cpu, threads: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.yaml").write_text(TINY)
    assert ended_with(["run", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run of its own for a test."""
    return shutil.copytree(finished_run, tmp_path / "run")


def ended_with(arguments: Sequence[str]) -> int:
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    code = ending.value.code
    return 0 if code is None else int(code)


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "medcil", *arguments]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def outcome_of(run: Path) -> dict[str, bytes]:
    """What a run computed, without the exemplars' random names and the times."""
    names = ("log.jsonl", "metrics.json", "confusion.csv", "predictions.csv", ".safetensors")
    return {name: content for name, content in files_of(run).items() if name.endswith(names)}


def unfinish(run: Path) -> None:
    """Takes the run back to the end of its first task."""
    shutil.rmtree(run / "tasks" / "02")


def test_help_imports_nothing_heavy():
    code = """
import sys, time
started = time.perf_counter()
from medcil.cli.main import main
try:
    main(["--help"])
except SystemExit as ending:
    assert not ending.code
print("heavy:", sorted({"torch", "torchvision", "timm", "numpy", "pandas", "matplotlib"} & set(sys.modules)))
print(f"{time.perf_counter() - started:.2f} s")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(done.stdout.splitlines()[-1])
    assert "Class-incremental learning" in done.stdout
    assert "heavy: []" in done.stdout


def test_without_a_command_the_help_is_shown(capsys):
    assert ended_with([]) in (0, 2)  # by the version of click
    shown = capsys.readouterr()
    assert "demo" in shown.out + shown.err


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("trainig={epochs: 3}", "Did you mean 'training'?"),
        ("training.epoch=3", "Did you mean 'epochs'?"),
        ("data.name=phantm", "Did you mean 'phantom'?"),
        ("method.name=balancd", "Did you mean 'balanced'?"),
        ("method.alpa=0.3", "Did you mean 'alpha'?"),
        ("method.first_task=cros_entropy", "'cross_entropy'"),
        ("method.preset=ham1000", "Did you mean 'ham10000'?"),
        ("method.plugins.clasification=focal", "Did you mean 'classification'?"),
        ("method.plugins.classification=focl", "Did you mean 'focal'?"),
        ("method.plugins.margin={kind: vanilla, wieght: 1}", "Did you mean 'weight'?"),
        ("method.plugins.margin={kind: vanilla, weight: .nan}", "method.plugins.margin.weight"),
        ("method.plugins.drop=[ranking]", "classification, margin, distillation"),
        ("method.plugins={margin: vanilla, phases: [finetune]}", "choose from learn"),
        ("network.backbone=resnet8_cifr", "Did you mean 'resnet8_cifar'?"),
        ("network.weights=missing.safetensors", "no such file: missing.safetensors"),
        ("data={name: ham10000, root: missing}", "data.root"),
        ("scenario.order=99", "orders 0.."),
        ("scenario.base=9", "only 7 classes"),
        ("training.epochs=0", "greater than 0"),
    ],
)
def test_a_mistake_in_a_recipe_is_named_before_anything_is_written(recipe, tmp_path, capsys, setting, hint):
    out = tmp_path / "out"
    assert ended_with(["run", str(recipe), "--out", str(out), "--set", setting]) == 2
    assert hint in capsys.readouterr().err.splitlines()[0]
    assert not out.exists() or files_of(out) == {}


@pytest.mark.parametrize(
    ("method", "wrong", "hint", "right"),
    [
        (
            "lo2ln",
            ["network.backbone=mobilenetv3_small_050"],
            "network.backbone: mobilenetv3_small_050 has no stages",
            ["network.backbone=resnet8_cifar"],
        ),
        ("podnet", ["network.classifier=linear"], "network.classifier: linear has one proxy", []),
        (
            "ucir",
            ["network.backbone=vit_tiny_patch16_224", "data.side=16", "data.crop=16"],
            "vit_tiny_patch16_224 cannot take images of 16 x 16 pixels; choose another data.crop",
            [],
        ),
    ],
)
def test_a_network_that_cannot_serve_is_refused_and_the_corrected_command_runs_in_the_same_folder(
    recipe, tmp_path, capsys, method, wrong, hint, right
):
    out = tmp_path / "out"

    def run_with(changes: Sequence[str]) -> int:
        changes = [f"method={method}", "training.epochs=1", *changes]
        settings = [word for change in changes for word in ("--set", change)]
        return ended_with(["run", str(recipe), "--out", str(out), *settings])

    assert run_with(wrong) == 2
    assert hint in capsys.readouterr().err.splitlines()[0]
    assert not out.exists()
    assert run_with(right) == 0
    assert json.loads((out / "metrics.json").read_text())["finished"]
    assert method_settings(load_recipe(out / "config.yaml").method)["name"] == method


def test_a_missing_recipe_is_named(tmp_path, capsys):
    assert ended_with(["run", str(tmp_path / "no.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "no.yaml" in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "out").exists()


def test_a_finished_run_is_not_computed_again(run, recipe, capsys):
    before = files_of(run)
    assert ended_with(["run", str(recipe), "--out", str(run)]) == 0
    assert "epoch" not in capsys.readouterr().err
    assert files_of(run) == before


def test_where_a_run_is_computed_may_change(run, recipe):
    before = outcome_of(run)
    assert ended_with(["run", str(recipe), "--out", str(run), "--set", "execution.resident=no"]) == 0
    assert outcome_of(run) == before


def test_another_recipe_is_kept_out_of_the_folder(run, recipe, capsys):
    before = files_of(run)
    changes = ["--set", "training.epochs=7", "--set", "method.alpha=0.25"]
    assert ended_with(["run", str(recipe), "--out", str(run), *changes]) == 4
    first, *rest = capsys.readouterr().err.splitlines()
    assert str(run) in first
    assert [line.strip() for line in rest] == ["method.alpha: 0.5 -> 0.25", "training.epochs: 2 -> 7"]
    assert files_of(run) == before


def test_a_folder_of_something_else_is_left_alone(recipe, tmp_path, capsys):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("words")
    assert ended_with(["run", str(recipe), "--out", str(out)]) == 4
    assert "chapter1.tex" in capsys.readouterr().err.splitlines()[0]
    assert files_of(out) == {"chapter1.tex": b"words"}


def test_a_folder_in_which_another_process_works_is_left_alone(run, recipe, capsys):
    before = files_of(run)
    code = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("locked", flush=True)
    input()
"""
    command = [sys.executable, "-c", code, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        assert ended_with(["run", str(recipe), "--out", str(run)]) == 3
        other.communicate("\n")
    assert str(run) in capsys.readouterr().err.splitlines()[0]
    assert files_of(run) == before


def test_a_damaged_state_is_refused(run, recipe, capsys):
    unfinish(run)
    path = max((run / "tasks" / "01" / "state" / "tensors").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert ended_with(["run", str(recipe), "--out", str(run)]) == 5
    assert str(path) in capsys.readouterr().err.splitlines()[0]
    assert not (run / "tasks" / "02").exists()


def test_an_unfinished_run_is_continued_and_shown(run, recipe, capsys):
    before = outcome_of(run)
    unfinish(run)
    assert ended_with(["run", str(recipe), "--out", str(run)]) == 0
    shown = capsys.readouterr()
    assert "tiny step 2/2 learn epoch 2/2  classification" in shown.err
    assert "step 1/2" not in shown.err
    assert "Balanced accuracy" in shown.out
    assert f"Report: {run / 'report.html'}" in shown.out
    assert outcome_of(run) == before


def listen_to_ctrl_c() -> None:
    """A shell starts what it runs in the background deaf to it, these tests among it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue_and_continuing_works(recipe, tmp_path):
    out = tmp_path / "out"
    log = out / "log.jsonl"
    # Far too many epochs to be finished before the signal arrives.
    command = program("run", str(recipe), "--out", str(out), "--set", "training.epochs=2000")

    def lines() -> list[bytes]:
        return log.read_bytes().splitlines() if log.exists() else []

    for n_epochs in (2, 5):
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
        ) as process:
            deadline = time.monotonic() + 300
            while len(lines()) < n_epochs and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            message = process.communicate(timeout=120)[1]
        assert process.returncode == 130
        assert "Run the same command again to continue" in message
        assert "Traceback" not in message
    epochs = [json.loads(line)["epoch"] for line in lines()]
    assert len(epochs) >= 5
    assert epochs == list(range(1, len(epochs) + 1))


def test_a_report_of_something_else_is_refused(tmp_path, capsys):
    assert ended_with(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[0]
    assert files_of(tmp_path) == {}


def test_a_report_needs_only_the_files_of_the_run(run, tmp_path, capsys):
    page = tmp_path / "pages" / "report.html"
    assert ended_with(["report", str(run), str(run), "--out", str(page.parent)]) == 0
    assert f"Report: {page}" in capsys.readouterr().out
    assert page.exists()


def test_every_method_is_listed_with_its_presets(capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "finetune", {"slow": {"training": {"epochs": 9}}})
    assert ended_with(["methods"]) == 0
    words = capsys.readouterr().out.replace(",", "").split()
    assert set(METHODS) <= set(words)
    assert {"slow", "Fine-tuning:", "method.plugins.classification", "cil_balanced"} <= set(words)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_be_shown(name, capsys):
    assert ended_with(["methods", name]) == 0
    words = capsys.readouterr().out.split()
    for field in dataclasses.fields(METHODS[name]):
        assert any(word == field.name or word.startswith(f"{field.name}.") for word in words)
    assert set(PRESETS.get(name, ())) <= set(words)
    assert ({"first", "learn"} <= set(words)) == (name not in UNTRAINED)
    assert ("nothing:" in words) == (name in UNTRAINED)
    assert ("later" in words) == (name not in FROZEN)


def test_a_setting_may_name_another_method_by_a_word(capsys):
    assert ended_with(["methods", "gaussians", "--set", "method=ucir"]) == 0
    assert capsys.readouterr().out.startswith("ucir\n")


def test_a_method_is_shown_with_its_values_presets_and_phases(capsys, monkeypatch):
    piece = {"method": {"finetune_share": 0.25}, "training": {"milestones": [1 / 3], "gradient_clamp": None}}
    monkeypatch.setitem(PRESETS, "ucir", {"short": piece})
    chosen = [
        "--set",
        "method.preset=short",
        "--set",
        "method.n_rivals=1",
        "--set",
        "method.plugins.drop=[ranking]",
    ]
    assert ended_with(["methods", "ucir", *chosen]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "n_rivals 1 (default 2)" in lines
    assert "adaptive seen seen, old" in lines
    assert "plugins.drop [ranking]" in lines
    assert "short method finetune_share: 0.25" in lines
    assert "short training milestones: [0.3333], gradient_clamp: null" in lines
    assert "later fine-tune classification exemplars plain 25 classifier" in lines
    assert lines[-2:] == [
        "Plug-ins: ranking dropped in phase learn of every task after the first.",
        "Plug-ins: nothing changed in phase fine-tune of every task after the first.",
    ]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["finetun"], "Did you mean 'finetune'?"),
        (["balanced", "--set", "method.alpa=1"], "Did you mean 'alpha'?"),
        (["balanced", "--set", "training.epochs=1"], "only `method`"),
        (["--set", "method.alpha=1"], "medcil methods NAME"),
    ],
)
def test_a_method_that_cannot_be_shown_is_named(arguments, hint, capsys):
    assert ended_with(["methods", *arguments]) == 2
    assert hint in capsys.readouterr().err.splitlines()[0]


def test_a_run_with_plugins_says_what_they_reach_and_can_be_run_from_its_own_record(recipe, tmp_path, capsys):
    changes = ["method={name: finetune}", "method.plugins.classification=cil_balanced"]
    changes += ["method.plugins.margin.kind=distribution", "method.plugins.margin.weight=0.3"]
    settings = [word for change in changes for word in ("--set", change)]
    out = tmp_path / "out"
    assert ended_with(["run", str(recipe), "--out", str(out), *settings]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == (
        "Plug-ins: classification replaced, margin added in phase learn of every task after the first."
    )
    epochs = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = {record["task"]: set(record["losses"]) for record in epochs}
    assert losses == {1: {"classification"}, 2: {"classification", "margin"}}

    before = files_of(out)
    assert ended_with(["run", str(out / "config.yaml"), "--out", str(out)]) == 0
    assert files_of(out) == before


def test_every_dataset_is_listed(capsys):
    assert ended_with(["datasets"]) == 0
    assert set(DATASETS) <= set(capsys.readouterr().out.split())


def test_the_demo_compares_four_methods(tmp_path, capsys, monkeypatch):
    def shrunken() -> dict[str, RunConfig]:
        tiny = {
            "data": {"name": "phantom", "side": 12, "crop": 10},
            "training": {"epochs": 1, "batch_size": 256},
        }
        return {
            folder: RunConfig.model_validate({**config.model_dump(), **tiny})
            for folder, config in demo_configs().items()
        }

    monkeypatch.setattr(medcil.experiments.run, "demo_configs", shrunken)
    assert ended_with(["demo", "--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert {"fine-tuning", "cross-entropy", "distillation", "balanced", "analytic"} <= set(shown.split())
    assert not list((tmp_path / "demo" / "analytic").rglob("exemplars/*"))
    assert list((tmp_path / "demo" / "balanced").rglob("exemplars/*"))
    assert "no clinical meaning" in shown
    assert f"Report: {tmp_path / 'demo' / 'report.html'}" in shown
    assert (tmp_path / "demo" / "report.html").exists()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_can_be_run(path):
    config = resolve(load_recipe(path))
    assert config.data.name in {*DATASETS, "own"}
    assert type(config.method) in METHODS.values()


def test_the_demos_recipe_is_the_demos_run():
    recipe = load_recipe(RECIPES / "phantom-balanced.yaml")
    assert resolve(recipe) == resolve(demo_configs()["balanced"])


@pytest.mark.slow
def test_a_run_needs_no_network(recipe, tmp_path):
    code = """
import socket, sys

def refuse(*arguments):
    raise AssertionError(f"a connection was asked for: {arguments[1:]}")

for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
socket.create_connection = socket.getaddrinfo = refuse
from medcil.cli.main import main
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, "run", str(recipe), "--out", str(tmp_path / "out")]
    online = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    done = subprocess.run(command, capture_output=True, text=True, env=online)
    assert "a connection was asked for" not in done.stderr
    assert done.returncode == 0
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "nothing"], "Not a run directory: nothing. Give one that holds config.yaml"),
        (["report", "file.txt"], "Not a run directory: file.txt. Give one that holds config.yaml"),
        (["report", "empty"], "Not a run directory: empty. Give one that holds config.yaml"),
        (["compare", "nothing"], "There is no folder nothing. Give run directories"),
        (["compare", "file.txt"], "There is no folder file.txt. Give run directories"),
        (["compare", "odd"], "No runs in odd: it holds neither"),
        (["bench", "nothing"], "There is no suite or .yaml file 'nothing'"),
        (["bench", "nothing.yaml"], "There is no suite or .yaml file 'nothing.yaml'"),
        (["bench", "empty"], "There is no suite or .yaml file 'empty'"),
        (["bench", "file.txt"], "There is no suite or .yaml file 'file.txt'"),
        (["run", "nothing.yaml", "--out", "out"], "There is no recipe file nothing.yaml. Give the path"),
        (["run", "empty", "--out", "out"], "There is no recipe file empty. Give the path of a YAML file"),
        (["run", "binary.yaml", "--out", "out"], "The recipe binary.yaml is not valid YAML; fix it"),
        (["tune", "empty", "--out", "out"], "There is no recipe file empty. Give the path of a YAML file"),
        (
            ["run", "recipe.yaml", "--out", "out", "--set", "method.preset=nothing"],
            "method.preset: balanced has no preset 'nothing'. Known: ",
        ),
        (
            ["run", "recipe.yaml", "--out", "out", "--set", "method.preset=[cch5000]"],
            "method.preset: balanced has no preset ['cch5000']. Did you mean 'cch5000'?",
        ),
        (["run", "recipe.yaml", "--out", "file.txt"], "file.txt is not a folder. "),
    ],
)
def test_a_wrong_path_or_preset_is_named_with_what_to_do(
    arguments, said, recipe, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd/runs.jsonl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ended_with(arguments) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(said), first
    assert not (tmp_path / "out").exists()
