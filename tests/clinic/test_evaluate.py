import csv
import json
import math
import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from medcil.clinic.evaluate import Evaluated, by_patient, evaluate, figures, in_order, subgroups
from medcil.clinic.model_dir import ModelFolder
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.errors import InvalidInput
from medcil.metrics.intervals import wilson
from medcil.training.inference import Scorer

from ..small import random_images
from .tiny_model import NAMES, write_model, write_png

CPU = ExecutionConfig(device="cpu")


@pytest.fixture
def manifest(tmp_path):
    """60 images of three classes and 6 of a fourth, 22 patients, with age, sex and an id."""
    pixels = random_images(66, seed=21)
    rows = []
    for i, each in enumerate(pixels):
        write_png(tmp_path / "data" / "images" / f"{i:02}.png", each)
        label = "cyst" if i >= 60 else NAMES[i % 3]
        patient = f"p{i % 3}-{i // 9}"  # all images of a patient are of one class
        rows.append([f"images/{i:02}.png", label, patient, 30 + i % 50, "fm"[i % 2], f"id{i}"])
    with (tmp_path / "data" / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "patient", "age", "sex", "accession"], *rows])
    return tmp_path / "data" / "manifest.csv"


def probabilities_of(state, skin):
    pixels = random_images(66, seed=21)
    scores, _ = Scorer(state, CPU)(Samples(TensorImages(pixels), torch.zeros(66, dtype=torch.int64)))
    calibration = ModelFolder(skin).version().calibration()
    return calibration.probabilities(scores, [1 / 3] * 3)[:60]


def test_figures_are_those_of_scikit_learn(skin, state, manifest, tmp_path):
    found = evaluate(skin, manifest, out=tmp_path / "out", draws=200, execution=CPU).content
    probabilities, labels = probabilities_of(state, skin), np.arange(60) % 3
    predictions = probabilities.argmax(axis=1)
    by_image = found["by_image"]
    assert by_image["n"] == 60
    for name, expected in {
        "accuracy": sklearn_metrics.accuracy_score(labels, predictions),
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(labels, predictions),
        "kappa": sklearn_metrics.cohen_kappa_score(labels, predictions),
        "auroc": sklearn_metrics.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"),
    }.items():
        assert by_image[name]["value"] == pytest.approx(expected, abs=1e-9)
        if name != "kappa":  # always one class: chance agreement, whatever is drawn
            assert by_image[name]["low"] <= expected <= by_image[name]["high"]
    assert by_image["confusion"] == sklearn_metrics.confusion_matrix(labels, predictions).tolist()
    sensitivities = sklearn_metrics.recall_score(labels, predictions, average=None, zero_division=0)
    assert [c["sensitivity"]["value"] for c in by_image["classes"]] == pytest.approx(list(sensitivities))
    assert sum(b["images"] for b in by_image["reliability"]) == 60

    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written == found
    assert found["data"] == "manifest.csv"
    assert str(tmp_path) not in json.dumps(found)
    assert "p0-0" not in json.dumps(found)  # no patient's id


def test_patients_subgroups_and_other_classes(skin, state, manifest):
    found = evaluate(skin, manifest, draws=50, execution=CPU).content
    assert any("does not know cyst: 6 images are left out" in note for note in found["notes"])
    assert any("'accession' has 60 different values" in note for note in found["notes"])
    assert found["unlike"]["known_classes"]["n"] == 60
    assert found["unlike"]["other_classes"]["n"] == 6
    assert found["intervals"]["unit"] == "patients"

    probabilities = probabilities_of(state, skin)
    patients: dict[str, list[int]] = {}
    for i in range(60):
        patients.setdefault(f"p{i % 3}-{i // 9}", []).append(i)
    right = [probabilities[own].mean(axis=0).argmax() == own[0] % 3 for own in patients.values()]
    assert found["by_patient"]["n"] == len(patients)
    assert found["by_patient"]["accuracy"]["value"] == pytest.approx(np.mean(right))

    assert set(found["by_subgroup"]) == {"age", "sex"}
    predictions, labels = probabilities.argmax(axis=1), np.arange(60) % 3
    of_women = np.arange(60) % 2 == 0
    assert found["by_subgroup"]["sex"]["f"]["accuracy"]["value"] == pytest.approx(
        (predictions == labels)[of_women].mean()
    )
    assert {value: part["n"] for value, part in found["by_subgroup"]["age"].items()} == {
        "20 to below 40": 20,
        "40 to below 60": 20,
        "60 to below 80": 20,
    }


def test_a_class_is_known_by_its_name_in_any_case(skin, manifest):
    expected = evaluate(skin, manifest, draws=0, execution=CPU).content
    manifest.write_text(manifest.read_text().replace("nevus", "NEVUS"))
    found = evaluate(skin, manifest, draws=0, execution=CPU).content
    assert found == expected
    assert [note for note in found["notes"] if "does not know" in note] == [
        "The model does not know cyst: 6 images are left out."
    ]


def test_the_same_evaluation_twice_is_the_same(skin, manifest):
    first, second = (evaluate(skin, manifest, draws=40, execution=CPU).content for _ in range(2))
    assert first == second


def test_bad_files_and_absent_classes_are_left_out_and_said(skin, tmp_path):
    for i, pixels in enumerate(random_images(6, seed=4)):
        write_png(tmp_path / "data" / NAMES[i % 2] / f"{i}.png", pixels)
    (tmp_path / "data" / NAMES[0] / "bad.png").write_text("no image")
    found = evaluate(skin, tmp_path / "data", draws=20, execution=CPU).content
    assert found["by_image"]["n"] == 6
    assert found["unreadable"] == [f"{NAMES[0]}/bad.png"]
    assert any("1 of 7 images cannot be read" in note for note in found["notes"])
    assert any("no image of wart" in note for note in found["notes"])
    assert any("Patients are not known" in note for note in found["notes"])
    wart = found["by_image"]["classes"][2]
    assert (wart["n"], wart["sensitivity"]["value"], wart["class_auroc"]["value"]) == (0, None, None)


def test_images_that_were_trained_on_are_noticed(skin, state, tmp_path):
    memory = state.memory.read_all()
    for i, pixels in enumerate([*memory[:2], *random_images(4, seed=9)]):
        write_png(tmp_path / "data" / NAMES[i % 3] / f"{i}.png", pixels)
    found = evaluate(skin, tmp_path / "data", draws=0, execution=CPU)
    assert any(note.startswith("2 of these images are exemplars") for note in found.notes)
    for path in [tmp_path / "data" / NAMES[i] / f"{i}.png" for i in range(2)]:
        path.unlink()
    assert not any("exemplars" in note for note in evaluate(skin, tmp_path / "data", execution=CPU).notes)


def test_a_split_is_heeded(skin, tmp_path):
    for i, pixels in enumerate(random_images(12, seed=4)):
        part = "test" if i < 4 else "train"
        write_png(tmp_path / "data" / part / NAMES[i % 2] / f"{i}.png", pixels)
    found = evaluate(skin, tmp_path / "data", draws=0, execution=CPU).content
    assert found["by_image"]["n"] == 4
    assert "4 test images of 12 images" in found["notes"][0]
    assert found["by_image"]["auroc"]["low"] is None  # nothing was drawn
    whole = evaluate(skin, tmp_path / "data", draws=0, all_images=True, execution=CPU).content
    assert whole["by_image"]["n"] == 12


def test_what_cannot_be_evaluated_is_refused(skin, tmp_path):
    for i, pixels in enumerate(random_images(2)):
        write_png(tmp_path / "other" / "ab"[i] / "0.png", pixels)
    (tmp_path / "other" / "b" / "1.png").write_text("no image")
    with pytest.raises(InvalidInput, match="knows none of these classes"):
        evaluate(skin, tmp_path / "other", execution=CPU)
    (tmp_path / "bad" / NAMES[0]).mkdir(parents=True)
    (tmp_path / "bad" / NAMES[0] / "1.png").write_text("no image")
    write_png(tmp_path / "bad" / "cyst" / "0.png", random_images(1)[0])  # can be read, but is not known
    with pytest.raises(InvalidInput, match=r"None of the 1 images of known classes can be read: .*1\.png"):
        evaluate(skin, tmp_path / "bad", execution=CPU)
    with pytest.raises(InvalidInput, match="nothing at"):
        evaluate(skin, tmp_path / "nowhere", execution=CPU)
    with pytest.raises(InvalidInput, match="knows no class 'mole'"):
        evaluate(skin, tmp_path / "bad", grades=["mole"], execution=CPU)
    with pytest.raises(InvalidInput, match="every class once"):
        evaluate(skin, tmp_path / "bad", grades=["nevus", "wart"], execution=CPU)


def test_twenty_of_twenty_is_not_certain():
    probabilities = np.eye(2)[np.repeat([0, 1], 20)]
    found = figures(Evaluated(np.repeat([0, 1], 20), probabilities, None), ("a", "b"), draws=100, seed=0)
    assert found["classes"][0]["sensitivity"] == pytest.approx(
        {"value": 1.0, "low": wilson(20, 20)[0], "high": 1.0}
    )


def test_patients_widen_an_interval():
    """Ten patients, each wholly right or wholly wrong: 200 images are no more than ten answers."""
    labels = np.repeat(np.arange(10) % 2, 20)
    right = np.repeat([1, 1, 1, 1, 1, 1, 0, 0, 1, 0], 20)
    probabilities = np.eye(2)[np.where(right, labels, 1 - labels)]
    groups = tuple(f"p{i}" for i in np.repeat(np.arange(10), 20))
    alone, together = (
        figures(Evaluated(labels, probabilities, g), ("a", "b"), draws=500, seed=0)["accuracy"]
        for g in (None, groups)
    )
    assert alone["value"] == together["value"] == pytest.approx(0.7)
    assert together["high"] - together["low"] > 3 * (alone["high"] - alone["low"])


@pytest.mark.parametrize("boast", [0.0, 0.2])
def test_the_calibration_error_lies_in_its_interval(boast):
    """A model that says `boast` more than it is right; where that is nothing, chance alone shows an error."""
    generator, held = np.random.default_rng(1), 0
    for seed in range(30):
        confidence = 0.7 + 0.3 * generator.random(120)
        labels = (generator.random(120) >= confidence - boast).astype(np.int64)  # 0: as predicted
        both = np.stack([confidence, 1 - confidence], axis=1)
        found = figures(Evaluated(labels, both, None), ("a", "b"), draws=100, seed=seed)["ece"]
        assert found["low"] <= found["value"] <= found["high"]
        held += found["low"] <= boast <= found["high"]
    assert held >= 27


def test_a_few_right_answers_are_not_beyond_doubt():
    """Drawn again they are the same each time: what is counted leaves doubt, the rest has no interval."""
    found = figures(Evaluated(np.array([0, 1]), np.eye(2), None), ("a", "b"), draws=200, seed=0)
    low = wilson(1, 1)[0]
    assert found["balanced_accuracy"]["value"] == 1
    # Two independent classes, each 1 of 1: the distances to their bounds add up like deviations.
    assert found["balanced_accuracy"]["low"] == pytest.approx(1 - math.hypot(1 - low, 1 - low) / 2)
    assert found["auroc"] == {"value": 1, "low": None, "high": None}
    assert found["brier"] == {"value": 0, "low": None, "high": None}


def test_ten_patients_that_are_all_right_are_ten_answers():
    labels, groups = np.repeat([0, 1], 100), tuple(f"p{i}" for i in np.repeat(np.arange(10), 20))
    found = figures(Evaluated(labels, np.eye(2)[labels], groups), ("a", "b"), draws=100, seed=0)
    assert found["accuracy"]["low"] == pytest.approx(wilson(10, 10)[0])
    assert found["classes"][0]["sensitivity"]["low"] == pytest.approx(wilson(5, 5)[0])


def test_figures_are_those_of_scikit_learn_with_ties_and_an_absent_class():
    generator = np.random.default_rng(7)
    labels = generator.choice([0, 1, 3], size=50)  # no image of the third class
    probabilities = generator.dirichlet(np.ones(4), size=50).round(1)  # many are the same
    found = figures(Evaluated(labels, probabilities, None), tuple("abcd"), draws=0, seed=0)
    predictions, areas = probabilities.argmax(axis=1), []
    for c, of in enumerate(found["classes"]):
        if c == 2:
            assert of["class_auroc"]["value"] is None
            assert of["sensitivity"] == {"value": None, "low": None, "high": None}
            continue
        areas.append(sklearn_metrics.roc_auc_score(labels == c, probabilities[:, c]))
        assert of["class_auroc"]["value"] == pytest.approx(areas[-1])
        (true_no, false_yes), (false_no, true_yes) = sklearn_metrics.confusion_matrix(
            labels == c, predictions == c
        )
        for name, hits, n in (
            ("sensitivity", true_yes, true_yes + false_no),
            ("specificity", true_no, true_no + false_yes),
            ("ppv", true_yes, true_yes + false_yes),
            ("npv", true_no, true_no + false_no),
        ):
            low, high = wilson(int(hits), int(n))
            assert of[name] == pytest.approx({"value": hits / n, "low": low, "high": high})
    assert found["auroc"]["value"] == pytest.approx(np.mean(areas))
    assert found["kappa"]["value"] == pytest.approx(sklearn_metrics.cohen_kappa_score(labels, predictions))


def test_quadratic_kappa_follows_the_grades():
    generator = np.random.default_rng(3)
    labels, probabilities = generator.integers(4, size=80), generator.dirichlet(np.ones(4), size=80)
    order = [2, 0, 3, 1]
    found = figures(Evaluated(labels, probabilities, None), tuple("abcd"), draws=0, seed=0, order=order)
    grade = np.argsort(order)
    expected = sklearn_metrics.cohen_kappa_score(
        grade[labels], grade[probabilities.argmax(axis=1)], weights="quadratic"
    )
    assert found["quadratic_kappa"]["value"] == pytest.approx(expected)


def test_a_patient_with_two_diseases_has_no_one_answer():
    evaluated = Evaluated(
        np.array([0, 1, 1, 1]), np.array([[1, 0], [0.4, 0.6], [0.9, 0.1], [0.2, 0.8]]), ("x", "x", "y", "y")
    )
    patients, n_mixed = by_patient(evaluated)
    assert n_mixed == 1
    assert patients.labels.tolist() == [1]
    np.testing.assert_allclose(patients.probabilities, [[0.55, 0.45]])


def test_columns_become_subgroups():
    found, notes = subgroups(
        {
            "age": ["19", "20", "85.0", "", "41", "42", "43", "44"],
            "site": ["arm", "leg ", "arm", "", "leg", "leg", "leg", "leg"],
            "thickness": [str(v) for v in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)],
            "constant": ["x"] * 8,
            "stage": ["1", "2", "3", "1", "2", "3", "1", "2"],
        }
    )
    ages = ["below 20", "20 to below 40", "80 and more", "unknown", *["40 to below 60"] * 4]
    assert found["age"] == ages
    assert in_order(ages) == ["below 20", "20 to below 40", "40 to below 60", "80 and more", "unknown"]
    assert in_order(["leg", "unknown", "arm", "leg"]) == ["arm", "leg", "unknown"]
    assert in_order(["10", "9"]) == ["9", "10"]
    assert found["site"] == ["arm", "leg", "arm", "unknown", "leg", "leg", "leg", "leg"]
    assert sorted({value: found["thickness"].count(value) for value in found["thickness"]}.values()) == [
        2,
        2,
        2,
        2,
    ]
    assert found["stage"] == ["1", "2", "3", "1", "2", "3", "1", "2"]
    assert "constant" not in found
    assert notes == []
    found, notes = subgroups({"name": ["Ann", "Bob", "Cy", "Di", "Ed", "Ed"]})
    assert found == {}
    assert notes == ["The column 'name' has 5 different values: too many for subgroups."]


def test_the_page_and_the_tables_hold_the_figures(skin, manifest, tmp_path):
    evaluation = evaluate(skin, manifest, out=tmp_path / "out", draws=30, execution=CPU)
    page = (tmp_path / "out" / "evaluation.html").read_text()
    text = (tmp_path / "out" / "evaluation.md").read_text()
    accuracy = evaluation.content["by_image"]["accuracy"]
    said = f"{100 * accuracy['value']:.1f}% ({100 * accuracy['low']:.1f}% to {100 * accuracy['high']:.1f}%)"
    assert said in text
    assert said.replace(" (", "<br><small>").replace(")", "</small>") in page
    for content in (page, text):
        assert "does not know cyst" in content
        assert "not a medical device" in content
    assert "src=" not in page.split("<script", 1)[0]
    assert '"reliability"' in page


def test_hostile_names_stay_text(state, tmp_path):
    from dataclasses import replace

    names = ("<script>alert(1)</script>", "a|b", "*c*")
    skin = write_model(tmp_path / "model", replace(state, class_names=names))
    rows = [["path", "label", "<b>site</b>"]]
    for i, pixels in enumerate(random_images(9, seed=4)):
        write_png(tmp_path / "data" / f"{i}.png", pixels)
        rows.append([f"{i}.png", names[i % 3], ["<img src=x>", "leg"][i % 2]])
    with (tmp_path / "data" / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    evaluate(skin, tmp_path / "data", out=tmp_path / "out", draws=5, execution=CPU)
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    text = (tmp_path / "out" / "evaluation.md").read_text()
    assert "<script>" not in text
    assert r"a\|b" in text


def test_without_the_extra_there_is_no_page(skin, manifest, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    evaluate(skin, manifest, out=tmp_path / "out", draws=0, execution=CPU)
    assert (tmp_path / "out" / "evaluation.md").exists()
    assert not (tmp_path / "out" / "evaluation.html").exists()
