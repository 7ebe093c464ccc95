"""The comparison of `make proof` on the real HAM10000, small enough for every run of the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs"))
from ham10000_forgetting import Size, compare, mean_of


@pytest.mark.slow
def test_balanced_forgets_less_on_real_images_at_no_loss_of_balance(
    shared_data: Path, tmp_path: Path
) -> None:
    weights = shared_data.parent / "weights" / "resnet18_imagenet1k_v1_fp16.safetensors"
    root = shared_data / "ham10000_200x150.tar.gz"
    # Two orders of three, in which NV, two thirds of all images, comes last and in between.
    results = compare(root, weights, tmp_path, Size(side=36, crop=32, keep_every=12), orders=(0, 1))
    baseline, balanced = results["CE + distillation"], results["balanced"]
    assert mean_of(balanced, "forgetting") < mean_of(baseline, "forgetting") - 0.1
    assert mean_of(balanced, "acc_balanced") >= mean_of(baseline, "acc_balanced")
