"""Weights of files: read without running code, recognized, registered once, refused where they fit half."""

import os
import pickle
import stat
import zipfile

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

from medcil.build import build_state, parse_recipe
from medcil.data.transforms import IMAGENET_MEAN
from medcil.experiments.run import fingerprint_of_weights
from medcil.models import weights as module
from medcil.models.backbones import create_backbone
from medcil.models.weights import (
    KNOWN,
    add_weights,
    find_weights,
    load_weights,
    registered_weights,
    remove_weights,
    weights_for,
)

from ..errors.raises import raises

pytestmark = pytest.mark.usefixtures("data_home")


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every number of a network another value, as training does: statistics and zeros too."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(0.1 + 0.2 * torch.rand(tensor.shape, generator=generator))
    return model.eval()


@pytest.fixture
def small():
    """The state dict of timm's smallest residual network, with a classifier."""
    return shaken(timm.create_model("test_resnet", num_classes=5)).state_dict()


def test_resnet18_of_torchvision_is_recognized_and_computes_the_same(tmp_path, data_home):
    theirs = shaken(torchvision.models.resnet18())
    torch.save(theirs.state_dict(), tmp_path / "resnet18-f37072fd.pth")
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "again.safetensors")
    entry, fit = add_weights(tmp_path / "resnet18-f37072fd.pth", license="BSD-3-Clause", source="torchvision")
    assert (entry.backbone, fit.head) == ("resnet18", ["fc.weight", "fc.bias"])
    stored = safetensors.torch.load_file(entry.path)
    assert {*stored} == {
        k for k in theirs.state_dict() if not k.startswith("fc.") and not k.endswith("num_batches_tracked")
    }
    again, _ = add_weights(tmp_path / "again.safetensors")  # the same numbers: one entry, with what was said
    assert again == entry
    assert registered_weights() == [entry]
    assert (again.license, again.source) == ("BSD-3-Clause", "torchvision")

    backbone = create_backbone("resnet18", last_relu=True).eval()
    load_weights(backbone, entry.name, name="resnet18")
    theirs.fc = nn.Identity()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(backbone(images)[1], theirs(images))


def test_convnext_of_torchvision_is_recognized_and_computes_the_same(tmp_path):
    theirs = shaken(torchvision.models.convnext_tiny())
    torch.save(theirs.state_dict(), tmp_path / "convnext_tiny.pth")
    entry, _ = add_weights(tmp_path / "convnext_tiny.pth")
    assert entry.backbone == "convnext_tiny"
    backbone = create_backbone("convnext_tiny", last_relu=False).eval()
    load_weights(backbone, entry.name, name="convnext_tiny")
    theirs.classifier[2] = nn.Identity()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(backbone(images)[1], theirs(images), rtol=1e-3, atol=1e-3)


def test_efficientnet_lite0_is_recognized_and_normalized_by_halves(shared_weights):
    file = shared_weights / "tf_efficientnet_lite0_imagenet_fp16.safetensors"
    entry, fit = add_weights(file)
    assert (entry.backbone, fit.head) == (
        "tf_efficientnet_lite0",
        ["classifier.bias", "classifier.weight"],
    )
    config = own(backbone="tf_efficientnet_lite0", weights=entry.name)
    state = build_state(config)
    assert (state.preprocessing.mean, state.preprocessing.std) == ((0.5,) * 3, (0.5,) * 3)
    model = timm.create_model("tf_efficientnet_lite0").eval()
    model.load_state_dict({k: v.float() for k, v in safetensors.torch.load_file(file).items()}, strict=False)
    model.reset_classifier(0)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(state.network.eval()(images).embedding, model(images))


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_checkpoint_with_its_state_dict_is_read(tmp_path, small, wrapper):
    torch.save({wrapper: {f"module.{k}": v for k, v in small.items()}, "epoch": 3}, tmp_path / "a.pt")
    torch.save(small, tmp_path / "plain.pt")
    found = [add_weights(tmp_path / name, backbone="test_resnet")[0] for name in ("a.pt", "plain.pt")]
    assert found[0] == found[1]


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", ["alone", "among tensors"])
def test_code_in_a_pickle_is_never_run(tmp_path, small, is_zip, place):
    marker = tmp_path / "run"
    content = Hostile(marker) if place == "alone" else {**small, "epoch": Hostile(marker)}
    path = tmp_path / "hostile.pth"
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with raises("network.weights.invalid", str(path), "holds code, which was not run"):
        add_weights(path, backbone="test_resnet")
    assert not marker.exists()
    assert registered_weights() == []
    torch.load(path, weights_only=False)  # the file is what it claims to be
    assert marker.exists()


def test_so_is_that_of_a_bare_pickle_and_of_a_file_that_recipes_name(tmp_path):
    path = tmp_path / "bare.pth"
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "run")))
    for read in (
        lambda: add_weights(path),
        lambda: load_weights(create_backbone("test_resnet", last_relu=False), str(path), name="test_resnet"),
    ):
        with raises("network.weights.invalid", "holds code, which was not run"):
            read()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_damaged_files_are_refused(tmp_path, small, suffix):
    path = tmp_path / f"weights.{suffix}"
    save = torch.save if suffix == "pth" else safetensors.torch.save_file
    save(small, path)
    whole = path.read_bytes()
    for damaged in (b"", b"hello", whole[:9], whole[: len(whole) // 2], whole[:-100], whole[500:]):
        path.write_bytes(damaged)
        with raises("network.weights.invalid") as caught:
            add_weights(path, backbone="test_resnet")
        assert str(path) in str(caught.value).splitlines()[0]
    assert registered_weights() == []


@pytest.mark.parametrize(
    "content",
    [torch.zeros(3), [torch.zeros(3)], {"a": 1}, {"a": torch.zeros(3).to_sparse()}, {1: torch.zeros(3)}],
)
def test_what_is_no_state_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pth")
    with raises("network.weights.invalid", "more than named tensors"):
        add_weights(tmp_path / "a.pth")


def test_a_small_file_cannot_ask_for_endless_memory(tmp_path, small):
    small["fc.weight"] = torch.zeros(1).expand(10**12)  # one number, said to be 10^12
    torch.save(small, tmp_path / "a.pth")
    add_weights(tmp_path / "a.pth", backbone="test_resnet")
    small["conv1.0.weight"] = torch.zeros(1).expand(10**12)
    torch.save(small, tmp_path / "a.pth")
    with raises("weights.backbone.mismatch", "conv1.0.weight"):
        add_weights(tmp_path / "a.pth", backbone="test_resnet")


def test_a_file_that_expands_is_refused_before_it_is_read(tmp_path, small):
    torch.save(small, tmp_path / "whole.pth")
    with (
        zipfile.ZipFile(tmp_path / "whole.pth") as whole,
        zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in whole.namelist():
            packed.writestr(entry, whole.read(entry))
    with raises("network.weights.invalid", "its content is compressed"):
        add_weights(tmp_path / "small.pth", backbone="test_resnet")
    add_weights(tmp_path / "whole.pth", backbone="test_resnet")


@pytest.mark.parametrize("change", ["missing", "misshapen", "foreign"])
def test_half_a_fit_is_refused_and_says_what_does_not_fit(tmp_path, small, change):
    name = "layer2.0.conv1.weight"
    if change == "missing":
        del small[name]
    elif change == "misshapen":
        small[name] = small[name][:1].clone()
    else:
        small[name := "layer9.0.conv1.weight"] = torch.zeros(3)
    safetensors.torch.save_file(small, tmp_path / "a.safetensors")
    with raises("weights.backbone.mismatch", "does not fit test_resnet", name):
        add_weights(tmp_path / "a.safetensors", backbone="test_resnet")
    with raises("weights.backbone.unknown", "--backbone"):
        add_weights(tmp_path / "a.safetensors")
    assert registered_weights() == []


def test_a_larger_network_is_not_taken_for_the_smaller_one_within_it(tmp_path):
    safetensors.torch.save_file(timm.create_model("resnet34").state_dict(), tmp_path / "a.safetensors")
    with raises("weights.backbone.mismatch", "of another network"):
        add_weights(tmp_path / "a.safetensors", backbone="resnet18")
    assert add_weights(tmp_path / "a.safetensors")[0].backbone == "resnet34"


def test_numbers_that_are_not_finite_are_refused(tmp_path, small):
    small["conv1.0.weight"][0, 0, 0, 0] = float("nan")
    safetensors.torch.save_file(small, tmp_path / "a.safetensors")
    with raises("weights.file.not_finite", "conv1.0.weight"):
        add_weights(tmp_path / "a.safetensors", backbone="test_resnet")


def registered(tmp_path, tensors, **facts):
    safetensors.torch.save_file(tensors, tmp_path / "added.safetensors")
    return add_weights(tmp_path / "added.safetensors", backbone="test_resnet", **facts)[0]


def test_registered_files_are_private_complete_and_can_be_removed(tmp_path, data_home, small, monkeypatch):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", full_disk)
        with raises("output.no_space"):
            registered(tmp_path, small)
    assert registered_weights() == []
    entry = registered(tmp_path, small)
    folder = data_home / "medcil" / "weights"
    assert entry.path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in sorted(folder.iterdir())] == [".json", ".safetensors"]
    assert registered_weights() == [entry]
    with raises("weights.name.unknown", f"Did you mean {entry.name!r}?"):
        remove_weights(entry.name[:-1])
    remove_weights(entry.name)
    assert (registered_weights(), list(folder.iterdir())) == ([], [])


def test_a_registered_file_that_was_changed_is_not_used(tmp_path, small):
    entry = registered(tmp_path, small)
    content = bytearray(entry.path.read_bytes())
    content[-1] ^= 1
    entry.path.write_bytes(content)
    with raises("file.listed.damaged") as caught:
        load_weights(create_backbone("test_resnet", last_relu=False), entry.name, name="test_resnet")
    assert caught.value.exit_code == 5
    entry.path.with_suffix(".json").write_text("{}")
    with raises("weights.entry.damaged", f"medcil weights remove {entry.name}"):
        registered_weights()
    remove_weights(entry.name)


def test_the_folder_is_that_of_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_DATA_HOME", ignored)
        assert module.weights_folder() == tmp_path / ".local/share/medcil/weights"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # of a user without a home
    assert registered_weights() == []
    with raises("weights.folder.missing"):
        add_weights(tmp_path / "none.safetensors")


def test_the_newest_weights_of_a_backbone_are_chosen_whatever_their_tag(tmp_path, small):
    first = registered(tmp_path, small)
    assert weights_for("test_resnet.some_tag", else_for="resnet18") == first
    assert weights_for(None, else_for="resnet18") == first
    assert weights_for("resnet18", else_for="resnet18") is None


@pytest.mark.parametrize("name", KNOWN)
def test_the_known_backbones_are_as_timm_has_them(name):
    known, settings = KNOWN[name], timm.get_pretrained_cfg(name)
    assert settings.input_size == (3, known.side, known.side)
    assert (settings.mean, settings.std) == known.normalization
    assert settings.fixed_input_size == known.is_fixed


def own(*, backbone, weights, data=None):
    return parse_recipe(
        {
            "data": {"name": "own", "side": 64, "crop": 64, **(data or {})},
            "scenario": {"steps": [2]},
            "network": {"backbone": backbone, "weights": weights},
            "method": "finetune",
        }
    )


def test_a_recipe_can_name_registered_weights(tmp_path, small):
    entry = registered(tmp_path, small)
    config = own(backbone="test_resnet", weights=entry.name)
    named = build_state(config).network.backbone.state_dict()
    from_file = own(backbone="test_resnet", weights=str(tmp_path / "added.safetensors"))
    for name, tensor in build_state(from_file).network.backbone.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(tensor, named[name])
    assert config.identity()["network"]["weights"] == entry.name
    assert fingerprint_of_weights(config) == {"weights": entry.sha256}
    with raises("network.weights.missing", "no such file", f"Did you mean {entry.name!r}?"):
        build_state(own(backbone="test_resnet", weights=entry.name[:-1]))


def test_the_normalization_is_that_of_the_weights_for_own_images_and_where_asked(tmp_path, small):
    """test_vit's own are halves, test_resnet's too in timm; a published dataset keeps its own."""
    halves = (0.5, 0.5, 0.5)
    entry = registered(tmp_path, small)
    assert timm.get_pretrained_cfg("test_resnet").mean == halves
    assert entry.normalization == (halves, halves)

    def mean(**settings):
        return build_state(own(backbone="test_resnet", **settings)).preprocessing.mean

    assert mean(weights=entry.name) == halves
    assert mean(weights=str(tmp_path / "added.safetensors")) == halves
    assert mean(weights=None) == mean(weights="none") == IMAGENET_MEAN
    assert mean(weights=entry.name, data={"normalization": "dataset"}) == IMAGENET_MEAN
    with raises("config.normalization.unknown"):
        mean(weights=None, data={"normalization": "weights"})
    for asked, expected in (({}, IMAGENET_MEAN), ({"normalization": "weights"}, halves)):
        published = own(backbone="test_resnet", weights=entry.name).model_dump()
        published |= {"data": {"name": "ham10000", "side": 64, "crop": 64, **asked}}
        published |= {"scenario": {"base": 3, "increment": 2}}
        assert build_state(parse_recipe(published)).preprocessing.mean == expected


def test_the_tag_of_a_backbone_decides_its_normalization(tmp_path):
    with torch.device("meta"):
        shapes = timm.create_model("vit_small_patch16_224").state_dict()
    tensors = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in shapes.items()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    plain, _ = add_weights(tmp_path / "a.safetensors")
    tagged, _ = add_weights(tmp_path / "a.safetensors", backbone="vit_small_patch16_224.dino")
    assert plain.normalization == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert tagged.normalization == timm_normalization("vit_small_patch16_224.dino")
    assert tagged.normalization != plain.normalization
    assert find_weights(tagged.name, "vit_small_patch16_224") == tagged


def timm_normalization(name):
    settings = timm.get_pretrained_cfg(name)
    return settings.mean, settings.std
