"""Runs of other images or weights than those given are never gone on with, nor shown as if of these."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import yaml
from PIL import Image
from safetensors.torch import save_file

from medcil.build import build_stream, load_recipe, parse_recipe, resolve
from medcil.data.cache import prepare
from medcil.data.sources.folder import read_own
from medcil.errors import RunConflict
from medcil.experiments.plan import SweepPlan, hashed_images, plan_sweep, prepare_images
from medcil.experiments.run import fingerprint, fingerprint_of_images, run_experiment
from medcil.experiments.suite import Request
from medcil.experiments.sweep import sweep
from medcil.storage.atomic import read_json

from .tiny_suite import SUITE, SameProcess, write_images, write_suite


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "own")


def finished(request: Request) -> SweepPlan:
    work = plan_sweep(request)
    prepare_images(work, lambda done, total: None)
    sweep(work, SameProcess())
    return work


@pytest.mark.parametrize("as_store", [False, True])
def test_finished_runs_of_other_images_are_not_shown_as_if_of_these(tmp_path, images, as_store):
    request = Request(str(write_suite(tmp_path)), tmp_path / "out", data=(str(images),), only=("balanced",))
    finished(request)
    plan_sweep(request)
    fewer = Path(shutil.copytree(images, tmp_path / "fewer"))
    (fewer / "a" / "0.png").unlink()
    if as_store:
        prepare(read_own(fewer), tmp_path / "store", side=16)
    other = replace(request, data=(str(tmp_path / "store") if as_store else str(fewer),))
    told = "holds runs of other images of own" if as_store else "own-16 was prepared from other images"
    with pytest.raises(RunConflict, match=f"{told}.*ive another --out"):
        plan_sweep(other)
    if not as_store:  # without the store the runs still say so
        shutil.rmtree(request.out / "stores")
        with pytest.raises(RunConflict, match="holds runs of other images of own"):
            plan_sweep(other)


@pytest.mark.parametrize("settings", [(), ("data.held_out=0.3",), ("scenario.long_tail={ratio: 0.5}",)])
def test_images_are_known_again_without_decoding_them(tmp_path, images, settings):
    """From the folder and from a store, with patients whose ids the store does not have."""
    rows = [f"{path.relative_to(images)},{path.parent.name},P{path.stem}" for path in images.glob("*/*.png")]
    table = images / "table.csv"
    table.write_text("\n".join(["path,label,patient", *rows]) + "\n")
    prepare(read_own(table), tmp_path / "store", side=16)
    recipe = yaml.safe_load(SUITE)
    content = {**recipe["common"], "scenario": {"base": 2, "increment": 2}, "method": "finetune"}
    config = resolve(parse_recipe(content, ["data.split=groups", f"data.root={tmp_path}/store", *settings]))
    whole = fingerprint(build_stream(config), config)
    for root in (tmp_path / "store", table):
        listed = fingerprint_of_images(config, hashed_images("own", root))
        assert {**listed, "weights": None} == whole
    table.unlink()


def repaint(folder: Path, n_images: int) -> None:
    """Replace images by others of the same name, class and size."""
    for path in sorted(folder.glob("*/*.png"))[:n_images]:
        rng = np.random.default_rng(int(path.stem) + 100)
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(path)


def test_a_run_does_not_resume_on_images_whose_content_changed(tmp_path, images):
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    recipe = yaml.safe_load(SUITE)
    content = {**recipe["common"], "scenario": {"base": 2, "increment": 2}, "method": "finetune"}
    config = parse_recipe(content, [f"data.root={folder}"])

    def interrupt(number: int, n_tasks: int, progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(config, tmp_path / "run", watch=interrupt)
    repaint(folder, 1)
    with pytest.raises(RunConflict, match="was started with other images"):
        run_experiment(config, tmp_path / "run")


def test_a_sweep_does_not_go_on_with_a_store_of_images_whose_content_changed(tmp_path, images):
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    request = Request(str(write_suite(tmp_path)), tmp_path / "out", data=(str(folder),))
    prepare_images(plan_sweep(request), lambda done, total: None)
    plan_sweep(request)
    repaint(folder, 1)
    with pytest.raises(RunConflict, match="was prepared from other images"):
        plan_sweep(request)


def test_finished_runs_of_other_weights_are_not_shown_as_if_of_these(tmp_path, images):
    weights = tmp_path / "w.safetensors"
    tensors = timm.create_model("resnet10t", num_classes=0).state_dict()
    save_file(tensors, weights)
    given = {"data": (str(images),), "weights": str(weights), "orders": ("seed-1",)}
    given["settings"] = ("network.backbone=resnet10t",)
    request = Request(str(write_suite(tmp_path)), tmp_path / "out", **given)
    work = finished(request)
    plan_sweep(request)
    run = request.results.run(work.runs[0].key)
    assert read_json(run / "data.json")["weights"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    save_file({key: value + 1 for key, value in tensors.items()}, weights)
    with pytest.raises(RunConflict, match="holds runs of other weights of own"):
        plan_sweep(request)
    with pytest.raises(RunConflict, match="was started with other weights"):
        run_experiment(load_recipe(request.results.recipe(work.runs[0].key)), run)
