"""β and λ chosen again: the model is the one that was trained with them, and the change is on record."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import medcil
from medcil.cli.main import main
from medcil.clinic.model_dir import ModelFolder
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput
from medcil.readouts.ridge import Ridge
from medcil.training.inference import predict_scores

from .generated import FEW, QUICK, content, write_counts, write_manifest
from .patients import people

COUNTS = {"alpha": 60, "beta": 32, "gamma": 24}
NEW = {"delta": 32, "epsilon": 24}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Train a frozen network on three classes; copies of one model for each setting."""
    root = tmp_path_factory.mktemp("rebalanced")
    data = write_manifest(write_counts(root / "data", COUNTS))
    made: dict[tuple[str, ...], Path] = {}

    def make(out: Path, *settings: str, method: str = "analytic") -> Path:
        if (method, *settings) not in made:
            path = made[method, *settings] = root / f"model-{len(made)}"
            options = ("execution.threads=1", *settings)
            medcil.train(data, path, method=method, **QUICK | {"settings": options})
        return Path(shutil.copytree(made[method, *settings], out))

    return make


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counts(tmp_path_factory.mktemp("new"), NEW)


@pytest.fixture
def model(make: Make, tmp_path: Path) -> Path:
    return make(tmp_path / "model", "method.adapt=never")


def ridge_of(model: Path, version: str | None = None) -> Ridge:
    readout = ModelFolder(model).version(version).load_state().readout
    assert isinstance(readout, Ridge)
    return readout


def assert_same(found: Ridge, expected: Ridge) -> None:
    assert float(found.balance) == float(expected.balance)
    assert float(found.ridge) == pytest.approx(float(expected.ridge), rel=1e-12)
    for part in ("weights", "log_prior", "class_means", "counts", "sums", "moments"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=0, atol=1e-6)


@pytest.mark.parametrize("first", ["rebalance", "update"])
def test_it_is_the_model_that_was_trained_so_from_the_beginning(first, model, new, make, tmp_path):
    """Whether classes come before or after: an update keeps what was chosen."""
    expected = make(tmp_path / "expected", "method.adapt=never", "method.balance=1", "method.strength=0.1")
    for name in ("rebalance", "update") if first == "rebalance" else ("update", "rebalance"):
        if name == "update":
            medcil.update(model, new, **FEW)
        else:
            medcil.rebalance(model, balance=1, strength=0.1)
    medcil.update(expected, new, **FEW)
    assert_same(ridge_of(model), ridge_of(expected))
    states = [ModelFolder(path).version().load_state() for path in (model, expected)]
    images = ModelFolder(model).version().holdout()
    predictions = [
        predict_scores(state, images, ExecutionConfig(device="cpu")).argmax(dim=1) for state in states
    ]
    assert predictions[0].equal(predictions[1])
    assert not torch.allclose(ridge_of(model, "v1").weights, ridge_of(expected, "v1").weights, atol=1e-3)


def test_back_again_is_as_before_and_lambda_stays(make, tmp_path):
    model = make(tmp_path / "model", "method.adapt=never", "method.strength=leave_one_out")
    medcil.rebalance(model, balance=0.9)
    medcil.rebalance(model, balance=0.5)
    assert_same(ridge_of(model, "v3"), ridge_of(model, "v1"))
    assert float(ridge_of(model, "v2").ridge) != pytest.approx(float(ridge_of(model, "v1").ridge))


def test_it_is_on_record_with_the_report_of_an_update(model, capsys):
    v1 = content(model / "versions/v1")
    with pytest.raises(SystemExit) as ended:
        main(["rebalance", str(model), "--balance", "1"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "β 0.5 → 1, from the same statistics" in said
    assert "before" in said
    assert content(model / "versions/v1") == v1
    folder = ModelFolder(model)
    version, before = folder.version(), folder.version("v1")
    assert folder.current == "v2"
    facts = version.provenance()
    assert (facts["parent"], facts["classes_added"], facts["images"]) == ("v1", [], {})
    assert facts["settings"]["method"] == before.provenance()["settings"]["method"] | {"balance": 1.0}
    assert "method.balance" in facts["asked"]
    past = medcil.history(model)[1]
    assert past["rebalanced"] == facts["rebalanced"] == "β 0.5 → 1"
    cost = version.forgetting()
    recalls = [entry["recall"] for entry in before.metrics()["classes"]]
    assert [entry["before"]["recall"] for entry in cost["old_classes"]] == recalls
    assert [entry["after"]["recall"] for entry in cost["old_classes"]] == [
        entry["recall"] for entry in version.metrics()["classes"]
    ]
    assert version.holdout_entries() == before.holdout_entries()
    for name in ("card.md", "report.html"):
        assert "Rebalanced from v1: β 0.5 → 1" in version.read(name).decode()
    with pytest.raises(SystemExit):
        main(["history", str(model)])
    assert "β 0.5 → 1" in capsys.readouterr().out


def test_killed_before_the_last_write_the_same_command_finishes_it(model, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            medcil.rebalance(model, balance=1)
    assert ModelFolder(model).versions == ("v1",)
    medcil.rebalance(model, balance=1)
    assert ModelFolder(model).current == "v2"
    assert float(ridge_of(model).balance) == 1
    assert sorted(path.name for path in (model / "versions").iterdir()) == ["v1", "v2"]


def test_a_patient_is_erased_from_a_rebalanced_version_too(model):
    medcil.rebalance(model, balance=1)
    patient = people(model, version="v2", part="holdout")[0]
    erased = medcil.erase(model, patient)
    assert set(erased.versions) == {"v1", "v2"}
    assert len(ModelFolder(model).version("v2").forgetting()["old_classes"]) == 3


@pytest.mark.parametrize(
    ("method", "settings", "options", "code"),
    [
        ("finetune", (), {"balance": 1}, "model.rebalance.unsupported"),
        ("analytic", ("method.pooled=true",), {"balance": 1}, "model.rebalance.pooled"),
        ("analytic", ("method.adapt=never",), {"balance": 0.5}, "model.rebalance.unchanged"),
        ("analytic", ("method.adapt=never",), {}, "model.rebalance.unchanged"),
    ],
    ids=str,
)
def test_what_cannot_be_rebalanced_is_refused(method, settings, options, code, make, tmp_path):
    model = make(tmp_path / "model", *settings, method=method)
    before = content(model)
    with pytest.raises(InvalidInput) as refused:
        medcil.rebalance(model, **options)
    assert refused.value.code == code
    assert content(model) == before


@pytest.mark.parametrize("wrong", [{"balance": -1}, {"balance": float("nan")}, {"strength": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong, model):
    with pytest.raises(InvalidInput, match=r"^method\."):
        medcil.rebalance(model, **wrong)


@pytest.mark.parametrize(
    ("setting", "way"),
    [("method.balance=1", "rebalance MODEL --balance"), ("method.stages=1", "Leave it out")],
)
def test_an_update_does_not_choose_again(setting, way, model, new):
    with pytest.raises(InvalidInput, match=way) as refused:
        medcil.update(model, new, settings=(setting,))
    assert refused.value.code == "model.method.settled"
