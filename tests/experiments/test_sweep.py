"""A sweep computes what is not finished, once, whatever happens to runs; its record says how each ended."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from filelock import FileLock

from medcil.build import load_recipe, parse_recipe, resolve
from medcil.config import usable_cores
from medcil.errors import InvalidInput, RunConflict
from medcil.experiments import sweep as sweep_module
from medcil.experiments.launcher import Exit, Job, parallel_runs
from medcil.experiments.plan import SweepPlan, plan_sweep, prepare_images, run_key, runs_of_suite
from medcil.experiments.suite import (
    Request,
    Suite,
    begin_record,
    final_record,
    is_done,
    known_suites,
    load_suite,
    mark_done,
    update_record,
)
from medcil.experiments.sweep import (
    Status,
    read_progress,
    sweep,
)
from medcil.storage.atomic import read_json, write_json

from .tiny_suite import (
    ALL_EPOCHS,
    ORDERS,
    ROWS,
    SUITE,
    SameProcess,
    epochs_of,
    pretend,
    runs_of,
    starts_of,
    write_images,
    write_suite,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "own")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "ELSEWHERE_TICK", 0.01)


@pytest.fixture
def work(tmp_path: Path, images: Path) -> SweepPlan:
    work = plan_sweep(Request(str(write_suite(tmp_path)), tmp_path / "out", data=(str(images),)))
    prepare_images(work, lambda done, total: None)
    return work


def unless(key: str, *ends: Exit | Callable[[Job], Exit]) -> Callable[[Job], Exit]:
    """Pretends to finish every job, but this one ends in these ways, one after the other."""
    left = list(ends)

    def instead(job: Job) -> Exit:
        if job.key != key or not left:
            return pretend(job)
        end = left.pop(0)
        return end if isinstance(end, Exit) else end(job)

    return instead


def test_every_run_is_computed_once_and_recorded(work):
    seen: list[Status] = []
    launcher = SameProcess()
    last = sweep(work, launcher, seen.append)
    assert seen[0].seconds_left is None or seen[0].n_finished == 1
    assert seen[1].seconds_left > 0
    assert last.seconds_left == 0
    assert launcher.is_stopped
    assert (last.n_runs, last.n_finished, last.n_waiting, list(last.failed)) == (4, 4, 0, [])
    out = work.request.out
    recorded = runs_of(out)
    assert [run["state"] for run in recorded] == ["finished"] * 4
    assert [run["places"] for run in recorded] == [[[row, "2-2", order]] for row in ROWS for order in ORDERS]
    for run in recorded:
        folder = out / "tiny" / run["path"]
        assert epochs_of(folder) == ALL_EPOCHS
        assert starts_of(folder) == 1
        recipe = yaml.safe_load((out / "recipes" / f"{run['key']}.yaml").read_text())
        assert recipe["execution"]["threads"] == 1
        assert Path(recipe["data"]["root"]) == out / "stores" / "own-16"
        assert run_key(resolve(load_recipe(out / "recipes" / f"{run['key']}.yaml"))) == run["key"]
    content = json.loads((out / "tiny" / "runs.json").read_text())
    assert (content["format"], content["suite"], content["set"], content["left_out"]) == (1, "tiny", [], [])
    assert (out / "tiny" / "suite.yaml").read_text() == SUITE
    news = [line for standing in seen for line in standing.news]
    assert [line.rpartition(" finished")[0] for line in news] == [
        f"{row} · 2-2 · order {order}" for row in ROWS for order in ORDERS
    ]

    again = SameProcess()
    sweep(plan_sweep(work.request), again)
    assert again.started == []


def test_a_finished_run_needs_no_images_and_is_not_started(work):
    sweep(work, SameProcess(pretend))
    (work.request.out / "stores" / "own-16" / "images.json").unlink()
    without = Request(work.request.suite, work.request.out)
    launcher = SameProcess(pretend)
    assert sweep(plan_sweep(without), launcher).n_finished == 4
    assert launcher.started == []


def test_a_failed_run_is_reported_and_does_not_stop_the_others(work):
    key = work.runs[1].key
    launcher = SameProcess(unless(key, Exit(key, 1, "Epoch 1\nThe loss is no longer finite.\n")))
    last = sweep(work, launcher)
    assert [(run.key, why) for run, why in last.failed] == [(key, "The loss is no longer finite.")]
    assert last.n_finished == 3
    recorded = {run["key"]: (run["state"], run["why"]) for run in runs_of(work.request.out)}
    assert recorded.pop(key) == ("failed", "The loss is no longer finite.")
    assert set(recorded.values()) == {("finished", None)}
    # The next sweep tries it again, and that alone.
    launcher = SameProcess(pretend)
    assert sweep(plan_sweep(work.request), launcher).failed == []
    assert launcher.started == [key]


@pytest.mark.parametrize("code", [6, 137, -9, 143])
def test_a_run_whose_process_is_lost_is_started_again_twice_at_most(work, code):
    key = work.runs[0].key
    launcher = SameProcess(unless(key, Exit(key, code), Exit(key, code)))
    assert sweep(work, launcher).failed == []
    assert launcher.started.count(key) == 3
    assert len(launcher.started) == 6

    (work.request.results.run(key) / "metrics.json").unlink()
    launcher = SameProcess(unless(key, *[Exit(key, code, "step 1" if code != 6 else "")] * 3))
    last = sweep(plan_sweep(work.request), launcher)
    killed = {137: 9, -9: 9, 143: 15}
    told = (
        f"its process was killed (signal {killed[code]})" if code in killed else f"it ended with code {code}"
    )
    assert [(run.key, why) for run, why in last.failed] == [(key, told)]
    assert launcher.started == [key] * 3


@pytest.mark.parametrize("code", [1, 2, 4, 5])
def test_an_error_of_its_own_is_not_tried_again(work, code):
    key = work.runs[0].key
    launcher = SameProcess(unless(key, Exit(key, code, "wrong")))
    assert len(sweep(work, launcher).failed) == 1
    assert launcher.started.count(key) == 1


def test_a_run_that_ends_well_but_is_not_finished_has_failed(work):
    key = work.runs[0].key
    assert len(sweep(work, SameProcess(unless(key, Exit(key, 0)))).failed) == 1


def test_a_run_that_another_process_computes_is_waited_for(work):
    """Whether the lock is seen before the start or by the run itself, finished by the other or not."""
    first, second = work.runs[0], work.runs[1]
    folder = work.request.results.run(first.key)
    folder.mkdir(parents=True)
    held = FileLock(folder / ".lock")
    held.acquire()
    elsewhere = []

    def watch(standing: Status) -> None:
        elsewhere.append(standing.n_elsewhere)
        if standing.n_finished == 3 and held.is_locked:
            pretend(Job(first.key, Path("recipe"), folder))
            held.release()

    launcher = SameProcess(unless(second.key, Exit(second.key, 3), Exit(second.key, 3)))
    last = sweep(work, launcher, watch)
    assert last.n_finished == 4
    assert max(elsewhere) >= 1
    assert first.key not in launcher.started
    assert launcher.started.count(second.key) == 3  # nobody held it any more: its turn comes again


def test_interrupted_it_stops_what_runs_and_records_the_rest(work):
    def interrupt(job: Job) -> Exit:
        raise KeyboardInterrupt

    launcher = SameProcess(unless(work.runs[1].key, interrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep(work, launcher)
    assert launcher.is_stopped
    states = [run["state"] for run in runs_of(work.request.out)]
    assert states == ["finished", "unfinished", "unfinished", "unfinished"]


def test_only_and_orders_choose_what_is_started_not_what_is_shown(work):
    request, out = work.request, work.request.out
    some = Request(request.suite, out, data=request.data, only=("FINE*",))
    launcher = SameProcess(pretend)
    sweep(plan_sweep(some), launcher)
    assert len(launcher.started) == 2
    assert {place[0] for run in runs_of(out) for place in run["places"]} == {"fine-tuning"}
    one = Request(request.suite, out, data=request.data, orders=("seed-2",))
    launcher = SameProcess(pretend)
    sweep(plan_sweep(one), launcher)
    assert len(launcher.started) == 1
    shown = [tuple(run["places"][0]) for run in runs_of(out)]
    assert shown == [
        ("fine-tuning", "2-2", "seed-1"),
        ("fine-tuning", "2-2", "seed-2"),
        ("balanced", "2-2", "seed-2"),
    ]


def test_seeds_are_runs_of_their_own_and_can_be_chosen(work, tmp_path):
    path = write_suite(tmp_path, SUITE + "seeds: [3, 0]\n", name="seeds")
    request = replace(work.request, suite=str(path))
    sweep(plan_sweep(work.request), SameProcess(pretend))  # with the seed of recipes, which is 0
    launcher, seen = SameProcess(pretend), []
    sweep(plan_sweep(replace(request, seeds=("3",), orders=("seed-2",))), launcher, seen.append)
    assert [line for standing in seen for line in standing.news] == [
        "fine-tuning · 2-2 · order seed-2, seed 3 finished, 1 of 2",
        "balanced · 2-2 · order seed-2, seed 3 finished, 2 of 2",
    ]
    out = work.request.out
    assert [run["places"] for run in runs_of(out, "seeds")] == [
        [[row, "2-2", order, seed]]
        for row in ROWS
        for order, seed in (("seed-1", 0), ("seed-2", 3), ("seed-2", 0))
    ]
    for run in runs_of(out, "seeds"):
        recipe = yaml.safe_load((out / "recipes" / f"{run['key']}.yaml").read_text())
        assert recipe["seed"] == run["places"][0][3]
    assert len(plan_sweep(request).unfinished) == 2
    with pytest.raises(InvalidInput, match=r"--seeds: the suite has no seed '1'\. Known: 0, 3\."):
        plan_sweep(replace(request, seeds=("1",)))


def test_the_record_has_what_another_sweep_finished_meanwhile(work):
    request = work.request
    some, rest = (plan_sweep(replace(request, only=(row,))) for row in ROWS)
    sweep(some, SameProcess(pretend))
    sweep(rest, SameProcess(pretend))
    update_record(some, {})  # it knew nothing of the rest when it began
    assert [run["state"] for run in runs_of(request.out)] == ["finished"] * 4


def test_nobody_writes_a_record_while_another_makes_results_from_his_own(work):
    longer = plan_sweep(replace(work.request, settings=("training.epochs=3",), weights="hub"))
    sweep(work, SameProcess(pretend))
    with final_record(longer, {longer.runs[0].key: "It burst."}):
        update_record(work, {})
        content = json.loads((work.request.folder / "runs.json").read_text())
        assert content["set"] == ["training.epochs=3", "network.weights=hub"]
        assert content["runs"][0]["why"] == "It burst."
    update_record(work, {})
    assert json.loads((work.request.folder / "runs.json").read_text())["set"] == []


def test_nothing_of_former_settings_is_shown_as_current(work):
    folder, request = work.request.folder, work.request
    sweep(work, SameProcess(pretend))
    outside = request.out / "outside.txt"
    for path in (folder / "table.md", folder / "mine.txt", outside):
        path.parent.mkdir(exist_ok=True)
        path.write_text("made")

    def note() -> None:
        mark_done(request, [folder / "table.md"])
        done = read_json(folder / "done.json")
        write_json(folder / "done.json", {**done, "made": [*done["made"], "../outside.txt"]})

    note()
    begin_record(work)
    assert (folder / "table.md").exists()  # of the same settings
    note()
    begin_record(plan_sweep(replace(request, settings=("training.epochs=3",))))
    assert not (folder / "table.md").exists()
    assert not (folder / "done.json").exists()
    assert (folder / "mine.txt").exists()
    assert outside.exists()


def test_done_is_said_of_the_record_it_was_made_of(work):
    sweep(work, SameProcess(pretend))
    mark_done(work.request, [])
    assert is_done(work.request)
    record = work.request.folder / "runs.json"
    content = read_json(record)
    write_json(record, {**content, "set": ["training.epochs=3"]})  # another sweep's
    assert not is_done(work.request)


def suite_of(text: str) -> Suite:
    return Suite.model_validate(yaml.safe_load(text))


def test_a_run_has_one_key_in_every_suite_whatever_its_row_is_called():
    keys = {
        run.places[0][0]: run.key for run in runs_of_suite(suite_of(SUITE)) if run.places[0][2] == "seed-1"
    }
    other = suite_of(SUITE.replace("fine-tuning:", "another name:").replace("2-2:", "two by two:"))
    others = {run.places[0][0]: run.key for run in runs_of_suite(other) if run.places[0][2] == "seed-1"}
    assert others == {"another name": keys["fine-tuning"], "balanced": keys["balanced"]}
    longer = {run.key for run in runs_of_suite(suite_of(SUITE), ["training.epochs=3"])}
    assert longer.isdisjoint(keys.values())
    elsewhere = {run.key for run in runs_of_suite(suite_of(SUITE), ["execution.device=cpu"])}
    assert set(keys.values()) <= elsewhere


def test_two_rows_that_are_the_same_are_one_run_with_two_places():
    text = SUITE.replace("balanced: {method: {name: balanced}}", "again: {method: finetune}")
    runs = runs_of_suite(suite_of(text))
    assert [[place[0] for place in run.places] for run in runs] == [["fine-tuning", "again"]] * 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("scenario.order=seed-1", "scenario.order.*--orders"),
        ("memory.per_class=1", "memory.per_class.*--only"),
        ("memory={total: 8}", "memory.per_class.*--only"),
    ],
)
def test_what_tells_runs_apart_cannot_be_set(setting, named):
    varied = suite_of(SUITE + "vary: {memory.per_class: [1, 2]}\n")
    assert len(runs_of_suite(varied, ["training.epochs=1"])) == 2 * 2 * 2
    with pytest.raises(InvalidInput, match=named):
        runs_of_suite(varied, [setting])


@pytest.mark.parametrize("name", list(known_suites()))
def test_a_recipe_as_written_is_the_run_it_was_written_for(name):
    suite = load_suite(name)
    first = suite.model_copy(update={"orders": suite.orders[:1]})
    for run in runs_of_suite(first):
        written = yaml.safe_load(yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False))
        assert run_key(resolve(parse_recipe(written))) == run.key


def test_progress_is_read_from_the_last_whole_line(tmp_path):
    assert read_progress(tmp_path) == "starting"
    lines = [{"task": 1, "phase": "learn", "epoch": e, "epochs": 10} for e in (1, 2, 3)]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(whole + '{"task": 1, "pha')
    assert read_progress(tmp_path) == "step 1, learn, epoch 3/10"
    (tmp_path / "log.jsonl").write_text('{"task"')
    assert read_progress(tmp_path) == "starting"


def test_as_many_at_once_as_the_cores_or_the_gpu_bear():
    assert parallel_runs(n_gpus=0, threads=1) == usable_cores()
    assert parallel_runs(n_gpus=0, threads=10**6) == 1
    assert parallel_runs(n_gpus=1, threads=1) == 3
    assert parallel_runs(n_gpus=4, threads=1) == 12


def test_several_gpus_are_shared_out(work, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: SimpleNamespace(uuid=number))
    for n, shared in ((1, []), (2, ["GPU-0", "GPU-1"])):
        monkeypatch.setattr("torch.cuda.device_count", lambda n=n: n)
        assert work.parallel_runs() == 3 * n
        assert list(work.gpus_to_share()) == shared


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give its images with --data own=DIR"),
        ({"data": ("nowhere",)}, "no such file or folder: nowhere"),
        ({"data": ("ham=.",)}, "the suite has no dataset 'ham'"),
        ({"only": ("balancd",)}, "Did you mean 'balanced'?"),
        ({"orders": ("seed-3",)}, "--orders"),
        ({"seeds": ("0",)}, "--seeds: the suite has no seed '0'. There are none."),
        ({"settings": ("training.epoch=1",)}, "Did you mean 'epochs'?"),
        ({"settings": ("training",)}, "is not key=value"),
        ({"settings": ("method.name=balancd",)}, "Did you mean 'balanced'?"),
        ({"weights": "missing.safetensors"}, "no such file: missing.safetensors"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(tmp_path, images, given, message):
    given = {"data": (str(images),), **given} if given else {}
    with pytest.raises(InvalidInput, match=message.replace("?", r"\?")):
        plan_sweep(Request(str(write_suite(tmp_path)), tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()


def test_a_store_of_another_side_is_refused(work, tmp_path):
    store = work.request.out / "stores" / "own-16"
    other = Request(work.request.suite, tmp_path / "other", data=(str(store),), settings=("data.side=14",))
    with pytest.raises(InvalidInput, match="not own with side 14"):
        plan_sweep(other)
    same = plan_sweep(Request(work.request.suite, tmp_path / "other", data=(f"own={store}",)))
    assert [root.folder for root in same.roots.values()] == [store]
    assert [root.source for root in same.roots.values()] == [None]


def test_datasets_without_images_are_left_out_with_a_sentence(tmp_path, images):
    text = SUITE + "  another: {data: {name: ham10000}, method: {name: finetune}}\n"
    text = text.replace("orders: [seed-1, seed-2]", "orders: [seed-1]")
    work = plan_sweep(Request(str(write_suite(tmp_path, text)), tmp_path / "out", data=(f"own={images}",)))
    assert work.left_out == ("ham10000 is left out: give its images with --data ham10000=DIR.",)
    assert [run.places[0][0] for run in work.runs] == ["fine-tuning", "balanced"]
    # A folder with something named after each dataset serves several.
    both = plan_sweep(Request(str(tmp_path / "tiny.yaml"), tmp_path / "out", data=(str(images.parent),)))
    assert [root.source for root in both.roots.values()] == [images]


def test_one_path_serves_the_datasets_that_are_read_from_it(tmp_path):
    for name in ("train", "test", "meta"):
        (tmp_path / "cifar" / "cifar-100-python").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cifar" / "cifar-100-python" / name).touch()
    work = plan_sweep(Request("cifar100", tmp_path / "out", data=(str(tmp_path / "cifar"),)))
    assert {dataset for dataset, _ in work.roots} == {"cifar100", "cifar100lt"}
    assert {root.source for root in work.roots.values()} == {tmp_path / "cifar"}


def test_another_suite_of_the_same_name_is_refused_and_an_edited_one_goes_on(work, tmp_path):
    sweep(work, SameProcess(pretend))
    edited = SUITE.replace("  balanced:", "  renamed:")
    again = plan_sweep(replace(work.request, suite=str(write_suite(tmp_path / "edited", edited))))
    assert again.unfinished == []
    other = write_suite(tmp_path / "other", SUITE.replace("Four small", "Other"))
    with pytest.raises(RunConflict, match="another suite, 'Four small runs'"):
        plan_sweep(replace(work.request, suite=str(other)))


def test_a_suite_may_not_be_called_as_a_folder_of_the_results(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be called"):
        _ = Request(str(write_suite(tmp_path, name="runs")), tmp_path).name
