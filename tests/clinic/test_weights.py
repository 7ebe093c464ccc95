"""Training starts from registered weights, says which, and says loudly when it starts from random ones."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from medcil.cli.main import main
from medcil.clinic.settings import requested, settings_to_train, side_to_train
from medcil.clinic.train import train
from medcil.clinic.update import update
from medcil.models.backbones import create_model
from medcil.models.weights import Weights, add_weights

from ..errors.raises import raises
from .generated import FEW, QUICK, write_folder

WARNING = "Warning: Random weights"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), " ".join(out.split()), err


@pytest.fixture
def cifar(tmp_path, data_home) -> Weights:
    """Registered weights of a small network."""
    torch.manual_seed(4)
    model = create_model("resnet8_cifar")
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    torch.save(model.state_dict(), tmp_path / "cifar.pth")
    return add_weights(
        tmp_path / "cifar.pth", backbone="resnet8_cifar", license="CC-BY-4.0", source="Our clinic"
    )[0]


def chosen(*, shorter: int = 64, **asked: str) -> tuple[str, str | None]:
    network = settings_to_train([100, 100], shorter, requested(**asked))[0].network
    return network.backbone, network.weights


def test_training_starts_from_the_registered_weights_and_records_them(tmp_path, cifar):
    data, new = write_folder(tmp_path / "data", "alpha", "beta"), write_folder(tmp_path / "new", "gamma")
    settings = (*QUICK["settings"], "method.adapt=never")  # the network stays as it came
    done = train(data, tmp_path / "model", **{**QUICK, "settings": settings}, method="analytic")
    (manifest,) = tmp_path.glob("model/versions/v1/state/manifest.json")
    content = json.loads(manifest.read_text())
    (file,) = content["tensors"]["network.backbone"]
    stored = safetensors.torch.load_file(tmp_path / "model/tensors" / file)
    registered = safetensors.torch.load_file(cifar.path)
    (first,) = (tensor for name, tensor in stored.items() if name.endswith("stages.0.0.0.weight"))
    assert torch.equal(first, registered["stem.0.weight"])

    expected = {
        "name": cifar.name,
        "sha256": cifar.sha256,
        "source": "Our clinic",
        "license": "CC-BY-4.0",
    }
    assert done.provenance["weights"] == expected
    assert done.provenance["settings"]["network"]["weights"] == cifar.name
    later = update(tmp_path / "model", new, **FEW)
    assert later.provenance["weights"] == expected
    for version in ("v1", "v2"):
        for page in ("card.md", "report.html"):
            text = (tmp_path / "model/versions" / version / page).read_text()
            assert all(str(fact) in text.replace("\\", "") for fact in expected.values()), (version, page)


def test_random_weights_are_said_loudly(tmp_path, data_home, capsys):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    options = ("--backbone", "resnet8_cifar", "--epochs", "1", "--set", "execution.threads=1")
    code, out, _ = run(capsys, "train", data, "--out", tmp_path / "model", *options)
    assert code == 0
    assert out.count(WARNING) == 1
    assert "medcil weights add FILE" in out
    version = tmp_path / "model/versions/v1"
    weights = json.loads((version / "provenance.json").read_text())["weights"]
    assert weights == {"name": None, "sha256": None, "source": None, "license": None}
    for page in ("card.md", "report.html"):
        assert "Random weights: the network learned everything" in (version / page).read_text()
    new = write_folder(tmp_path / "new", "gamma")
    code, out, _ = run(capsys, "update", tmp_path / "model", new, *options[2:])
    assert (code, WARNING in out) == (0, False)  # it goes on with the model's


def test_registered_weights_can_be_refused_and_named(tmp_path, cifar, capsys):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    few = ("--backbone", "resnet8_cifar", "--epochs", "1", "--set", "execution.threads=1")
    for name, warned in (("none", True), (cifar.name, False)):
        code, out, _ = run(capsys, "train", data, "--out", tmp_path / name, *few, "--weights", name)
        assert (code, WARNING in out) == (0, warned)
    code, _, err = run(capsys, "train", data, "--out", tmp_path / "x", *few, "--weights", "nothing")
    assert code == 2
    assert err.splitlines()[0].startswith("network.weights: no such file: nothing. Give ")


def test_the_backbone_is_one_whose_weights_are_registered(tmp_path, cifar):
    """The usual one first; what is asked for before that; random weights change nothing."""
    assert chosen() == chosen(shorter=32) == ("resnet8_cifar", cifar.name)
    assert chosen(weights="none") == ("resnet18", None)
    assert chosen(weights="none", shorter=32) == ("resnet20_cifar", None)
    assert chosen(backbone="resnet20_cifar") == ("resnet20_cifar", None)
    assert chosen(weights="hub") == ("resnet18", "hub")
    assert chosen(weights=cifar.name) == ("resnet8_cifar", cifar.name)
    states = {}
    for name in ("resnet18", "resnet34"):
        torch.save(create_model(name).half().state_dict(), path := tmp_path / f"{name}.pth")
        states[name] = add_weights(path)[0].name
    assert chosen() == ("resnet18", states["resnet18"])
    assert chosen(backbone="resnet34") == ("resnet34", states["resnet34"])
    path = str(tmp_path / "resnet34.pth")
    assert chosen(weights=path) == ("resnet34", path)
    assert chosen(weights=path, backbone="resnet50") == ("resnet50", path)  # which is refused later


def test_registered_weights_set_the_pace_as_a_file_does(cifar):
    by_name, by_default = (
        settings_to_train([1000, 1000], 32, requested(backbone="resnet8_cifar", **asked))[0]
        for asked in ({"weights": cifar.name}, {})
    )
    assert by_default == by_name
    assert (by_name.training.epochs, by_name.training.learning_rates.backbone) == (25, 0.001)


@pytest.mark.parametrize(
    ("asked", "side", "crop"),
    [({}, 256, 224), ({"side": 300}, 300, 224), ({"side": 64}, 64, 56)],
)
def test_a_backbone_of_one_size_gets_images_of_that_size(data_home, asked, side, crop):
    piece = requested(backbone="vit_small_patch16_224", **asked)
    data = settings_to_train([100, 100], 64, piece)[0].data
    assert (data.side, data.crop) == (side, crop)
    assert side_to_train(64, piece) == side


@pytest.mark.parametrize("setting", ["network=5", "network.weights=5", "network.backbone=[a]", "data.side=x"])
def test_settings_of_another_type_are_refused_as_ever(data_home, setting):
    piece = requested(settings=(setting,))
    for choose in (lambda: side_to_train(64, piece), lambda: settings_to_train([9, 9], 64, piece)):
        with raises("config.invalid", setting.split("=")[0]):
            choose()


def test_a_side_in_quotes_is_a_number(data_home):
    piece = requested(settings=("data.side='48'",))
    assert settings_to_train([9, 9], 64, piece)[0].data.side == side_to_train(64, piece) == 48


def test_the_commands(tmp_path, data_home, capsys):
    code, out, _ = run(capsys, "weights")
    assert code == 0
    assert "tf_efficientnet_lite0" in out
    assert "No weights are registered" in out
    torch.save(create_model("resnet8_cifar").state_dict(), tmp_path / "a.pth")
    code, out, err = run(capsys, "weights", "add", tmp_path / "a.pth")
    assert code == 2
    assert err.startswith(f"{tmp_path / 'a.pth'} fits none of the known backbones.")
    options = ("--backbone", "resnet8_cifar", "--license", "[bold]MIT", "--source", "us")
    code, out, _ = run(capsys, "weights", "add", tmp_path / "a.pth", *options)
    name = next(word for word in out.split() if word.startswith("resnet8_cifar-"))
    code, out, _ = run(capsys, "weights")
    path = data_home / "medcil/weights" / f"{name}.safetensors"
    for shown in (name, "[bold]MIT", "us", str(path), "0.3 MB"):
        assert shown in out
    assert run(capsys, "weights", "remove", name)[0] == 0
    assert not path.exists()
    code, _, err = run(capsys, "weights", "remove", name)
    assert (code, err.startswith("No registered weights are called")) == (2, True)
    for content in (b"hello", b""):
        (tmp_path / "b.pth").write_bytes(content)
        code, _, err = run(capsys, "weights", "add", tmp_path / "b.pth")
        assert code == 2
        assert str(tmp_path / "b.pth") in err.splitlines()[0]
