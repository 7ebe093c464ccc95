"""`medcil tune`: chooses on held-out images alone, goes on where it stopped, writes a recipe that runs."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock
from PIL import Image
from typer.testing import CliRunner

from medcil.build import load_recipe, method_settings, parse_recipe, resolve
from medcil.cli.main import app
from medcil.data.sources import find_dataset
from medcil.data.stream import Stream
from medcil.errors import InvalidInput, MedcilError, RunConflict
from medcil.experiments import tune as module
from medcil.experiments.run import run_experiment
from medcil.experiments.tune import (
    ALPHA,
    Search,
    Trial,
    suggest,
    tune,
)
from medcil.methods.presets import alpha_from_counts
from medcil.storage.atomic import read_json, write_json

from ..errors.raises import raises
from ..small import random_samples

BALANCED = ("method.alpha", "method.margin_weight", "method.distillation_weight")


def search_of(out: Path, *settings: str, **options: Any) -> Search:
    content = {
        "data": {"name": "phantom", "side": 18, "crop": 16},
        "scenario": {"base": 4, "increment": 3},
        "network": {"backbone": "resnet8_cifar"},
        "memory": {"per_class": 4},
        "training": {"epochs": 1, "batch_size": 64},
        "method": {"name": "balanced"},
        "execution": {"device": "cpu", "threads": 1},
    }
    return Search(resolve(parse_recipe(content, settings)), out, **options)


def peak(values: dict[str, float]) -> float:
    """An objective whose best is known: α = .35, λ_d = .05, λ_k = .4."""
    alpha, margin, distillation = (values[key] for key in BALANCED)
    return (
        0.9
        - (alpha - 0.35) ** 2
        - 0.2 * math.log10(margin / 0.05) ** 2
        - 0.2 * math.log10(distillation / 0.4) ** 2
    )


class FakeRuns:
    """Stands in for training: writes the metrics that `peak` gives, a little apart for each order."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.limit = math.inf

    def __call__(self, config, out, *, stream, watch) -> dict[str, Any]:
        if len(self.configs) >= self.limit:
            raise KeyboardInterrupt
        self.configs.append(config)
        score = peak({key: method_settings(config.method)[key.removeprefix("method.")] for key in BALANCED})
        score += 0.01 * (config.scenario.order if isinstance(config.scenario.order, int) else 0)
        metrics = {"finished": True, "acc_balanced": score, "acc_micro": 1 - score, "last_balanced": 0.5}
        write_json(out / "metrics.json", metrics)
        return metrics


@pytest.fixture
def fake(monkeypatch) -> FakeRuns:
    runs = FakeRuns()
    monkeypatch.setattr(module, "run_experiment", runs)
    samples = random_samples([1, 1])
    stream = Stream(samples, samples, ("a", "b"), (0, 1), (1, 1), is_synthetic=True)
    monkeypatch.setattr(module, "build_stream", lambda config: stream)
    return runs


def suggested(sampler: str, n: int, *, seed: int = 0) -> list[Trial]:
    """The trials of a search for the best of `peak`."""
    search = search_of(Path("unused"), sampler=sampler, seed=seed)
    trials = [Trial(dict.fromkeys(BALANCED, 0.5), 0.5)]
    while len(trials) < n and (values := suggest(search, trials)) is not None:
        trials.append(Trial(values, peak(dict(values))))
    return trials


def test_optuna_finds_the_best_and_does_better_than_the_random_values_it_begins_with():
    searches = [suggested("optuna", 40, seed=seed) for seed in range(4)]
    assert all(max(trial.score for trial in trials) > 0.88 for trials in searches)
    early = [trial.score for trials in searches for trial in trials[1:6]]
    late = [trial.score for trials in searches for trial in trials[-10:]]
    assert sum(late) / len(late) > sum(early) / len(early) + 0.05


def test_the_grid_has_every_point_once_and_its_first_ones_are_spread():
    trials = suggested("grid", 1000)
    points = [tuple(trial.values.values()) for trial in trials[1:]]
    assert len(points) == len(set(points)) == 124  # all but the one that was tried already
    assert max(points, key=lambda point: peak(dict(zip(BALANCED, point, strict=True)))) == (0.3, 0.1, 0.5)
    assert all(len({point[i] for point in points[:20]}) == 5 for i in range(3))


def test_the_recipes_own_values_come_first_and_the_best_is_chosen(tmp_path, fake):
    choice = tune(search_of(tmp_path), 8)
    assert choice.trials[0].values == dict.fromkeys(BALANCED, 0.1) | {"method.alpha": 0.5}
    assert peak(choice.values) == max(peak(trial.values) for trial in choice.trials)


def test_another_objective_chooses_other_values(tmp_path, fake):
    choice = tune(search_of(tmp_path, objective="acc_micro", sampler="grid"), 6)
    assert peak(choice.values) == min(peak(trial.values) for trial in choice.trials)
    assert "acc_micro" in choice.explanation


@pytest.mark.parametrize("sampler", ["optuna", "grid"])
def test_an_interrupted_search_ends_like_one_that_was_not(tmp_path, fake, sampler):
    whole = tune(search_of(tmp_path / "whole", sampler=sampler, orders=(0, 1, 2)), 5)
    n_runs = len(fake.configs)
    assert n_runs == 15
    for limit in (0, 1, 2, 3, 10, 14):  # in the middle of a trial, and between two
        fake.limit = n_runs + limit
        with pytest.raises(KeyboardInterrupt):
            tune(search_of(tmp_path / "resumed", sampler=sampler, orders=(0, 1, 2)), 5)
        assert len(fake.configs) == n_runs + limit
    fake.limit = math.inf
    resumed = tune(search_of(tmp_path / "resumed", sampler=sampler, orders=(0, 1, 2)), 5)
    assert resumed == whole
    assert len(fake.configs) == 2 * n_runs  # nothing ran twice
    for name in ("tuning.md", "tuned.yaml"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_half_a_line_of_the_journal_is_dropped(tmp_path, fake):
    tune(search_of(tmp_path), 3)
    journal = tmp_path / "study.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
    assert tune(search_of(tmp_path), 5) == tune(search_of(tmp_path / "whole"), 5)
    assert tune(search_of(tmp_path), 5).values


def test_a_search_without_its_journal_is_repeated_from_its_runs(tmp_path, fake):
    before = tune(search_of(tmp_path), 7)
    (tmp_path / "study.journal").unlink()
    n_runs = len(fake.configs)
    assert tune(search_of(tmp_path), 7) == before
    assert len(fake.configs) == n_runs


def test_more_trials_go_on_and_fewer_lose_nothing(tmp_path, fake):
    short = tune(search_of(tmp_path), 5)
    longer = tune(search_of(tmp_path), 9)
    assert longer.trials[:5] == short.trials
    assert tune(search_of(tmp_path), 3) == longer
    assert longer == tune(search_of(tmp_path / "at once"), 9)


def test_the_grid_ends(tmp_path, fake):
    settings = ["method.plugins.drop=[margin, distillation]"]
    choice = tune(search_of(tmp_path, *settings, sampler="grid"), 20)
    assert sorted(trial.values["method.alpha"] for trial in choice.trials) == [0.1, 0.3, 0.5, 0.7, 0.9]


def test_a_trial_is_its_mean_over_the_orders_and_each_of_its_runs_is_held_out(tmp_path, fake):
    choice = tune(search_of(tmp_path, orders=(0, 2)), 2)
    for trial in choice.trials:
        assert [run["order"] for run in trial.runs] == [0, 2]
        assert trial.score == pytest.approx(peak(trial.values) + 0.01)
        assert all((tmp_path / "runs" / run["key"] / "metrics.json").exists() for run in trial.runs)
    assert {config.data.held_out for config in fake.configs} == {0.2}
    tune(search_of(tmp_path / "other", "data.held_out=0.4"), 1)
    assert fake.configs[-1].data.held_out == 0.4


def test_a_trial_that_diverges_is_told_and_passed_over(tmp_path, fake, monkeypatch):
    def diverges(config, out, **options):
        if config.method.alpha > 0.4:
            raise MedcilError("Training diverged in epoch 1: a loss is not finite.\n{}")
        return fake(config, out, **options)

    monkeypatch.setattr(module, "run_experiment", diverges)
    choice = tune(search_of(tmp_path), 8)
    failed = [trial for trial in choice.trials if trial.score is None]
    assert choice.trials[0] in failed
    assert all(trial.values["method.alpha"] > 0.4 for trial in failed)
    assert choice.values["method.alpha"] <= 0.4
    assert "failed: Training diverged in epoch 1" in (tmp_path / "tuning.md").read_text()
    assert tune(search_of(tmp_path), 8) == choice

    def always(config, out, **options):
        raise MedcilError("Training diverged")

    monkeypatch.setattr(module, "run_experiment", always)
    with pytest.raises(MedcilError, match="Every trial failed: Training diverged"):
        tune(search_of(tmp_path / "other"), 3)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (["training.epochs=2"], {}, r"recipe\.training\.epochs: 1 -> 2"),
        ([], {"objective": "last_balanced"}, "objective: 'acc_balanced' -> 'last_balanced'"),
        ([], {"orders": (0, 1)}, r"orders: \[0\] -> \[0, 1\]"),
        (["data.held_out=0.5"], {}, r"held_out: 0\.2 -> 0\.5"),
    ],
)
def test_another_search_is_not_written_over(tmp_path, fake, settings, options, words):
    tune(search_of(tmp_path), 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunConflict, match=f"holds another search(.|\n)*{words}"):
        tune(search_of(tmp_path, *settings, **options), 2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# Which values there are to choose.


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ([], list(BALANCED)),
        (["method.margin_weight=0"], list(BALANCED)),
        (["method.plugins.drop=[distillation]"], list(BALANCED[:2])),
        (
            ["method=ucir", "method.plugins={classification: cil_balanced, margin: distribution}"],
            ["method.plugins.classification.alpha", "method.plugins.margin.weight"],
        ),
        (["method=icarl", "method.plugins.margin=distribution"], ["method.plugins.margin.weight"]),
        (["method.plugins.classification=focal"], list(BALANCED[1:])),
        (["method.plugins.drop=[margin]"], [BALANCED[0], BALANCED[2]]),
        (["method=gaussians"], [key.replace("method.", "method.base.") for key in BALANCED]),
        (["method=lws", "method.base=balanced"], [f"method.base.{key[7:]}" for key in BALANCED]),
        (
            ["method={name: gaussians, base: {name: lws, base: balanced}}"],
            [f"method.base.base.{key[7:]}" for key in BALANCED],
        ),
    ],
)
def test_what_is_chosen(tmp_path, settings, keys):
    assert list(search_of(tmp_path, *settings).space) == keys


@pytest.mark.parametrize(
    "settings",
    [
        ["method=finetune"],
        ["method={name: gaussians, base: ucir}"],
        ["method=lws"],
        ["method=ucir", "method.plugins.classification=focal"],
        ["method.plugins={classification: focal, drop: [margin, distillation]}"],
    ],
)
def test_a_method_without_them_is_refused_before_anything_is_written(tmp_path, settings):
    with pytest.raises(InvalidInput, match="has neither α, λ_d nor λ_k to choose"):
        tune(search_of(tmp_path / "out", *settings), 2)
    assert not (tmp_path / "out").exists()


def test_values_are_within_their_ranges_and_short(tmp_path):
    search, trials = search_of(tmp_path, seed=3), [Trial(dict.fromkeys(BALANCED, 0.5), 0.5)]
    for _ in range(25):
        values = suggest(search, trials)
        trials.append(Trial(values, peak(dict(values))))
        for key, parameter in search.space.items():
            assert parameter.low <= values[key] <= parameter.high
            assert len(f"{values[key]:g}".replace("0.", "").lstrip("0")) <= 2
    assert suggest(search, trials[:7]) == trials[7].values
    assert suggest(search_of(tmp_path, seed=4), trials[:7]) != trials[7].values


def test_a_weight_of_0_is_a_first_trial_too(tmp_path, fake, monkeypatch):
    """It lies outside of the range that is searched."""
    monkeypatch.setattr(sys.modules[__name__], "peak", lambda values: values["method.alpha"])
    choice = tune(search_of(tmp_path, "method.margin_weight=0"), 8)
    assert choice.trials[0].values["method.margin_weight"] == 0
    assert all(trial.values["method.margin_weight"] > 0 for trial in choice.trials[1:])


def test_without_optuna_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises("dependency.missing", "pip install 'medcil[tune]'"):
        tune(search_of(tmp_path), 2)


# The rule from the class counts.


@pytest.mark.parametrize(
    ("dataset", "alpha"),
    [("cch5000", 0.7), ("ham10000", 0.5), ("eyepacs", 0.3)],
)
def test_the_rule_gives_what_the_paper_found_on_its_three_datasets(dataset, alpha):
    counts = find_dataset(dataset).published_counts["train"]
    assert round(alpha_from_counts(counts, 20), 1) == alpha
    assert alpha_from_counts(counts, 20) == pytest.approx(
        2 * (20 * len(counts) / sum(counts)) ** (1 / 3), abs=0.005
    )


def test_the_rule_stays_within_the_range():
    assert alpha_from_counts([10, 10], 20) == 1
    assert alpha_from_counts([10**9], 1) == ALPHA.low


# With real runs.


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), level).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Training images of three classes, and test images that cannot be read."""
    root = tmp_path / "images"
    for split in ("train", "test"):
        for c, name in enumerate(("a", "b", "c")):
            (root / split / name).mkdir(parents=True)
            for i in range(8):
                whole = png(80 * c + 3 * i)
                (root / split / name / f"{i}.png").write_bytes(whole if split == "train" else whole[:30])
    return root


def write_recipe(path: Path) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "data": {"name": "own", "side": 8, "crop": 8},
                "scenario": {"base": 2, "increment": 1},
                "network": {"backbone": "resnet8_cifar"},
                "memory": {"per_class": 2},
                "training": {"epochs": 1, "batch_size": 8},
                "method": "balanced",
                "execution": {"device": "cpu", "threads": 1},
            }
        )
    )
    return path


def test_the_command_chooses_without_reading_a_test_image_and_its_recipe_runs(tmp_path, folder):
    recipe, out = write_recipe(tmp_path / "recipe.yaml"), tmp_path / "out"
    command = ["tune", str(recipe), "--out", str(out), "--data", str(folder), "--trials", "3"]
    command += ["--orders", "0,seed-5", "--sampler", "grid"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    recipe_config = resolve(load_recipe(recipe, [f"data.root={folder}"]))
    choice = tune(Search(recipe_config, out, sampler="grid", orders=(0, "seed-5")), 3)
    scores = [trial.score for trial in choice.trials]
    assert len(scores) == 3
    best = scores.index(max(scores))
    for trial in choice.trials:
        measured = [read_json(out / "runs" / run["key"] / "metrics.json") for run in trial.runs]
        assert trial.score == pytest.approx(sum(metrics["acc_balanced"] for metrics in measured) / 2)
        assert all("held out by images" in metrics["split"] for metrics in measured)
        assert measured[0]["class_order"] == [0, 1, 2]
        assert measured[1]["class_order"] == np.random.RandomState(5).permutation(3).tolist()

    table = (out / "tuning.md").read_text().splitlines()
    bold = [line for line in table if line.startswith("| **")]
    assert len(bold) == 1
    assert bold[0].startswith(f"| **{best}** |")
    text = (out / "tuned.yaml").read_text()
    assert text.startswith("# Chosen by medcil tune. ")
    assert "The test images were not read." in text.replace("\n# ", " ")

    tuned = load_recipe(out / "tuned.yaml")
    assert tuned.data.held_out is None
    assert tuned.scenario.order == 0
    assert {key: getattr(tuned.method, key.removeprefix("method.")) for key in BALANCED} == choice.values
    with pytest.raises(MedcilError, match="test"):  # now they are read
        run_experiment(tuned, tmp_path / "run")
    for path in (folder / "test").rglob("*.png"):
        path.write_bytes(png(100))
    assert run_experiment(tuned, tmp_path / "run")["split"] == "given"

    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert (out / "tuned.yaml").read_text() == text


def test_other_images_are_another_search(tmp_path, folder):
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml"), [f"data.root={folder}"])
    search = Search(resolve(recipe), tmp_path / "out", sampler="grid")
    before = tune(search, 1)
    [trial] = before.trials
    assert read_json(search.out / "runs" / trial.runs[0]["key"] / "data.json") == search.fingerprint()
    assert tune(search, 1) == before
    (search.out / "study.journal").unlink()
    assert tune(search, 1) == before
    for i in range(9, 19):
        (folder / f"train/a/{i}.png").write_bytes(png(i))
    with pytest.raises(RunConflict, match=r"holds another search(.|\n)*data\.train\.images: \d+ -> \d+"):
        tune(search, 1)
    (search.out / "study.journal").unlink()
    with raises("run.data.mismatch"):
        tune(search, 1)


def test_one_search_at_a_time(tmp_path, fake):
    with FileLock(tmp_path / ".lock"), raises("folder.locked"):
        tune(search_of(tmp_path), 2)
    assert not (tmp_path / "study.journal").exists()


def test_medcil_run_says_what_it_is_tested_on(tmp_path, folder):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    settings = ["--set", f"data.root={folder}", "--set", "data.held_out=0.25", "--no-report"]
    result = CliRunner().invoke(app, ["run", str(recipe), "--out", str(tmp_path / "run"), *settings])
    assert result.exit_code == 0, result.output
    said = "Tested on 25% of the training images, held out; no test image is read."
    assert said in " ".join(result.output.split())


def test_a_class_that_cannot_be_held_out_is_named(tmp_path, folder):
    for path in sorted((folder / "train/b").iterdir())[1:]:
        path.unlink()
    recipe = resolve(load_recipe(write_recipe(tmp_path / "recipe.yaml"), [f"data.root={folder}"]))
    with (
        pytest.warns(UserWarning, match="no more than one image of b"),
        pytest.raises(InvalidInput, match="No image of b can be held out"),
    ):
        tune(Search(recipe, tmp_path / "out", sampler="grid"), 2)


@pytest.mark.parametrize("orders", ["0,0", "0,,1", ""])
def test_orders_are_different_ones(tmp_path, orders):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    result = CliRunner().invoke(
        app, ["tune", str(recipe), "--out", str(tmp_path / "out"), "--orders", orders]
    )
    assert isinstance(result.exception, InvalidInput)
    assert "write different class orders" in str(result.exception)
