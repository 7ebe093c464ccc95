"""Names in a recipe become things, or an error that says what to do."""

import csv
import io
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from medcil.build import (
    RunConfig,
    arrangement,
    build_method,
    build_state,
    build_stream,
    load_recipe,
    method_settings,
    parse_recipe,
    register,
    resolve,
)
from medcil.data import image_table, sources, splits
from medcil.data.cache import prepare
from medcil.data.sources import find_dataset, open_dataset, phantom
from medcil.data.sources.folder import read_own
from medcil.errors import DamagedFile, InvalidInput
from medcil.experiments.run import run_experiment
from medcil.methods import METHODS, PRESETS
from medcil.methods.balanced import Balanced
from medcil.methods.finetune import Finetune
from medcil.methods.podnet import PODNet
from medcil.methods.protocol import Increment, Method, Phase
from medcil.models.network import Network

from .errors.raises import raises

RECIPE = {
    "data": {"name": "phantom", "side": 12, "crop": 8},
    "scenario": {"base": 3, "increment": 2},
    "method": {"name": "balanced"},
}
GENTLE = {
    "method": {"alpha": 0.7, "margin_weight": 0.2},
    "training": {"epochs": 70, "learning_rates": {"classifier": 2.0, "backbone": 1.0}},
    "memory": {"total": 2000},
    "first_task": {"epochs": 5},
}


@dataclass(frozen=True)
class Around:
    """A method with a method in it."""

    base: Method = Balanced(alpha=0.9)  # noqa: RUF009  # a frozen one
    share: float = 0.5
    readout: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        yield from self.base.learn(network, increment)


@pytest.fixture
def _around(monkeypatch):
    monkeypatch.setitem(METHODS, "around", Around)


@pytest.fixture
def _presets(monkeypatch):
    presets = {"gentle": GENTLE, "harsh": {"method": {"alpha": 0.1}}}
    monkeypatch.setitem(PRESETS, "balanced", presets)
    monkeypatch.setitem(PRESETS, "finetune", {"gentle": {"training": {"epochs": 3}}})
    monkeypatch.delitem(PRESETS, "replay", raising=False)


def config(**changes) -> RunConfig:
    return RunConfig.model_validate({**RECIPE, **changes})


def test_milestones_of_the_first_task_need_a_schedule_that_has_some():
    first_task = {"epochs": 2, "milestones": [0.5]}
    with pytest.raises(InvalidInput, match=r"^first_task.milestones: a cosine schedule has none; leave them"):
        resolve(config(training={"schedule": "cosine"}, first_task=first_task))
    assert resolve(config(first_task=first_task)).first_task.milestones == (0.5,)
    cosine = resolve(config(training={"schedule": "cosine"}, first_task={"epochs": 2, "milestones": None}))
    assert cosine.first_task.epochs == 2


def test_a_method_is_built_from_its_fields():
    assert build_method({"name": "balanced", "alpha": 0.7, "sampler": None}) == Balanced(
        alpha=0.7, sampler=None
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "balnced"}, r"no method 'balnced'. Did you mean 'balanced'\?"),
        ({"name": "balanced", "alhpa": 1}, r"unknown key 'method.alhpa' of balanced. Did you mean 'alpha'\?"),
        ({"name": "balanced", "alpha": 2}, r"^method\.alpha: .*less than or equal to 1"),
        ({"name": "balanced", "distillation": "l3"}, r"method.distillation"),
        ({"name": "balanced", "margin": "none"}, r"unknown key 'method.margin' of balanced. Did you mean"),
    ],
)
def test_a_wrong_method_is_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        build_method(settings)


def test_the_resolved_recipe_holds_every_default_of_its_method():
    resolved = resolve(config())
    assert resolved.label == "balanced"
    assert method_settings(resolved.method) == method_settings(Balanced())
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": {"base": 3, "increment": 2, "order": 3}}, "has orders 0..2, not 3"),
        ({"scenario": {"base": 3, "increment": 2, "order": [0, 1]}}, "must name each of 0..6"),
        ({"scenario": {"base": 9, "increment": 2}}, "only 7 classes"),
        ({"memory": {"total": 6}}, "less than 7 classes"),
        ({"data": {"name": "phantm"}}, "Did you mean 'phantom'"),
    ],
)
def test_an_impossible_scenario_is_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(config(**changes))


def test_a_stream_follows_the_order_of_the_recipe():
    stream = build_stream(config(scenario={"base": 4, "increment": 2, "order": [6, 5, 4, 3, 2, 1, 0]}))
    names = find_dataset("phantom").class_names
    assert stream.sizes == (4, 2, 1)
    assert [task.class_names for task in stream.tasks()] == [names[:2:-1], names[2:0:-1], names[:1]]
    assert arrangement(config(), find_dataset("phantom"))[0] == find_dataset("phantom").orders[0]


@pytest.mark.usefixtures("_around")
@pytest.mark.parametrize(
    ("base", "built"),
    [
        ("finetune", Finetune()),
        ({"name": "finetune"}, Finetune()),
        ({"name": "balanced", "temperature": "0.5"}, Balanced(temperature=0.5)),
        ({"name": "around", "base": "finetune"}, Around(base=Finetune())),
        ({"temperature": 0.5}, Balanced(alpha=0.9, temperature=0.5)),
        ({}, Balanced(alpha=0.9)),
        ({"name": "around", "base": {"temperature": 0.5}}, Around(base=Balanced(alpha=0.9, temperature=0.5))),
    ],
)
def test_a_method_can_hold_a_method(base, built):
    method = build_method({"name": "around", "base": base, "share": 1})
    assert method == Around(base=built, share=1.0)
    assert build_method(method_settings(method)) == method


def test_a_method_without_a_method_to_begin_with_needs_its_name(monkeypatch):
    @dataclass(frozen=True)
    class AroundAny:
        base: Method
        readout: str = "classifier"
        learn = Around.learn

    monkeypatch.setitem(METHODS, "around any", AroundAny)
    with pytest.raises(InvalidInput, match=r"method\.base has no name"):
        build_method({"name": "around any", "base": {"alpha": 0.5}})


@pytest.mark.usefixtures("_around")
def test_a_method_held_by_default_is_written_out():
    settings = method_settings(build_method({"name": "around"}))
    assert list(settings) == ["name", "base", "share", "readout"]
    assert settings["base"] == method_settings(Balanced(alpha=0.9))
    assert settings["base"]["name"] == "balanced"


@pytest.mark.usefixtures("_around")
@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("balnced", r"method\.base\.name: there is no method 'balnced'. Did you mean 'balanced'\?"),
        ({"alhpa": 0.5}, r"unknown key 'method\.base\.alhpa' of balanced. Did you mean 'alpha'\?"),
        (5, r"method\.base has no name"),
        ({"name": 5}, r"method\.base\.name: there is no method 5"),
        ({"name": "balanced", "alhpa": 1}, r"unknown key 'method\.base\.alhpa'.*Did you mean 'alpha'\?"),
        ({"name": "balanced", "margin_size": "many"}, r"method\.base\.margin_size: .*\(got 'many'\)"),
        ({"name": "balanced", "alpha": float("nan")}, r"method\.base\.alpha: .*finite number"),
        ({"name": "around", "base": {"name": "finetune", "x": 1}}, r"unknown key 'method\.base\.base\.x'"),
        ({"name": "balanced", "plugins": {"drop": ["margin"]}}, r"unknown key 'method\.base\.plugins'"),
        ({"name": "balanced", "preset": "gentle"}, r"unknown key 'method\.base\.preset'"),
    ],
)
def test_a_wrong_method_in_a_method_is_named_by_its_path(base, message):
    with pytest.raises(InvalidInput, match=message):
        build_method({"name": "around", "base": base})


def test_the_settings_of_a_method_outside_the_table_are_refused():
    with pytest.raises(LookupError, match="Around is not in"):
        method_settings(Around())


@pytest.mark.usefixtures("_presets")
def test_a_preset_in_a_recipe_lies_beneath_it():
    content = {**RECIPE, "method": {"name": "balanced", "preset": "gentle", "alpha": 0.4}}
    content["training"] = {"learning_rates": {"classifier": 0.3}}
    found = parse_recipe(content, ["training.epochs=8"])
    assert (found.method.alpha, found.method.margin_weight) == (0.4, 0.2)
    rates = found.training.learning_rates
    assert (found.training.epochs, rates.classifier, rates.backbone) == (8, 0.3, 1.0)
    assert (found.memory.total, found.first_task.epochs) == (2000, 5)


@pytest.mark.usefixtures("_presets")
def test_a_preset_of_a_setting_lies_over_the_recipe_and_beneath_the_settings():
    content = {
        **RECIPE,
        "method": {"name": "balanced", "alpha": 0.4, "margin_size": 0.5},
        "memory": {"per_class": 5},
    }
    content["training"] = {"epochs": 9, "decay": 0.5}
    found = parse_recipe(content, ["method.margin_weight=0.3", "method.preset=gentle", "seed=4"])
    assert found.method == Balanced(alpha=0.7, margin_size=0.5, margin_weight=0.3)
    assert (found.training.epochs, found.training.decay, found.seed) == (70, 0.5, 4)
    assert (found.memory.per_class, found.memory.total) == (None, 2000)


@pytest.mark.usefixtures("_presets")
@pytest.mark.parametrize(
    ("settings", "alpha", "epochs"),
    [
        ([], 0.7, 70),
        (["method.name=balanced"], 0.7, 70),
        (["method.preset=gentle"], 0.7, 70),
        (["method.preset=harsh"], 0.1, 100),
        (["method={name: balanced, preset: harsh}"], 0.1, 100),
        (["method.preset=null"], 0.5, 100),
        (["method={name: balanced}"], 0.5, 100),
        (["method=balanced"], 0.5, 100),
        (["method=finetune"], None, 100),
        (["method.name=finetune"], None, 100),
        (["method.name=finetune", "method.preset=gentle"], None, 3),
        (["method={name: finetune, preset: gentle}", "training.epochs=4"], None, 4),
        (["method.name=replay"], None, 100),
    ],
)
def test_only_the_preset_named_last_counts(settings, alpha, epochs):
    content = {**RECIPE, "method": {"name": "balanced", "preset": "gentle"}}
    found = parse_recipe(content, settings)
    assert getattr(found.method, "alpha", None) == alpha
    assert found.training.epochs == epochs
    assert found.memory.total == (2000 if alpha == 0.7 else None)


@pytest.mark.usefixtures("_presets")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.preset=gentl"], r"method\.preset: balanced has no preset 'gentl'. Did you mean 'gentle'\?"),
        (["method.preset=xyz"], r"balanced has no preset 'xyz'. Known: gentle, harsh\."),
        (["method.preset=[gentle]"], r"balanced has no preset \['gentle'\]"),
        (["method.name=replay", "method.preset=gentle"], r"replay has no presets: leave the key out"),
        (["method.name=balancd", "method.preset=gentle"], r"Did you mean 'balanced'\?"),
        (["method={preset: gentle}"], r"method has no name"),
        (["method=5", "method.preset=gentle"], r"method has no name"),
    ],
)
def test_an_unknown_preset_is_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        parse_recipe(RECIPE, settings)


@pytest.mark.usefixtures("_presets")
def test_a_configuration_without_its_presets_applied_is_refused():
    with pytest.raises(InvalidInput, match=r"unknown key 'method\.preset' of balanced"):
        config(method={"name": "balanced", "preset": "gentle"})


@pytest.mark.usefixtures("_presets", "_around")
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["method.preset=gentle"],
        ["method.preset=gentle", "method.alpha=0.2", "memory.per_class=7", "first_task.epochs=null"],
        ["method.preset=gentle", "method.plugins.classification=focal"],
        ["method.preset=plugged"],
        ["method.preset=plugged", "method.plugins=null"],
        ["method.preset=plugged", "method.plugins.margin=null", "method.plugins.drop=[]"],
        ["method.preset=plugged", "method.plugins.margin=ranking"],
        ["method.name=around", "method.preset=nested"],
        ["method.name=around", "method.preset=nested", "method.base=finetune"],
    ],
)
def test_a_resolved_recipe_is_the_same_run_again(tmp_path, monkeypatch, settings):
    plugged = {
        "method": {"plugins": {"margin": {"kind": "vanilla", "weight": 0.3}, "drop": ["distillation"]}}
    }
    monkeypatch.setitem(PRESETS, "balanced", {"gentle": GENTLE, "plugged": plugged})
    nested = {"method": {"base": {"name": "balanced", "alpha": 0.2}}}
    monkeypatch.setitem(PRESETS, "around", {"nested": nested})
    before = resolve(parse_recipe(RECIPE, settings))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(before.model_dump(mode="json")))
    again = resolve(load_recipe(path))
    assert again == before
    assert again.identity() == before.identity()


def test_a_recipe_in_a_file_is_a_recipe_in_a_dictionary(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    assert load_recipe(path, ["seed=4"]) == parse_recipe(RECIPE, ["seed=4"])
    with pytest.raises(InvalidInput, match=r"^.*recipe\.yaml: unknown key 'sed'"):
        load_recipe(path, ["sed=4"])


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in PRESETS for preset in PRESETS[name]])
def test_every_preset_fits_its_method(name, preset):
    assert not {"name", "preset"} & set(PRESETS[name][preset].get("method", {}))
    resolved = resolve(parse_recipe({**RECIPE, "method": {"name": name, "preset": preset}}))
    for key, value in PRESETS[name][preset].get("method", {}).items():
        if not isinstance(value, dict):
            assert method_settings(resolved.method)[key] == value


OWN_CLASSES = ("eczema", "melanoma", "nevus", "psoriasis", "wart")
N_IMAGES = 6


def own_images() -> dict[str, bytes]:
    """Five classes of tiny noisy pictures, each of a color of its own."""
    rng, contents = np.random.default_rng(0), {}
    for c, name in enumerate(OWN_CLASSES):
        color = np.array([50 * c, 250 - 50 * c, 120 * (c % 2)])
        for i in range(N_IMAGES):
            pixels = np.clip(color + rng.integers(-30, 30, size=(12, 12, 3)), 0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format="PNG")
            contents[f"{name}/{i}.png"] = buffer.getvalue()
    return contents


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own") / "images"
    for name, content in own_images().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def manifest_of(folder: Path, column: str = "", value=lambda name: "") -> Path:
    """A manifest in the folder itself, its rows upside down."""
    path = folder / "list.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", *([column] if column else [])])
        for name in sorted(own_images(), reverse=True):
            writer.writerow([name, name.split("/")[0], *([value(name)] if column else [])])
    return path


@pytest.fixture
def listed(own_folder, tmp_path):
    """Makes a copy of the images with a manifest."""

    def make(column: str = "", value=lambda name: "") -> Path:
        copied = shutil.copytree(own_folder, tmp_path / f"listed {column}")
        return manifest_of(copied, column, value)

    return make


def own_config(root: Path, *settings: str) -> RunConfig:
    content = {
        "data": {"name": "own", "root": str(root), "side": 12, "crop": 8, "split": "images"},
        "scenario": {"base": 3, "increment": 2},
        "network": {"backbone": "resnet8_cifar"},
        "memory": {"per_class": 2},
        "training": {"epochs": 2, "batch_size": 8},
        "method": {"name": "balanced"},
        "execution": {"device": "cpu", "threads": 1},
    }
    return parse_recipe(content, settings)


def test_the_same_images_as_folder_manifest_and_zip_give_the_same_run(own_folder, listed, tmp_path):
    packed = tmp_path / "images.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in own_images().items():
            archive.writestr(f"images/{name}", content)
    in_folder = run_experiment(own_config(own_folder), tmp_path / "folder")
    assert in_folder["finished"]
    assert in_folder["class_names"] == list(OWN_CLASSES)
    assert in_folder["task_sizes"] == [3, 2]
    assert in_folder["split"] == "images"
    assert in_folder["inherent_counts"] == [5] * 5
    assert in_folder["dataset"] == "own"
    assert run_experiment(own_config(listed()), tmp_path / "manifest") == in_folder
    assert run_experiment(own_config(packed), tmp_path / "zip") == in_folder
    # A run goes on wherever its images lie by now.
    assert run_experiment(own_config(packed), tmp_path / "folder") == in_folder


def test_a_prepared_store_is_used_without_decoding(own_folder, tmp_path, monkeypatch):
    catalog = read_own(own_folder)
    prepare(catalog, tmp_path / "store", side=12)
    decoded = run_experiment(own_config(own_folder), tmp_path / "decoded")
    with monkeypatch.context() as patched:
        patched.setattr(sources, "read_own", lambda path: pytest.fail("the images were listed again"))
        assert run_experiment(own_config(tmp_path / "store"), tmp_path / "prepared") == decoded
    with pytest.raises(InvalidInput, match="were prepared with side 12, but side 16 is needed"):
        build_stream(own_config(tmp_path / "store", "data.side=16"))
    with pytest.raises(InvalidInput, match=r"was prepared as own, but data\.name is ham10000"):
        build_stream(own_config(tmp_path / "store", "data.name=ham10000"))
    prepare(replace(catalog, dataset="ham10000"), tmp_path / "other", side=12)
    with pytest.raises(InvalidInput, match=r"has other classes \(eczema, melanoma, nevus, ...\)"):
        build_stream(own_config(tmp_path / "other", "data.name=ham10000"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "progress.jsonl").write_text("")
    with pytest.raises(InvalidInput, match="half is not finished"):
        build_stream(own_config(tmp_path / "half"))


def test_a_store_is_taken_for_the_dataset_it_was_prepared_as_and_no_other(own_folder, tmp_path):
    """Five classes alike, as of APTOS 2019, EyePACS and RetinaMNIST."""
    grades = find_dataset("aptos2019").class_names
    catalog = replace(read_own(own_folder), class_names=grades, dataset="aptos2019")
    prepare(catalog, tmp_path / "store", side=12)
    for accepted in ("aptos2019", "own"):
        stream = build_stream(own_config(tmp_path / "store", f"data.name={accepted}"))
        assert stream.class_names == grades
    for other in ("eyepacs", "retinamnist"):
        assert find_dataset(other).class_names == grades
        with pytest.raises(InvalidInput, match=f"was prepared as aptos2019, but data.name is {other}"):
            build_stream(own_config(tmp_path / "store", f"data.name={other}"))


def test_a_changed_byte_of_a_store_is_found_before_the_run_has_a_folder(own_folder, tmp_path):
    prepare(read_own(own_folder), tmp_path / "store", side=12)
    path = tmp_path / "store/pixels.u8"
    content = bytearray(path.read_bytes())
    content[777] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"pixels\.u8 was changed or damaged"):
        run_experiment(own_config(tmp_path / "store"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_patients_are_drawn_alike_from_a_manifest_and_its_store(listed, tmp_path):
    path = listed("patient", lambda name: f"{name.split('/')[0]} of Jane Doe {int(name[-5]) // 2}")
    prepare(read_own(path), tmp_path / "store", side=12)
    for seed in range(4):
        drawn = ["data.split=groups", f"data.split_seed={seed}"]
        one, other = (build_stream(own_config(root, *drawn)) for root in (path, tmp_path / "store"))
        assert torch.equal(one.test.read_all(), other.test.read_all())
        assert torch.equal(one.train.read_all(), other.train.read_all())


def images_of(stream) -> tuple[list[int], list[int]]:
    """How many training and test images each class has."""
    n = len(stream.class_names)
    return stream.train.class_counts(n).tolist(), stream.test.class_counts(n).tolist()


def test_more_images_than_memory_are_decoded_when_they_are_read(own_folder, monkeypatch):
    at_once = build_stream(own_config(own_folder))
    monkeypatch.setattr(image_table, "MEMORY_BYTES", 30 * 3 * 12 * 12 - 1)
    later = build_stream(own_config(own_folder))
    assert type(at_once.train.images.source) is not type(later.train.images.source)
    for split in ("train", "test"):
        one, other = getattr(at_once, split), getattr(later, split)
        assert torch.equal(one.read_all(), other.read_all())
        assert torch.equal(one.labels, other.labels)
    assert images_of(at_once) == ([5] * 5, [1] * 5)


@pytest.mark.parametrize(
    ("settings", "names", "sizes"),
    [
        ([], OWN_CLASSES, (3, 2)),
        (["scenario={steps: [1, 3, 1]}"], OWN_CLASSES, (1, 3, 1)),
        (
            ["scenario.order=[wart, nevus, melanoma, eczema, psoriasis]"],
            ("wart", "nevus", "melanoma", "eczema", "psoriasis"),
            (3, 2),
        ),
        (
            ["scenario.order=[4, nevus, 1, 0, 3]"],
            ("wart", "nevus", "melanoma", "eczema", "psoriasis"),
            (3, 2),
        ),
    ],
)
def test_the_classes_of_own_images_arrive_as_the_recipe_says(own_folder, settings, names, sizes):
    stream = build_stream(own_config(own_folder, *settings))
    assert tuple(stream.class_names[c] for c in stream.order) == names
    assert stream.sizes == sizes
    arrived = [name for task in stream.tasks() for name in task.class_names]
    assert tuple(arrived) == names


def test_an_order_is_drawn_by_its_seed(own_folder):
    order = build_stream(own_config(own_folder, "scenario.order=seed-1993")).order
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert build_stream(own_config(own_folder, "scenario.order=seed-1993")).order == order
    drawn = {build_stream(own_config(own_folder, f"scenario.order=seed-{n}")).order for n in range(9)}
    assert len(drawn) > 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["scenario.order=[wart, nevs, melanoma, eczema, psoriasis]"],
            "no class 'nevs'. Did you mean 'nevus'",
        ),
        (["scenario.order=[wart, nevus]"], r"must name each of 0\.\.4 exactly once"),
        (["scenario.order=1"], r"has orders 0\.\.0, not 1"),
        (["scenario.order=sed-1993"], "'sed-1993' is none; write a number, `seed-1993`"),
        (["scenario={steps: [3, 1]}"], r"scenario.steps \[3, 1\] make 4 classes, but there are 5"),
        (["scenario.base=6"], "only 5 classes"),
        (["memory={total: 4}"], "less than 5 classes"),
        (["data.split=benchmark"], "own images have no benchmark"),
        (["data.split=given"], "no split came with these images"),
        (["data.split=groups"], "nothing says which patient"),
        (["data.root=null"], "data.root is missing"),
        (["data.root=nowhere"], "there is nothing at nowhere"),
    ],
)
def test_what_does_not_fit_own_images_is_refused_before_the_run_has_a_folder(
    own_folder, tmp_path, monkeypatch, settings, words
):
    monkeypatch.setattr(
        image_table.ImageTable, "decode_content", lambda *_: pytest.fail("images were decoded first")
    )
    with pytest.raises(InvalidInput, match=words):
        run_experiment(own_config(own_folder, *settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_image_is_named_before_the_run_has_a_folder(listed, tmp_path):
    manifest = listed()
    (manifest.parent / "nevus" / "3.png").write_bytes(b"no image")
    with pytest.raises(InvalidInput, match=r"nevus/3\.png"):
        run_experiment(own_config(manifest), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_word_the_split_that_came_with_the_images_is_taken(listed):
    path = listed("split", lambda name: "test" if name.endswith(("0.png", "1.png")) else "train")
    stream = build_stream(own_config(path, "data.split=null"))
    assert (stream.split, images_of(stream)) == ("given", ([4] * 5, [2] * 5))
    drawn = build_stream(own_config(path, "data.split=images", "data.split_share=0.5"))
    assert (drawn.split, images_of(drawn)) == ("images", ([3] * 5, [3] * 5))


@pytest.mark.parametrize("rule", ["null", "given"])
def test_patients_on_both_sides_of_a_given_split_are_warned_of(listed, rule):
    """Images 0 and 1 are for testing; of them 1 is of the patient who has 2 and 3."""
    path = listed("patient,split", lambda name: "")
    rows = [["path", "label", "patient", "split"]]
    for name in own_images():
        number = int(name[-5])
        patient = f"{name.split('/')[0]} {(number + 1) // 2}"
        rows.append([name, name.split("/")[0], patient, "test" if number < 2 else "train"])
    path.write_text("\n".join(map(",".join, rows)))
    words = "5 patients or lesions appear on both sides .* 5 of 10 test images have theirs in training"
    with pytest.warns(UserWarning, match=words):
        stream = build_stream(own_config(path, f"data.split={rule}"))
    assert stream.split == "given"
    assert build_stream(own_config(path, "data.split=groups")).split == "groups"


def test_without_a_word_patients_stay_whole(listed):
    """Images 0, 1, 2 of every class are of one patient, 3, 4, 5 of another."""
    path = listed("patient", lambda name: f"{name.split('/')[0]} {int(name[-5]) // 3}")
    stream = build_stream(own_config(path, "data.split=null"))
    assert (stream.split, images_of(stream)) == ("groups", ([3] * 5, [3] * 5))


def test_without_a_word_and_without_patients_single_images_are_held_out_with_a_warning(own_folder):
    with pytest.warns(UserWarning, match="No split and no patients came"):
        stream = build_stream(own_config(own_folder, "data.split=null"))
    assert (stream.split, images_of(stream)) == ("images", ([5] * 5, [1] * 5))


def test_the_share_and_the_seed_of_a_split_are_the_recipes(own_folder):
    stream = build_stream(own_config(own_folder, "data.split_share=0.34"))
    assert images_of(stream) == ([4] * 5, [2] * 5)
    other = build_stream(own_config(own_folder, "data.split_share=0.34", "data.split_seed=1"))
    assert images_of(other) == images_of(stream)
    assert not torch.equal(other.test.read_all(), stream.test.read_all())


def test_a_class_of_one_patient_is_trained_on_and_not_tested(listed, tmp_path):
    path = listed("patient", lambda name: "w" if name.startswith("wart") else name)
    with pytest.warns(UserWarning, match="no image to test on of wart"):
        metrics = run_experiment(own_config(path, "data.split=groups"), tmp_path / "run")
    assert metrics["inherent_counts"] == [5, 5, 5, 5, 6]
    assert metrics["steps"][-1]["recall"][-1] is None


def test_a_split_without_any_test_image_is_refused(listed):
    path = listed("patient", lambda name: name.split("/")[0])
    with pytest.raises(InvalidInput, match=r"data\.split leaves no image to test on"):
        build_stream(own_config(path, "data.split=groups"))


def test_a_long_tail_thins_out_the_training_images_only(own_folder):
    tail = "scenario.long_tail={ratio: 0.2, seed: 3}"
    stream = build_stream(own_config(own_folder, tail))
    # int(5 * 0.2 ** (i / 4))
    assert images_of(stream) == ([5, 3, 2, 1, 1], [1] * 5)
    other = build_stream(own_config(own_folder, "scenario.long_tail={ratio: 0.2, seed: 4}"))
    assert images_of(other) == images_of(stream)
    assert not torch.equal(other.train.read_all(), stream.train.read_all())
    assert torch.equal(other.test.read_all(), stream.test.read_all())
    words = r"scenario\.long_tail\.ratio 0\.12 leaves no training image of 'wart': raise it"
    with pytest.raises(InvalidInput, match=words):
        build_stream(own_config(own_folder, "scenario.long_tail={ratio: 0.12}"))


@pytest.mark.parametrize("setting", ["data.held_out=0.2", "scenario.long_tail={ratio: 0.2}"])
def test_a_class_of_test_images_alone_is_named_whatever_becomes_of_the_others(listed, setting):
    path = listed("split", lambda name: "test" if name.startswith("nevus/") or "0.png" in name else "train")
    with pytest.raises(InvalidInput, match="The class 'nevus' has no training image: add some"):
        build_stream(own_config(path, "data.split=given", setting))


def test_a_known_dataset_can_be_cut_and_split_in_another_way(monkeypatch):
    monkeypatch.setattr(phantom, "TRAIN_COUNTS", (6, 9, 5, 4, 7, 3, 5))
    monkeypatch.setattr(phantom, "TEST_COUNTS", (3,) * 7)
    settings = ["data.split=images", "data.split_share=0.5", "scenario={steps: [2, 5], order: seed-7}"]
    whole = build_stream(parse_recipe(RECIPE, ["data.split=benchmark"]))
    stream = build_stream(parse_recipe(RECIPE, settings))
    assert (whole.split, stream.split) == ("benchmark", "images")
    assert stream.sizes == (2, 5)
    together = [9, 12, 8, 7, 10, 6, 8]
    for found in (whole, stream):
        assert [sum(n) for n in zip(*images_of(found), strict=True)] == together
    assert images_of(whole) == ([6, 9, 5, 4, 7, 3, 5], [3] * 7)
    assert all(abs(n - total / 2) <= 0.5 for n, total in zip(images_of(stream)[1], together, strict=True))


def test_images_are_normalized_as_their_dataset_is():
    dataset = find_dataset("cifar100lt")
    preprocessing = build_state(config(data={"name": "cifar100lt", "side": 32, "crop": 32})).preprocessing
    assert preprocessing.mean == dataset.mean == (0.5071, 0.4866, 0.4409)
    assert preprocessing.std == dataset.std == (0.2009, 0.1984, 0.2023)
    assert build_state(config()).preprocessing.mean == (0.485, 0.456, 0.406)
    chosen = config(data={"name": "phantom", "side": 12, "crop": 8, "augmentation": "fundus"})
    assert build_state(chosen).preprocessing.augmentation == "fundus"
    usual = {"phantom": "crop", "ham10000": "crop", "eyepacs": "fundus", "cifar100": "resized_crop"}
    for name, augmentation in usual.items():
        scenario = {"base": 3, "increment": 1}
        known = config(data={"name": name, "side": 12, "crop": 8}, scenario=scenario)
        assert build_state(known).preprocessing.augmentation == augmentation


def test_a_model_has_as_many_views_as_its_recipe_says_and_otherwise_one():
    for given, views in ((8, 8), (2, 2), (1, 1), (None, 1)):
        chosen = config(data={"name": "phantom", "side": 12, "crop": 8, "views": given})
        assert build_state(chosen).preprocessing.views == views


RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_can_be_resolved(path):
    resolved = resolve(load_recipe(path))
    assert resolved.label


def test_the_recipe_for_own_images_runs_as_it_is_but_for_its_size(own_folder, tmp_path):
    recipe = next(path for path in RECIPES if path.stem == "own-images")
    smaller = ["data.side=12", "data.crop=8", "network.backbone=resnet8_cifar", "training.epochs=1"]
    smaller += [
        f"data.root={own_folder}",
        "network.weights=null",
        "data.split=images",
        "execution.device=cpu",
    ]
    metrics = run_experiment(load_recipe(recipe, smaller), tmp_path / "run")
    assert metrics["finished"]


def test_the_recipe_of_lesions_holds_out_whole_lesions(shared_data):
    recipe = next(path for path in RECIPES if path.stem == "ham10000-3-2-lesions")
    data = load_recipe(recipe).data
    images = open_dataset(data.name, shared_data / "ham10000_200x150.tar.gz", side=data.side)
    rule, train, test = splits.split(images, rule=data.split, share=data.split_share, seed=data.split_seed)
    lesions = np.array(images.groups)
    assert rule == "groups"
    assert (len(train), len(test)) == (8_012, 2_003)
    assert set(lesions[train]) & set(lesions[test]) == set()
    # The split that came with the images, for comparison: 697 lesions stand on both sides.
    with pytest.warns(UserWarning, match="697 patients or lesions .* 759 of 2,003 test images"):
        _, train, test = splits.split(images, rule=None, share=0.2, seed=0)
    assert (len(train), len(test)) == (8_012, 2_003)
    assert len(set(lesions[train]) & set(lesions[test])) == 697


def test_the_long_tail_recipe_has_the_published_counts(shared_data):
    recipe = next(path for path in RECIPES if path.stem == "cifar100-lt-50-10")
    config, dataset = load_recipe(recipe), find_dataset("cifar100lt")
    images = open_dataset("cifar100lt", shared_data, side=32)
    _, train, test = splits.split(images, rule=config.data.split, share=0.2, seed=0)
    counts = np.bincount(images.labels[train], minlength=100)
    assert counts.tolist() == [int(500 * 0.01 ** (i / 99)) for i in range(100)]
    assert np.bincount(images.labels[test]).tolist() == [100] * 100
    assert arrangement(config, dataset) == (tuple(range(100)), (50, 10, 10, 10, 10, 10))
    resolved = resolve(config)
    assert resolved.network.backbone == "resnet32_cifar"
    assert (resolved.training.epochs, resolved.training.batch_size) == (160, 128)
    assert (resolved.training.milestones, resolved.training.gradient_clamp) == ((0.5, 0.75), None)
    assert type(resolved.method.base) is PODNet
    seeded = load_recipe(recipe, ["scenario.order=seed-1993"])
    assert arrangement(seeded, dataset)[0][:3] == (68, 56, 78)


def test_a_loss_registers_under_a_new_name_only(monkeypatch):
    plugins: dict = {"margin": {"ranking": lambda: None}}
    monkeypatch.setattr("medcil.build.PLUGINS", plugins)
    for name in ("margin.mine", "smoothness.mine"):
        register("loss", name, lambda: None)
    assert {term: set(kinds) for term, kinds in plugins.items()} == {
        "margin": {"ranking", "mine"},
        "smoothness": {"mine"},
    }
    with raises("config.registry.exists", "margin.ranking"):
        register("loss", "margin.ranking", lambda: None)
    for name in ("mine", "margin.", ".mine"):
        with raises("config.registry.unknown"):
            register("loss", name, None)
