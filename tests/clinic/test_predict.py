import csv
import io
import json
import math
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.clinic.calibration import abstention_sentence, operating_points
from medcil.clinic.predict import predict
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.errors import DamagedFile, InvalidInput
from medcil.metrics.intervals import wilson
from medcil.training.inference import predict_scores

from ..errors.raises import raises
from ..small import SIDE, random_images
from .generated import reseal
from .tiny_model import COUNTS, NAMES, tiny_state, write_model, write_png

CPU = ExecutionConfig(device="cpu")


@pytest.fixture
def folder(tmp_path):
    """Five images; lossless and of the model's own size, so that their pixels are known."""
    pixels = random_images(5, seed=3)
    for i, each in enumerate(pixels):
        write_png(tmp_path / "new" / f"{i}.png", each)
    return tmp_path / "new"


def scores_of(state, pixels):
    samples = Samples(TensorImages(pixels), torch.zeros(len(pixels), dtype=torch.int64))
    return predict_scores(state, samples, CPU).double().numpy()


def by_hand(state, skin, pixels, prior):
    """Bayes' rule, number by number."""
    calibration = json.loads((skin / "versions/v1/calibration.json").read_text())
    rows = []
    for scores in scores_of(state, pixels):
        joint = [
            share * math.exp((score - log_prior) / calibration["temperature"])
            for score, log_prior, share in zip(
                scores, calibration["class_prior_in_scores"], prior, strict=True
            )
        ]
        rows.append([value / sum(joint) for value in joint])
    return np.array(rows)


@pytest.mark.parametrize("prior", ["uniform", "training", "clinic.yaml", "clinic.csv"])
def test_probabilities_are_those_of_bayes_rule(skin, state, folder, tmp_path, prior):
    clinic = {"nevus": 0.9, "wart": 0.06, "melanoma": 0.04}
    (tmp_path / "clinic.yaml").write_text(json.dumps(clinic))
    (tmp_path / "clinic.csv").write_text("class;share\n" + "".join(f"{k};{v}\n" for k, v in clinic.items()))
    shares = {"uniform": [1 / 3] * 3, "training": [count / 100 for count in COUNTS]}
    given = prior if prior in shares else tmp_path / prior
    found = predict(skin, folder, prior=given, execution=CPU)
    expected = by_hand(state, skin, random_images(5, seed=3), shares.get(prior, [0.04, 0.9, 0.06]))
    np.testing.assert_allclose([row.probabilities for row in found.rows], expected, atol=1e-6)
    assert [row.predicted for row in found.rows] == [NAMES[c] for c in expected.argmax(axis=1)]
    assert found.prior.name == prior
    assert [row.file for row in found.rows] == [str(folder / f"{i}.png") for i in range(5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("melanoma: 0.5\nnevus: 0.5\n", "no share for 'wart'"),
        ("melanoma: 0.5\nnevus: 0.4\nwart: 0.1\nmelanom: 0\n", "Did you mean 'melanoma'"),
        ("melanoma: 50\nnevus: 40\nwart: 10\n", "Are these percent"),
        ("melanoma: 0.5\nnevus: 0.4\nwart: 0.2\n", "sum to 1.1"),
        ("melanoma: 1.1\nnevus: -0.2\nwart: 0.1\n", "'nevus' is '-0.2'"),
        ("melanoma: much\nnevus: 0.4\nwart: 0.1\n", "'melanoma' is 'much'"),
        ("- 0.5\n- 0.5\n", "holds no shares"),
        ("melanoma: [\n", "cannot be read"),
        ("melanoma: 0.5\nnevus: 0.4\nwart: 0.1\nnevus: 0.4\n", "line 4: duplicate key 'nevus'"),
        (
            "melanoma: !!python/object/apply:os.system [true]\nnevus: 0\nwart: 0\n",
            "cannot be read",
        ),
    ],
)
def test_a_prior_that_makes_no_sense_is_refused(skin, folder, tmp_path, content, message):
    (tmp_path / "prior.yaml").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        predict(skin, folder, prior=tmp_path / "prior.yaml", execution=CPU)


def test_bad_files_become_rows_and_change_no_other(skin, folder):
    sound = predict(skin, folder, execution=CPU)
    first = (folder / "0.png").read_bytes()
    (folder / "0-cut.png").write_bytes(first[: len(first) // 2])
    (folder / "1-text.png").write_text("no image at all")
    (folder / "2-empty.jpg").touch()
    (folder / "3-dicom.dcm").write_bytes(bytes(128) + b"DICM" + b"rubbish")
    (folder / "4-gone.png").symlink_to(folder / "nowhere.png")
    (folder / "notes.txt").write_text("not looked at")
    found = predict(skin, folder, execution=CPU)
    bad = {row.file.rsplit("/", 1)[1]: row for row in found.rows if row.error is not None}
    assert set(bad) == {"0-cut.png", "1-text.png", "2-empty.jpg", "3-dicom.dcm", "4-gone.png"}
    assert all(row.predicted is None and row.probabilities == () for row in bad.values())
    assert "none of JPEG, PNG" in bad["1-text.png"].error
    read = [row for row in found.rows if row.error is None]
    assert [row.file for row in read] == [row.file for row in sound.rows]
    for row, expected in zip(read, sound.rows, strict=True):
        assert row.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    assert any("5 of 10 files cannot be read" in note for note in found.notes)


def test_every_row_of_500_is_read_back_equal(skin, state, tmp_path):
    pixels = random_images(500, seed=8)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i, each in enumerate(pixels):
            image = io.BytesIO()
            Image.fromarray(each.permute(1, 2, 0).numpy()).save(image, "PNG")
            archive.writestr(f"a, b/{i:03}.png", image.getvalue())
    (tmp_path / "many.zip").write_bytes(buffer.getvalue())
    expected = by_hand(state, skin, pixels, [1 / 3] * 3)
    middle = float(np.median(expected.max(axis=1)))
    seen = []
    found = predict(
        skin,
        tmp_path / "many.zip",
        out=tmp_path / "out" / "predictions.csv",
        top_k=2,
        sensitivity={"wart": 0.9},
        abstain_below=middle,
        execution=CPU,
        watch=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(128, 500), (256, 500), (384, 500), (500, 500)]
    with (tmp_path / "out" / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.rows) == 500
    for i, (row, shares) in enumerate(zip(rows, expected, strict=True)):
        order = sorted(range(3), key=lambda c: -shares[c])
        assert row["file"] == f"{tmp_path}/many.zip/a, b/{i:03}.png"
        assert (row["predicted"], row["top_2"]) == (NAMES[order[0]], NAMES[order[1]])
        assert float(row["probability"]) == pytest.approx(shares[order[0]], abs=2e-6)
        assert float(row["top_2_probability"]) == pytest.approx(shares[order[1]], abs=2e-6)
        assert [float(row[f"p({name})"]) for name in NAMES] == pytest.approx(list(shares), abs=2e-6)
        if abs(shares[order[0]] - middle) > 1e-6:
            assert row["abstained"] == ("yes" if shares[order[0]] < middle else "no")
        assert row["flag(wart)"] == ("yes" if shares[2] >= found.operating_points[0].threshold else "no")
        assert (row["prior"], row["version"], row["error"]) == ("uniform", "v1", "")
    assert {row["abstained"] for row in rows} == {"yes", "no"}
    assert {row["flag(wart)"] for row in rows} == {"yes", "no"}
    again = predict(skin, tmp_path / "many.zip", out=tmp_path / "again.csv", top_k=2, execution=CPU)
    assert [row.probabilities for row in again.rows] == [row.probabilities for row in found.rows]


def test_images_are_found_by_name_by_pattern_and_once(skin, folder):
    (folder / "deeper").mkdir()
    shutil.move(folder / "4.png", folder / "deeper" / "4.png")
    found = predict(skin, [folder / "2.png", str(folder / "**" / "*.png")], execution=CPU)
    names = [row.file.removeprefix(f"{folder}/") for row in found.rows]
    assert names == ["2.png", "0.png", "1.png", "3.png", "deeper/4.png"]


def test_what_is_not_there_is_said(skin, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for images, message in (
        (tmp_path / "empty", "holds no images"),
        (folder / "*.dcm", "No file matches"),
        (tmp_path / "nwe", "Did you mean 'new'"),
        ([], "No images were named"),
    ):
        with pytest.raises(InvalidInput, match=message):
            predict(skin, images, execution=CPU)
    with pytest.raises(InvalidInput, match="is no model folder"):
        predict(tmp_path / "empty", folder, execution=CPU)
    with pytest.raises(InvalidInput, match="no version 'v9'"):
        predict(skin, folder, version="v9", execution=CPU)
    with pytest.raises(InvalidInput, match="Did you mean 'melanoma'"):
        predict(skin, folder, sensitivity={"melanom": 0.9}, execution=CPU)
    with pytest.raises(InvalidInput, match="neither `uniform` nor `training`"):
        predict(skin, folder, prior="unifrom", execution=CPU)
    blocker = tmp_path / "file"
    blocker.touch()
    with raises("output.not_a_folder"):
        predict(skin, folder, out=blocker / "x.csv", execution=CPU)


def test_a_model_without_calibration_is_damaged(skin, folder, tmp_path):
    copy = shutil.copytree(skin, tmp_path / "copy")
    (copy / "versions/v1/calibration.json").unlink()
    with pytest.raises(DamagedFile, match=r"calibration\.json is missing"):
        predict(copy, folder, execution=CPU)


def test_what_is_far_from_every_class_is_flagged(state, tmp_path):
    """An image just below the threshold, and just above it."""
    skin = write_model(tmp_path / "model", state)
    path = skin / "versions/v1/calibration.json"
    content = json.loads(path.read_text())
    write_png(tmp_path / "new" / "x.png", random_images(1, seed=1)[0])
    likeness = predict(skin, tmp_path / "new", execution=CPU).rows[0].likeness
    for threshold, expected in ((likeness - 1e-3, False), (likeness + 1e-3, True)):
        content["unlike"]["threshold"] = threshold
        path.write_text(json.dumps(content))
        reseal(skin)
        found = predict(skin, tmp_path / "new", execution=CPU)
        assert found.rows[0].is_unlike is expected
        assert any("up to 5% are falsely called so (set on the hold-out)" in note for note in found.notes)
    content["unlike"]["measured_on"] = "eval"
    path.write_text(json.dumps(content))
    reseal(skin)
    notes = predict(skin, tmp_path / "new", execution=CPU).notes
    assert any("(set on the images of --eval)" in note for note in notes)
    content["class_prior_in_scores"] = [0.0, 0.0]
    path.write_text(json.dumps(content))
    reseal(skin)
    with pytest.raises(DamagedFile, match="not of this version's classes"):
        predict(skin, tmp_path / "new", execution=CPU)


def test_an_operating_point_is_what_the_holdout_supports():
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], [40, 60])
    probabilities = generator.beta(2, 2, size=100)
    both = np.stack([probabilities, 1 - probabilities], axis=1)
    point = operating_points(both, labels, ("a", "b"), {"a": 0.9})[0]
    own = sorted(probabilities[:40])
    assert point.threshold == pytest.approx(own[3], abs=1e-8)  # floor(0.1 * 41) = 4th smallest
    rejected = sum(p < own[3] for p in probabilities[40:])
    assert f"specificity {100 * rejected / 60:.0f}%" in point.sentence
    low, high = wilson(37, 40)
    assert f"37 of 40 of its hold-out images ({100 * low:.0f}% to {100 * high:.0f}%)" in point.sentence
    assert "at most" not in point.sentence
    high_point = operating_points(both, labels, ("a", "b"), {"a": 0.99})[0]
    assert "40 of 40 of its hold-out images" in high_point.sentence
    assert "40 images support a sensitivity of 0.976 at most, not 0.99; that takes 99" in high_point.sentence
    with pytest.raises(InvalidInput, match="no image of 'c'"):
        operating_points(np.eye(3)[labels], labels, ("a", "b", "c"), {"c": 0.9})


def test_an_operating_point_counts_patients():
    probabilities = np.repeat([0.1, 0.3, 0.5, 0.7], 2)
    both = np.stack([probabilities + np.tile([0, 0.05], 4), np.zeros(8)], axis=1)
    groups = tuple("aabbccdd")
    point = operating_points(both, np.zeros(8, dtype=np.int64), ("x", "y"), {"x": 0.6}, groups)[0]
    assert point.threshold == pytest.approx(0.3, abs=1e-8)  # 0.4 * 5 - 1 = one patient may lie below
    low, high = wilson(3, 4)
    assert (
        f"6 of 8 of its hold-out images, of 4 patients ({100 * low:.0f}% to {100 * high:.0f}%)"
        in point.sentence
    )
    too_much = operating_points(both, np.zeros(8, dtype=np.int64), ("x", "y"), {"x": 0.9}, groups)[0]
    assert "4 patients support a sensitivity of 0.8 at most, not 0.9; that takes 9" in too_much.sentence


def test_images_of_a_patient_leave_as_much_doubt_as_one():
    probabilities, labels = np.array([[0.9, 0.1]] * 4 + [[0.2, 0.8]] * 8), np.repeat([0, 1], [4, 8])
    alike = tuple("abcd") + ("e",) * 8
    low = f"{100 * wilson(1, 1)[0]:.0f}%"
    point = operating_points(probabilities, labels, ("x", "y"), {"x": 0.5}, alike)[0]
    assert f"specificity 100% ({low} to 100%)" in point.sentence
    n = 12**2 / (8**2 + 4)  # Kish: eight images of one patient, and four of four
    said = abstention_sentence(probabilities, labels, 0.5, alike)
    assert f"100% are right ({100 * wilson(n, n)[0]:.0f}% to 100%)" in said


def test_a_model_counts_patients_where_it_knows_them(of_patients, tmp_path):
    """Of each class three images of one patient are sealed: one answer, not three."""
    found = predict(of_patients / "model", of_patients / "second", sensitivity={"alpha": 0.5}, execution=CPU)
    assert any("3 of 3 of its hold-out images, of 1 patients" in note for note in found.notes)
    assert any("The fewest patients of a class, 1, do not suffice" in note for note in found.notes)
    assert any("up to 50% are falsely called so (set on the hold-out)" in note for note in found.notes)


def test_the_wanted_sensitivity_is_kept_on_further_images():
    generator = np.random.default_rng(5)
    kept = []
    for _ in range(400):
        own = generator.random(30)
        both = np.stack([own, 1 - own], axis=1)
        point = operating_points(both, np.zeros(30, dtype=np.int64), ("a", "b"), {"a": 0.8})[0]
        kept.append(1 - point.threshold)  # of uniform probabilities
    assert np.mean(kept) == pytest.approx(1 - 6 / 31, abs=4 * np.std(kept) / 20)
    assert np.mean(kept) > 0.8


def test_abstaining_is_told_by_what_it_does_to_the_holdout():
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.45, 0.55]])
    said = abstention_sentence(probabilities, np.array([0, 1, 1, 0]), 0.7)
    assert "2 of 4 hold-out images. Of the others 100% are right" in said
    assert said.endswith("of all 50%.")


def test_nearest_mean_models_predict_too(tmp_path):
    state = tiny_state(readout="nearest_mean")
    skin = write_model(tmp_path / "model", state)
    pixels = random_images(3, seed=2)
    for i, each in enumerate(pixels):
        write_png(tmp_path / "new" / f"{i}.png", each)
    found = predict(skin, tmp_path / "new", execution=CPU)
    expected = by_hand(state, skin, pixels, [1 / 3] * 3)
    np.testing.assert_allclose([row.probabilities for row in found.rows], expected, atol=1e-6)
    assert [row.predicted for row in found.rows] == [
        NAMES[c] for c in scores_of(state, pixels).argmax(axis=1)
    ]


def test_a_larger_image_is_resized_as_in_training(skin, state, tmp_path):
    write_png(tmp_path / "large.png", random_images(1, side=3 * SIDE, seed=4)[0])
    with Image.open(tmp_path / "large.png") as image:
        small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None]
    found = predict(skin, tmp_path / "large.png", execution=CPU)
    expected = by_hand(state, skin, pixels, [1 / 3] * 3)
    np.testing.assert_allclose(found.rows[0].probabilities, expected[0], atol=1e-6)


def test_an_exported_file_is_opened_without_torch():
    code = "import sys, medcil.clinic.predict; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_rows_can_be_written_again(skin, folder, tmp_path):
    found = predict(skin, folder, execution=CPU)
    replace(found, top_k=9).write_csv(tmp_path / "a.csv")
    header, *rows = list(csv.reader((tmp_path / "a.csv").read_text().splitlines()))
    assert [name for name in header if name.startswith("top_")] == [
        f"top_{k}{end}" for k in (2, 3) for end in ("", "_probability")
    ]
    assert all(len(row) == len(header) for row in rows)
