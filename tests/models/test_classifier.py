"""The classifier against plain loops: similarities, growth by rows and columns, calibrations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.errors import InvalidInput
from medcil.models.classifier import Classifier

QUICK = settings(max_examples=40, deadline=None)
SEED = st.integers(0, 2**20)
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3)
DIM = 5


def new_classifier(dim=DIM, *, kind="cosine", n_proxies=1, scale=2.0, learn_scale=True) -> Classifier:
    return Classifier(dim, kind=kind, n_proxies=n_proxies, scale=scale, learn_scale=learn_scale)


def grown(seed, sizes, *, proxies=1, **options) -> Classifier:
    """With a block of random weights for each of the sizes."""
    generator = torch.Generator().manual_seed(seed)
    classifier = new_classifier(**options)
    for size in sizes:
        classifier.grow(torch.randn(size, proxies, classifier.dim, generator=generator))
    return classifier


def embeddings(seed, n=4, dim=DIM) -> torch.Tensor:
    return 3 * torch.randn(n, dim, generator=torch.Generator().manual_seed(seed + 1))


def rows_of(classifier) -> list[list[float]]:
    """One for each proxy, its parts for the branches put together by hand."""
    rows = []
    for block in classifier.blocks:
        for parts in zip(*(column.tolist() for column in block), strict=True):
            rows.append([x for part in parts for x in part])
    return rows


def inner(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine_of(a, b) -> float:
    return inner(a, b) / math.hypot(*a) / math.hypot(*b)


@QUICK
@given(seed=SEED, scale=st.floats(0.1, 20), sizes=SIZES)
def test_logits_are_the_scale_times_the_cosines(seed, scale, sizes):
    classifier = grown(seed, sizes, scale=scale)
    embedding = embeddings(seed)
    cosine, logits = classifier(embedding)
    assert cosine.shape == logits.shape == (4, sum(sizes))
    for i, h in enumerate(embedding.tolist()):
        for c, w in enumerate(rows_of(classifier)):
            assert cosine[i, c].item() == pytest.approx(cosine_of(h, w), abs=1e-5)
            assert logits[i, c].item() == pytest.approx(scale * cosine_of(h, w), abs=1e-4)


@QUICK
@given(seed=SEED, scale=st.floats(0.1, 20), sizes=SIZES, n_proxies=st.integers(1, 4))
def test_several_proxies_are_averaged_by_the_softmax_of_their_cosines(seed, scale, sizes, n_proxies):
    classifier = grown(seed, sizes, proxies=n_proxies, scale=scale)
    embedding = embeddings(seed)
    similarity, logits = classifier(embedding)
    assert similarity.shape == logits.shape == (4, sum(sizes))
    rows = rows_of(classifier)
    for i, h in enumerate(embedding.tolist()):
        for c in range(sum(sizes)):
            cosines = [cosine_of(h, w) for w in rows[c * n_proxies : (c + 1) * n_proxies]]
            total = sum(math.exp(x) for x in cosines)
            expected = sum(math.exp(x) / total * x for x in cosines)
            assert similarity[i, c].item() == pytest.approx(expected, abs=1e-5)
            assert logits[i, c].item() == pytest.approx(scale * expected, abs=1e-4)


@QUICK
@given(seed=SEED, sizes=SIZES)
def test_linear_logits_are_inner_products_without_the_scale(seed, sizes):
    classifier = grown(seed, sizes, kind="linear", scale=7.0)
    embedding = embeddings(seed)
    cosine, logits = classifier(embedding)
    for i, h in enumerate(embedding.tolist()):
        for c, w in enumerate(rows_of(classifier)):
            assert logits[i, c].item() == pytest.approx(inner(h, w), abs=1e-4)
            assert cosine[i, c].item() == pytest.approx(cosine_of(h, w), abs=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_classifier_without_classes_has_no_logits(kind):
    cosine, logits = new_classifier(kind=kind)(torch.randn(4, DIM))
    assert cosine.shape == logits.shape == (4, 0)


@pytest.mark.parametrize("learn_scale", [True, False])
def test_the_scale_is_learned_or_held(learn_scale):
    classifier = new_classifier(scale=2.0, learn_scale=learn_scale)
    assert classifier.scale.requires_grad == learn_scale
    assert classifier.scale.item() == 2.0


@pytest.mark.parametrize("shape", [(3, 2), (3, 4, 2)], ids=["one proxy", "several"])
def test_growing_copies_the_weights_given(shape):
    classifier = new_classifier(2)
    weights = torch.ones(shape, requires_grad=True)
    classifier.grow(weights)
    with torch.no_grad():
        weights.zero_()
    assert torch.equal(classifier.weight, torch.ones(3 * math.prod(shape[1:-1]), 2))
    assert classifier.blocks[0][0].is_leaf
    assert classifier.n_classes == 3


def test_weights_stand_class_after_class_and_proxy_after_proxy():
    classifier = new_classifier(2)
    classifier.grow(torch.arange(12.0).reshape(2, 3, 2))
    classifier.grow(torch.arange(12.0, 18.0).reshape(1, 3, 2))
    assert torch.equal(classifier.weight, torch.arange(18.0).reshape(9, 2))


@QUICK
@given(seed=SEED, sizes=SIZES, n_proxies=st.integers(1, 3))
def test_the_weight_of_a_class_is_the_mean_of_its_proxies(seed, sizes, n_proxies):
    classifier = grown(seed, sizes, proxies=n_proxies)
    rows = rows_of(classifier)
    assert classifier.block_sizes == tuple(sizes)
    assert classifier.n_classes == sum(sizes)
    assert classifier.class_weights.shape == (sum(sizes), DIM)
    for c, weights in enumerate(classifier.class_weights.tolist()):
        proxies = rows[c * n_proxies : (c + 1) * n_proxies]
        assert weights == pytest.approx(
            [sum(column) / n_proxies for column in zip(*proxies, strict=True)], abs=1e-6
        )


def test_a_loss_on_class_weights_moves_every_proxy():
    classifier = grown(0, [2, 1], proxies=3)
    classifier.class_weights.sum().backward()
    for block in classifier.blocks:
        torch.testing.assert_close(block[0].grad, torch.full_like(block[0], 1 / 3))


def test_the_first_block_settles_the_number_of_proxies():
    classifier = new_classifier(2, n_proxies=5)
    classifier.grow(torch.zeros(3, 2, 2))
    assert classifier.n_proxies == 2
    for weights in (torch.zeros(3, 2), torch.zeros(3, 1, 2), torch.zeros(3, 3, 2)):
        n_given = 1 if weights.ndim == 2 else weights.shape[1]
        with pytest.raises(ValueError, match=f"have 2 proxies, but {n_given} are given"):
            classifier.grow(weights)
    assert classifier.block_sizes == (3,)


def test_several_proxies_have_no_linear_logits():
    with pytest.raises(InvalidInput, match=r"network\.classifier: .* Use cosine"):
        new_classifier(2, kind="linear").grow(torch.zeros(3, 2, 2))


@QUICK
@given(seed=SEED, sizes=SIZES, n_proxies=st.integers(1, 3), n_branches=st.integers(1, 3))
def test_columns_for_a_copy_of_the_newest_branch_are_a_copy_of_its_columns(
    seed, sizes, n_proxies, n_branches
):
    classifier = grown(seed, sizes, proxies=n_proxies)
    embedding = embeddings(seed)
    before = classifier(embedding)
    weight = classifier.weight.clone()
    for _ in range(n_branches):
        classifier.widen(DIM)
    assert classifier.dim == DIM * (1 + n_branches)
    assert torch.equal(classifier.weight, weight.repeat(1, 1 + n_branches))
    assert classifier.block_sizes == tuple(sizes)
    # <(h, h), (w, w)> = 2 <h, w>, and both lengths grow by √2.
    for actual, expected in zip(classifier(embedding.repeat(1, 1 + n_branches)), before, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_columns_are_parameters_of_their_own():
    classifier = grown(0, [2])
    classifier.widen(DIM)
    old, new = classifier.columns_of_blocks()[0]
    before = old.clone()
    with torch.no_grad():
        new.add_(1.0)
    assert torch.equal(old, before)
    assert new.is_leaf
    assert [name for name, _ in classifier.blocks.named_parameters()] == ["0.0", "0.1"]


def test_the_newest_columns_are_the_ones_copied():
    classifier = grown(0, [2])
    classifier.widen(DIM)
    with torch.no_grad():
        classifier.blocks[0][1].add_(1.0)
    classifier.widen(DIM)
    assert torch.equal(classifier.blocks[0][2], classifier.blocks[0][1])


def test_classes_added_to_several_branches_have_columns_for_each():
    classifier = grown(0, [2], dim=3)
    classifier.widen(3)
    classifier.widen(3)
    weights = torch.arange(36.0).reshape(2, 2, 9)[:, :1]
    classifier.grow(weights)
    assert [len(block) for block in classifier.blocks] == [3, 3]
    for branch, columns in enumerate(classifier.columns_of_blocks()[1]):
        assert torch.equal(columns, weights[:, 0, 3 * branch : 3 * (branch + 1)])
    assert torch.equal(classifier.weight[2:], weights[:, 0])


def test_weights_as_wide_as_one_branch_do_not_fit_two():
    classifier = grown(0, [2], dim=3)
    classifier.widen(3)
    with pytest.raises(RuntimeError, match="split"):
        classifier.grow(torch.zeros(1, 3))


@QUICK
@given(
    seed=SEED,
    kind=st.sampled_from(["cosine", "linear"]),
    sizes=SIZES,
    each_class=st.lists(st.sampled_from([None, True, False]), min_size=3, max_size=3),
)
def test_a_calibrated_block_is_multiplied_and_shifted(seed, kind, sizes, each_class):
    """By numbers of each class's own, by two numbers for a whole task, or not at all."""
    classifier = grown(seed, sizes, kind=kind)
    embedding = embeddings(seed)
    cosine, plain = classifier(embedding)
    expected = plain.tolist()
    generator = torch.Generator().manual_seed(seed)
    first = 0
    for block, (size, is_of_each) in enumerate(zip(sizes, each_class, strict=False)):
        if is_of_each is not None:
            calibration = classifier.calibrate(block, size=size if is_of_each else 1)
            assert torch.equal(
                classifier(embedding)[1][:, first : first + size], plain[:, first : first + size]
            )
            with torch.no_grad():
                calibration.gain.copy_(torch.randn(len(calibration.gain), generator=generator))
                calibration.shift.copy_(torch.randn(len(calibration.gain), generator=generator))
            gain, shift = calibration.gain.tolist(), calibration.shift.tolist()
            for row in expected:
                for c in range(size):
                    k = c if is_of_each else 0
                    row[first + c] = gain[k] * row[first + c] + shift[k]
        first += size
    cosine_again, logits = classifier(embedding)
    assert torch.equal(cosine_again, cosine)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert classifier.calibration_sizes() == tuple(
        0 if is_of_each is None else size if is_of_each else 1
        for size, is_of_each in zip(sizes, each_class, strict=False)
    )


def test_calibrating_a_block_again_begins_anew():
    classifier = grown(0, [2, 1])
    plain = classifier(embeddings(0))[1]
    first = classifier.calibrate(1, size=1)
    with torch.no_grad():
        first.gain.fill_(5.0)
    assert not torch.equal(classifier(embeddings(0))[1], plain)
    classifier.calibrate(1, size=1)
    assert torch.equal(classifier(embeddings(0))[1], plain)
    assert len(list(classifier.calibrations.parameters())) == 2


def test_a_calibration_of_an_old_task_leaves_classes_that_come_later_alone():
    classifier = grown(0, [2])
    calibration = classifier.calibrate(0, size=1)
    with torch.no_grad():
        calibration.shift.fill_(100.0)
    classifier.grow(torch.ones(1, DIM))
    logits = classifier(embeddings(0))[1]
    assert (logits[:, :2] > 90).all()
    assert (logits[:, 2] < 10).all()
    assert classifier.calibration_sizes() == (1, 0)
