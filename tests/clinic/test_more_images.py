"""An update with more images of known classes: alone, beside new classes, and what it refuses."""

import csv
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import medcil
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.clinic.update import Plan
from medcil.errors import InvalidInput
from medcil.readouts.ridge import Ridge
from medcil.training import feed

from ..errors.raises import raises
from .commands import run as command
from .generated import FEW, QUICK, content, write_counts, write_folder
from .test_story import run

FROZEN = {"method": "analytic", **QUICK, "settings": ("execution.threads=1", "method.adapt=never")}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 25 images, five of each sealed."""
    root = tmp_path_factory.mktemp("base")
    medcil.train(write_folder(root / "data", "alpha", "beta", "gamma"), root / "model", **FROZEN)
    return root / "model"


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write images of another draw: write(name of a folder, alpha=12, ...)."""

    def write(name: str, *, seed: int = 7, **counts: int) -> Path:
        return write_counts(tmp_path / name, counts, seed=seed)

    return write


def ridge_of(model: Path, version: str | None = None) -> Ridge:
    readout = ModelFolder(model).version(version).load_state().readout
    assert isinstance(readout, Ridge)
    return readout


def assert_same(found: Ridge, expected: Ridge, *, rel: float, parts: tuple[str, ...]) -> None:
    for part in parts:
        a, b = getattr(found, part).double(), getattr(expected, part).double()
        assert float((a - b).abs().max()) <= rel * float(b.abs().max()), part


def sealed_of(model: Path) -> dict[str, int]:
    names = [entry["class"] for entry in ModelFolder(model).version().holdout_entries()]
    return {name: names.count(name) for name in names}


def test_known_and_new_classes_in_one_folder(model, write):
    before = ridge_of(model).counts.tolist()
    data = write("mixed", delta=25, alpha=12, beta=1)  # one image is enough of what is known
    done = medcil.update(model, data, **FEW)
    assert (done.provenance["classes_added"], done.provenance["more_images"]) == (
        ["delta"],
        {"alpha": 12, "beta": 1},
    )
    assert done.provenance["images"] == {"alpha": 12, "beta": 1, "delta": 20}
    assert ModelFolder(model).version().class_names() == ("alpha", "beta", "gamma", "delta")
    assert ridge_of(model).counts.tolist() == [before[0] + 12, before[1] + 1, before[2], 20]
    assert ModelFolder(model).version().load_state().inherent_counts.tolist() == [32, 21, 20, 20]
    assert sealed_of(model) == {"alpha": 5, "beta": 5, "gamma": 5, "delta": 5}
    costs = {entry["name"]: entry for entry in done.forgetting["old_classes"]}
    assert (costs["alpha"]["images"], [entry["name"] for entry in done.forgetting["new_classes"]]) == (
        5,
        ["delta"],
    )
    assert costs["alpha"]["before"]["recall"] is not None
    assert costs["alpha"]["after"]["recall"] is not None


def test_only_known_classes_add_no_class(model, write):
    done = medcil.update(model, write("more", gamma=9), **FEW)
    assert (done.version, done.provenance["classes_added"]) == ("v2", [])
    folder = ModelFolder(model)
    assert folder.version().class_names() == folder.version("v1").class_names()
    network = folder.version().load_state().network
    assert network.classifier.block_sizes == (3,)
    assert done.forgetting["new_classes"] == []
    for name in ("card.md", "report.html"):
        assert "Images added to v1: gamma (+9 images)" in folder.version().read(name).decode()
    assert medcil.history(model)[1]["more_images"] == {"gamma": 9}
    assert "gamma (+9" in run("history", model)
    medcil.update(model, write("new", delta=25), **FEW)  # and the model goes on
    assert ModelFolder(model).version().class_names()[-1] == "delta"


def test_a_dry_run_and_the_update_say_what_is_new_and_what_is_more(model, write):
    before, data = content(model), write("mixed", delta=25, alpha=12)
    plan = medcil.update(model, data, dry_run=True)
    assert isinstance(plan, Plan)
    assert (plan.images, plan.known) == ({"alpha": 12, "delta": 20}, {"alpha": 20})
    assert plan.holdout == {"alpha": 0, "delta": 5}
    for options in (("--dry-run",), ()):
        said = run("update", model, data, *options)
        assert "class to train on sealed before alpha 12 0 20 images delta 20 5 new" in said
        if options:
            assert content(model) == before


def test_the_statistics_are_those_of_all_images_at_once(tmp_path, write, monkeypatch):
    """Each image is a batch of its own, so that its features are the same to the bit."""
    monkeypatch.setattr(feed, "EVALUATION_BATCH", 1)
    first, late = write("first", alpha=8, beta=6), write("late", alpha=5, delta=7, seed=8)
    together = Path(shutil.copytree(first, tmp_path / "together"))
    for path in late.glob("*/*.png"):
        (together / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, together / path.parent.name / f"late {path.name}")
    with warnings.catch_warnings(action="ignore"):  # so few images
        medcil.train(first, tmp_path / "model", holdout=0, **FROZEN)
        medcil.update(tmp_path / "model", late, **FEW)
        medcil.train(together, tmp_path / "at once", holdout=0, **FROZEN)
    found, expected = ridge_of(tmp_path / "model"), ridge_of(tmp_path / "at once")
    assert found.counts.tolist() == expected.counts.tolist() == [13, 6, 7]
    assert_same(found, expected, rel=1e-12, parts=("sums", "moments", "log_prior", "class_means"))


def test_the_order_of_the_updates_makes_no_difference(base, tmp_path, write):
    parts = {"more": {"alpha": 12, "gamma": 4}, "new": {"delta": 25}}
    found = []
    for order in (["more", "new"], ["new", "more"], ["both"]):
        model = Path(shutil.copytree(base, tmp_path / "-".join(order)))
        for name in order:
            counts = parts["more"] | parts["new"] if name == "both" else parts[name]
            medcil.update(model, write(f"{name} of {model.name}", **counts), **FEW)
        found.append(ridge_of(model))
    for other in found[1:]:
        assert other.counts.equal(found[0].counts)
        assert_same(other, found[0], rel=1e-5, parts=("sums", "moments", "weights", "log_prior"))
    before = ridge_of(base)
    assert not torch.allclose(found[0].weights[:, :3], before.weights, rtol=1e-2)  # images count


def test_holdout_asks_for_more_sealed_images_and_a_class_without_any_gets_some(model, write):
    medcil.update(model, write("more", alpha=15, seed=1), holdout=2, **FEW)
    assert sealed_of(model) == {"alpha": 7, "beta": 5, "gamma": 5}
    v2 = ModelFolder(model).version().provenance()
    assert (v2["images"], v2["holdout"]) == ({"alpha": 13}, {"alpha": 2})
    medcil.update(model, write("unsealed", delta=25, seed=2), holdout=0, **FEW)
    medcil.update(model, write("some", delta=15, seed=3), holdout=3, **FEW)
    medcil.update(model, write("none", delta=15, beta=15, seed=4), **FEW)
    assert sealed_of(model) == {"alpha": 7, "beta": 5, "gamma": 5, "delta": 3}


def test_a_known_class_without_sealed_images_gets_some_by_default(tmp_path, write):
    medcil.train(write("first", alpha=25, beta=25), tmp_path / "model", holdout=0, **FROZEN)
    medcil.update(tmp_path / "model", write("new", delta=25), holdout=4, **FEW)
    medcil.update(tmp_path / "model", write("more", alpha=20, delta=20, seed=8), **FEW)
    assert sealed_of(tmp_path / "model") == {"alpha": 4, "delta": 4}


def write_patients(folder: Path, who: dict[str, int]) -> Path:
    """So many images of alpha of each patient."""
    write_counts(folder, {"alpha": sum(who.values())}, seed=9)
    names = [name for name, n in who.items() for _ in range(n)]
    with (folder / "images.csv").open("w", newline="") as file:
        rows = [(f"alpha/{i:03d}.png", "alpha", name) for i, name in enumerate(names)]
        csv.writer(file).writerows([("path", "label", "patient"), *rows])
    return folder


@pytest.mark.parametrize(("holdout", "n_more"), [(None, 0), (10, 1)])
def test_patients_stay_on_their_side(holdout, n_more, of_patients, tmp_path):
    medcil.train(of_patients / "first", tmp_path / "model", **FROZEN)
    before = sealed_patients(tmp_path / "model")
    trained = ModelFolder(tmp_path / "model").version().trained_patients()[0]
    who = {min(before): 4, trained: 6} | dict.fromkeys("ABCDEFGH", 3)
    with pytest.warns(UserWarning, match="4 images are of sealed patients, and not trained on"):
        done = medcil.update(
            tmp_path / "model", write_patients(tmp_path / "data", who), **FEW, holdout=holdout
        )
    n_sealed = 4 + 3 * n_more  # whom the model has sealed stay so, with their new images
    assert (done.provenance["images"], done.provenance["holdout"]) == (
        {"alpha": 34 - n_sealed},
        {"alpha": n_sealed},
    )
    new = sealed_patients(tmp_path / "model") - before
    assert len(new & {*"ABCDEFGH"}) == len(new) == n_more
    version = ModelFolder(tmp_path / "model").version()
    assert {*version.trained_patients()} == {trained, *"ABCDEFGH"} - new


def sealed_patients(model: Path) -> set[str]:
    people = ModelFolder(model).version().people()
    return {who for who, files in people.items() if any("holdout/" in file for file in files)}


def test_pictures_that_the_model_keeps_are_left_out(model, write):
    kept = ModelFolder(model).version()
    paths = [kept.store.path(entry["file"]) for entry in kept.holdout_entries() if entry["class"] == "alpha"]
    data = write("more", alpha=6)
    for number, path in enumerate(paths):
        shutil.copy(path, data / "alpha" / f"again {number}.png")
    with pytest.warns(UserWarning, match=r"5 pictures are left out: .*already \(alpha/again 0.png"):
        done = medcil.update(model, data, **FEW)
    assert done.provenance["images"] == {"alpha": 6}
    only = write("only", alpha=1)
    shutil.copy(paths[0], only / "alpha/000.png")
    with raises("data.images.known", "knows all pictures"):
        medcil.update(model, only, **FEW)
    (only / "alpha").rename(only / "beta")
    with pytest.raises(InvalidInput, match=r"1 pictures .* as another class .*'alpha'"):
        medcil.update(model, only, **FEW)


def test_learned_images_are_known_though_none_is_kept(model, base, tmp_path, write):
    with raises("data.images.known", "knows all pictures"):
        medcil.update(model, base.parent / "data", **FEW)
    data = write("mixed", delta=25, alpha=12)
    medcil.update(model, data, **FEW)
    with raises("data.images.known"):
        medcil.update(model, data, **FEW)
    part = write_counts(tmp_path / "part", {"alpha": 14}, seed=7)  # two more of the same draw
    with pytest.warns(UserWarning, match="12 pictures are left out"):
        assert medcil.update(model, part, **FEW).provenance["images"] == {"alpha": 2}
    assert ridge_of(model).counts[0] == 34
    medcil.rollback(model, "v1")  # which has not seen them
    assert medcil.update(model, data, **FEW).version == "v4"
    (part / "alpha").rename(part / "gamma")
    with pytest.raises(InvalidInput, match=r"12 pictures .* as another class .*'alpha'"):
        medcil.update(model, part, **FEW)


@pytest.mark.filterwarnings("ignore:Classes with fewer than 20 images")
def test_a_patient_of_two_deliveries_is_subtracted_from_both(of_patients, tmp_path):
    """The statistics are those of a model that never had the patient."""
    found = []
    for name, who in (("with", {"A": 4, "ALPHA-PERSON-0": 3}), ("without", {"A": 4})):
        first = Path(shutil.copytree(of_patients / "first", tmp_path / name))
        model, more = tmp_path / f"model {name}", write_patients(tmp_path / f"more {name}", who)
        if name == "without":
            for path in (first / "alpha").glob("00[012].png"):
                path.unlink()
            rows = (first / "images.csv").read_text().splitlines()
            kept = [row for row in rows if "ALPHA-PERSON-0" not in row]
            (first / "images.csv").write_text("\n".join(kept))
        medcil.train(first, model, holdout=0, **FROZEN)
        medcil.update(model, more, **FEW)
        if name == "with":
            for path in more.glob("*/*.png"):
                shutil.copy(path, first / "alpha" / f"more {path.name}")
            medcil.erase(model, "ALPHA-PERSON-0", images=first / "alpha")
        found.append(ridge_of(model))
    assert found[0].counts.tolist() == found[1].counts.tolist()
    assert_same(found[0], found[1], rel=1e-5, parts=("sums", "moments"))


@pytest.mark.parametrize(
    ("options", "update", "code", "word"),
    [
        ({}, {}, "model.class.known", "balanced"),
        (FROZEN, {"method": "balanced"}, "model.class.known", "balanced"),
        (FROZEN | {"settings": ("method.pooled=true",)}, {}, "model.class.pooled", "pooled"),
    ],
    ids=["trains", "would train", "pooled"],
)
def test_methods_that_cannot_refuse_before_any_image_is_read(options, update, code, word, tmp_path, write):
    model = tmp_path / "model"
    medcil.train(write("first", alpha=25, beta=25), model, **QUICK | options)
    before, data = content(model), write("more", delta=25, beta=5)
    (data / "beta/000.png").write_bytes(b"no image")
    with raises(code, "knows the class 'beta'", word, "Move that folder away") as refused:
        medcil.update(model, data, **update)
    assert len(str(refused.value).splitlines()[0]) < 100
    assert content(model) == before


def test_a_similar_name_is_asked_about_before_anything_is_learned(model, write):
    data = write("more", alpha=25)
    (data / "alpha").rename(data / "Alphas")
    before = content(model)
    for dry_run in (True, False):
        with raises(
            "model.class.similar", "'Alphas' is nearly the model's 'alpha'", "--same-as Alphas=alpha"
        ):
            medcil.update(model, data, dry_run=dry_run, **FEW)
    assert content(model) == before
    plan = medcil.update(model, data, dry_run=True, as_new=["Alphas"])
    assert isinstance(plan, Plan)
    assert (plan.images, plan.known) == ({"Alphas": 20}, {})
    said = run("update", model, data, "--same-as", "Alphas=alpha")
    assert "alpha 25 0 20 images" in said
    assert ModelFolder(model).version().class_names() == ("alpha", "beta", "gamma")
    assert medcil.history(model)[1]["more_images"] == {"alpha": 25}


def test_on_the_command_line_a_similar_name_is_exit_code_2(model, write, capsys):
    data, latin = write("more", beta=5), "beta"
    cyrillic = latin.replace("e", "\u0435").replace("a", "\u0430")
    (data / latin).rename(data / cyrillic)
    said = command(capsys, "update", model, data)
    first = f"The class '{cyrillic}' is nearly the model's 'beta': give --same-as or --as-new."
    assert said.code == 2
    assert first in said.first
    assert ascii(cyrillic) in said.err
    said = command(capsys, "update", model, data, "--same-as", cyrillic)
    assert (said.code, "write NAME=KNOWN" in said.first) == (2, True)
    assert command(capsys, "update", model, data, "--same-as", f"{cyrillic}=BETA", "--dry-run").code == 0


def test_a_name_in_another_case_is_the_known_class(model, write):
    data = write("more", beta=12)
    (data / "beta").rename(data / "BETA")
    assert medcil.update(model, data, **FEW).provenance["more_images"] == {"beta": 12}


def test_two_folders_may_be_one_class(model, write):
    data = write("more", beta=6, delta=7)
    (data / "delta").rename(data / "beta-carcinoma")
    done = medcil.update(model, data, same_as={"beta-carcinoma": "beta"}, **FEW)
    assert (done.provenance["more_images"], done.provenance["classes_added"]) == ({"beta": 13}, [])


def test_killed_before_the_last_write_the_same_command_finishes_it(model, base, tmp_path, write, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    data = write("mixed", delta=25, alpha=12)
    for part, name in ((VersionFolder, "publish"), (ModelFolder, "write")):  # nothing is in place; is listed
        with monkeypatch.context() as broken:
            broken.setattr(part, name, killed)
            with pytest.raises(KeyboardInterrupt):
                medcil.update(model, data, **FEW)
        assert ModelFolder(model).versions == ("v1",)
    medcil.update(model, data, **FEW)
    assert ModelFolder(model).versions == ("v1", "v2")
    alone = Path(shutil.copytree(base, tmp_path / "alone"))
    medcil.update(alone, data, **FEW)
    for part in ("counts", "sums", "moments", "weights"):
        assert getattr(ridge_of(model), part).equal(getattr(ridge_of(alone), part))
    found, expected = (ModelFolder(path).version().metrics() for path in (model, alone))
    assert found == expected
