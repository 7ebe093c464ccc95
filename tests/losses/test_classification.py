"""The classification losses against Eq. 2 to 7 and the baselines' formulas, as loops over floats."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from medcil.losses import (
    cil_balanced_cross_entropy,
    class_balanced_focal,
    focal,
    nca,
    one_vs_rest,
    separated_softmax,
)

QUICK = settings(max_examples=80, deadline=None)
ALPHAS = st.floats(0.05, 1.0)


@st.composite
def batches(draw, min_count=1):
    """Logits, labels of classes that have images, counts and n_old, in float64."""
    n_batch, n_classes = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(min_count, 3000), min_size=n_classes, max_size=n_classes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = 4 * torch.randn(n_batch, n_classes, dtype=torch.float64, generator=generator)
    labels = torch.randint(n_classes, (n_batch,), generator=generator)
    return logits, labels, counts, draw(st.integers(0, n_classes))


def paper_cbc(logits, labels, counts, n_old, alpha):
    """Eq. 7 over the classes with images, through r_c (Eq. 2), v_{y,j} (Eq. 5) and γ_c (Eq. 6)."""
    n_images = sum(counts)
    seen = [c for c in range(len(counts)) if counts[c] > 0]
    r = {c: counts[c] / n_images for c in seen}
    gamma = {c: alpha if c < n_old else 1.0 for c in seen}
    losses = []
    for p, y in zip(logits, labels, strict=True):
        if y not in r:
            continue
        v = {j: math.log(r[j]) - math.log(r[y]) for j in seen}
        numerator = gamma[y] * math.exp(p[y])
        losses.append(-math.log(numerator / sum(gamma[j] * math.exp(p[j] + v[j]) for j in seen)))
    return sum(losses) / len(losses) if losses else 0.0


def plain_focal(logits, labels, focusing, weights=None):
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        p = math.exp(z[y]) / sum(math.exp(other) for other in z)
        rest = sum(math.exp(z[j]) for j in range(len(z)) if j != y) / sum(math.exp(other) for other in z)
        total -= (weights[y] if weights else 1.0) * rest**focusing * math.log(p)
    return total / len(labels)


def example(n_batch=5, n_classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_batch, n_classes, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.randint(n_classes, (n_batch,), generator=generator)


@QUICK
@given(batches(), ALPHAS)
def test_cil_balanced_is_the_papers_formula(batch, alpha):
    logits, labels, counts, n_old = batch
    loss = cil_balanced_cross_entropy(logits, labels, torch.tensor(counts), n_old=n_old, alpha=alpha)
    expected = paper_cbc(logits.tolist(), labels.tolist(), counts, n_old, alpha)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


@QUICK
@given(batches(min_count=-2000), ALPHAS)
def test_cil_balanced_leaves_classes_without_images_out(batch, alpha):
    logits, labels, counts, n_old = batch
    counts = [max(count, 0) for count in counts]  # about two classes in five have none
    logits.requires_grad_()
    loss = cil_balanced_cross_entropy(logits, labels, torch.tensor(counts), n_old=n_old, alpha=alpha)
    loss.backward()
    assert loss.item() == pytest.approx(
        paper_cbc(logits.tolist(), labels.tolist(), counts, n_old, alpha), abs=1e-10
    )
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, torch.tensor(counts) == 0].any()


@QUICK
@given(batches(), ALPHAS, st.floats(1e-4, 1e4))
def test_cil_balanced_takes_counts_or_frequencies(batch, alpha, factor):
    logits, labels, counts, n_old = batch
    counts = torch.tensor(counts)
    loss = cil_balanced_cross_entropy(logits, labels, counts, n_old=n_old, alpha=alpha)
    scaled = cil_balanced_cross_entropy(logits, labels, factor * counts.double(), n_old=n_old, alpha=alpha)
    torch.testing.assert_close(loss, scaled)


@QUICK
@given(batches(), ALPHAS, st.randoms(use_true_random=False))
def test_cil_balanced_does_not_depend_on_order(batch, alpha, random):
    logits, labels, counts, n_old = batch
    old, new = list(range(n_old)), list(range(n_old, len(counts)))
    samples = list(range(len(labels)))
    for order in (old, new, samples):
        random.shuffle(order)
    classes = torch.tensor(old + new)
    loss = cil_balanced_cross_entropy(logits, labels, torch.tensor(counts), n_old=n_old, alpha=alpha)
    permuted = cil_balanced_cross_entropy(
        logits[samples][:, classes],
        classes.argsort()[labels[samples]],
        torch.tensor(counts)[classes],
        n_old=n_old,
        alpha=alpha,
    )
    torch.testing.assert_close(loss, permuted)


def test_cil_balanced_with_equal_counts_and_alpha_1_is_cross_entropy():
    logits, labels = example()
    equal = torch.full((4,), 20)
    loss = cil_balanced_cross_entropy(logits, labels, equal, n_old=2, alpha=1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    assert not loss.isclose(cil_balanced_cross_entropy(logits, labels, equal, n_old=2, alpha=0.5))


def test_smaller_alpha_asks_more_of_old_classes_and_less_of_new_ones():
    logits, counts = torch.zeros(1, 2), torch.tensor([20, 20])

    def loss(label, alpha):
        return cil_balanced_cross_entropy(logits, torch.tensor([label]), counts, n_old=1, alpha=alpha)

    assert loss(0, 0.3) > loss(0, 1.0)
    assert loss(1, 0.3) < loss(1, 1.0)


def test_no_sample_of_a_class_with_images_gives_zero_with_a_gradient_path():
    logits, _ = example()
    for counts in ([0, 5, 5, 5], [0, 0, 0, 0]):
        loss = cil_balanced_cross_entropy(
            logits, torch.zeros(5, dtype=torch.long), torch.tensor(counts), n_old=2, alpha=0.5
        )
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.5, math.nan])
def test_alpha_is_refused_outside_its_interval(alpha):
    logits, labels = example()
    with pytest.raises(ValueError, match=r"^Choose alpha in \(0, 1\]"):
        cil_balanced_cross_entropy(logits, labels, torch.ones(4), n_old=2, alpha=alpha)


@QUICK
@given(batches(), st.floats(0, 4))
def test_focal_is_its_formula(batch, focusing):
    logits, labels, _, _ = batch
    loss = focal(logits, labels, focusing=focusing)
    assert loss.item() == pytest.approx(plain_focal(logits.tolist(), labels.tolist(), focusing), abs=1e-10)


def test_focal_without_focusing_is_cross_entropy():
    logits, labels = example()
    torch.testing.assert_close(focal(logits, labels, focusing=0), F.cross_entropy(logits, labels))
    assert focal(logits, labels, focusing=1) < F.cross_entropy(logits, labels)


@pytest.mark.parametrize("focusing", [0.0, 0.5, 1.0, 2.0])
def test_focal_has_a_finite_gradient_where_the_probability_rounds_to_1(focusing):
    logits = torch.tensor([[200.0, 0.0, -3.0]], requires_grad=True)
    focal(logits, torch.tensor([0]), focusing=focusing).backward()
    assert logits.grad.isfinite().all()


@QUICK
@given(batches(), st.floats(0, 0.9999), st.floats(0, 3))
def test_class_balanced_focal_is_its_formula(batch, beta, focusing):
    logits, labels, counts, _ = batch
    raw = [(1 - beta) / (1 - beta**n) for n in counts]
    weights = [w * len(raw) / sum(raw) for w in raw]
    loss = class_balanced_focal(logits, labels, torch.tensor(counts), beta=beta, focusing=focusing)
    expected = plain_focal(logits.tolist(), labels.tolist(), focusing, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_class_balanced_focal_with_beta_0_is_focal():
    logits, labels = example()
    counts = torch.tensor([1, 20, 300, 4000])
    loss = class_balanced_focal(logits, labels, counts, beta=0, focusing=1.5)
    torch.testing.assert_close(loss, focal(logits, labels, focusing=1.5))
    assert not loss.isclose(class_balanced_focal(logits, labels, counts, beta=0.9, focusing=1.5))


def test_class_balanced_focal_gives_no_weight_to_a_class_without_images():
    logits, _ = example(n_batch=2)
    counts = torch.tensor([0, 20, 300, 5])
    raw = [(1 - 0.9) / (1 - 0.9**n) for n in (20, 300, 5)]
    loss = class_balanced_focal(logits, torch.tensor([0, 1]), counts, beta=0.9, focusing=0)
    expected = 3 * raw[0] / sum(raw) * F.cross_entropy(logits[1:], torch.tensor([1])) / 2
    torch.testing.assert_close(loss, expected)
    none = class_balanced_focal(logits, torch.tensor([0, 1]), torch.zeros(4), beta=0.9, focusing=0)
    none.backward()
    assert none.item() == 0
    assert not logits.grad.any()


def test_effective_numbers_keep_their_digits_in_single_precision():
    logits, labels = torch.zeros(1, 2), torch.tensor([0])
    counts, beta = torch.tensor([1, 2]), 0.99999
    share = 2 * (1 + beta) / (2 + beta)  # w_1 = 1 and w_2 = 1 / (1 + β), scaled to sum to 2
    loss = class_balanced_focal(logits, labels, counts, beta=beta, focusing=0)
    assert loss.item() == pytest.approx(share * math.log(2), rel=1e-6)


def test_beta_and_focusing_are_refused_outside_their_intervals():
    logits, labels = example()
    for beta in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"^Choose beta in \[0, 1\)"):
            class_balanced_focal(logits, labels, torch.ones(4), beta=beta, focusing=1)
    with pytest.raises(ValueError, match=r"^Choose focusing"):
        focal(logits, labels, focusing=-1)


def plain_nca(logits, labels, margin):
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        others = sum(math.exp(z[c]) for c in range(len(z)) if c != y)
        if others > 0:
            total += max(0.0, -math.log(math.exp(z[y] - margin) / others))
    return total / len(labels)


@QUICK
@given(batches(), st.floats(-1, 3))
def test_nca_is_its_formula(batch, margin):
    logits, labels, _, _ = batch
    expected = plain_nca(logits.tolist(), labels.tolist(), margin)
    assert nca(logits, labels, margin=margin).item() == pytest.approx(expected, abs=1e-10)
    tensor = nca(logits, labels, margin=torch.tensor(margin, dtype=torch.float64))
    assert tensor.item() == pytest.approx(expected, abs=1e-10)


@QUICK
@given(batches())
def test_nca_without_a_margin_is_the_negative_log_odds_down_to_even_odds(batch):
    logits, labels, _, _ = batch
    p = logits.softmax(dim=1)[torch.arange(len(labels)), labels]
    odds = p / (1 - p)
    torch.testing.assert_close(nca(logits, labels), torch.where(p < 0.5, -odds.log(), 0.0).mean())


def test_a_sample_beyond_even_odds_moves_nothing_and_a_margin_asks_more_of_it():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0])
    (gradient,) = torch.autograd.grad(nca(logits, labels), logits)
    assert not gradient[0].any()
    torch.testing.assert_close(gradient[1], torch.tensor([-0.5, 0.25, 0.25], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(nca(logits, labels, margin=2.0), logits)
    torch.testing.assert_close(gradient[0], torch.tensor([-0.5, 0.25, 0.25], dtype=torch.float64))


def test_the_margin_of_nca_may_be_trained():
    logits = torch.tensor([[9.0, 0.0], [0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    margin = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    nca(logits, torch.tensor([0, 0, 1]), margin=margin).backward()
    assert margin.grad.item() == pytest.approx(2 / 3)  # one sample of three is beyond the hinge


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [0.0, 1e4, -1e4])
def test_nca_of_one_class_is_zero_with_a_gradient_path(logit, dtype):
    logits = torch.full((3, 1), logit, dtype=dtype, requires_grad=True)
    loss = nca(logits, torch.zeros(3, dtype=torch.long), margin=0.5)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nca", "separated_softmax", "one_vs_rest"])
def test_extreme_logits_give_a_finite_loss_and_gradient(name, dtype):
    rows = [[1e4, -1e4, 1e4, -1e4], [-1e4, 1e4, -1e4, 1e4], [1e4] * 4, [-1e4] * 4]
    logits = torch.tensor(rows * 4, dtype=dtype, requires_grad=True)
    labels = torch.arange(4).repeat_interleave(4)
    loss = LOSSES[name](logits, labels, None)
    loss.backward()
    assert loss.isfinite()
    assert loss > 1000  # some of the samples are as wrong as can be
    assert logits.grad.isfinite().all()
    assert logits.grad.any()


def plain_separated(logits, labels, n_old):
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        group = range(n_old) if y < n_old else range(n_old, len(z))
        total -= math.log(math.exp(z[y]) / sum(math.exp(z[c]) for c in group))
    return total / len(labels)


@QUICK
@given(batches())
def test_separated_softmax_is_its_formula(batch):
    logits, labels, _, n_old = batch
    loss = separated_softmax(logits, labels, n_old=n_old)
    assert loss.item() == pytest.approx(plain_separated(logits.tolist(), labels.tolist(), n_old), abs=1e-10)


@QUICK
@given(batches())
def test_separated_softmax_moves_the_logits_of_the_own_group_only(batch):
    logits, labels, _, n_old = batch
    separated_softmax(logits.requires_grad_(), labels, n_old=n_old).backward()
    is_old = labels < n_old
    assert logits.grad.isfinite().all()
    assert not logits.grad[is_old, n_old:].any()
    assert not logits.grad[~is_old, :n_old].any()


@QUICK
@given(batches(), st.floats(-1000, 1000))
def test_separated_softmax_does_not_compare_old_with_new(batch, shift):
    logits, labels, _, n_old = batch
    shifted = torch.cat([logits[:, :n_old] + shift, logits[:, n_old:]], dim=1)
    torch.testing.assert_close(
        separated_softmax(shifted, labels, n_old=n_old), separated_softmax(logits, labels, n_old=n_old)
    )


def test_separated_softmax_of_one_group_is_cross_entropy():
    logits, labels = example()
    plain = F.cross_entropy(logits, labels)
    torch.testing.assert_close(separated_softmax(logits, labels, n_old=0), plain)
    torch.testing.assert_close(separated_softmax(logits, labels, n_old=4), plain)
    assert separated_softmax(logits, labels, n_old=2) < plain  # fewer classes to be told from


def plain_one_vs_rest(logits, labels, n_old):
    total, n_classes = 0.0, len(logits[0])
    for z, y in zip(logits, labels, strict=True):
        for c in range(n_old, n_classes):
            sigmoid = 1 / (1 + math.exp(-z[c] if c == y else z[c]))
            total -= math.log(sigmoid)
    return total / (len(labels) * n_classes)


@QUICK
@given(batches())
def test_one_vs_rest_is_its_formula(batch):
    logits, labels, _, n_old = batch
    loss = one_vs_rest(logits, labels, n_old=n_old)
    assert loss.item() == pytest.approx(plain_one_vs_rest(logits.tolist(), labels.tolist(), n_old), abs=1e-10)


def test_one_vs_rest_without_old_classes_is_the_mean_binary_cross_entropy():
    logits, labels = example()
    plain = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 4).double())
    torch.testing.assert_close(one_vs_rest(logits, labels, n_old=0), plain)
    assert one_vs_rest(logits, labels, n_old=1) < plain


def test_one_vs_rest_pulls_new_outputs_of_old_samples_down_and_leaves_old_outputs_alone():
    logits, _ = example()
    one_vs_rest(logits, torch.tensor([0, 1, 1, 2, 3]), n_old=2).backward()
    assert not logits.grad[:, :2].any()
    is_pushed_up = logits.grad[:, 2:] < 0
    assert is_pushed_up.tolist() == [[False, False]] * 3 + [[True, False], [False, True]]


def test_one_vs_rest_is_zero_with_a_gradient_path_without_new_classes():
    logits, labels = example()
    loss = one_vs_rest(logits, labels, n_old=4)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("name", ["nca", "separated_softmax", "one_vs_rest"])
def test_order_of_samples_and_of_classes_within_old_and_new_does_not_matter(name):
    logits, labels = example()
    samples, classes = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([1, 0, 3, 2])
    permuted = LOSSES[name](logits[samples][:, classes], classes.argsort()[labels[samples]], None)
    torch.testing.assert_close(permuted, LOSSES[name](logits, labels, None))


LOSSES = {
    "cil_balanced": lambda z, y, n: cil_balanced_cross_entropy(z, y, n, n_old=2, alpha=0.4),
    "focal": lambda z, y, n: focal(z, y, focusing=0.5),
    "class_balanced_focal": lambda z, y, n: class_balanced_focal(z, y, n, beta=0.99, focusing=2),
    "nca": lambda z, y, n: nca(z, y, margin=0.5),
    "separated_softmax": lambda z, y, n: separated_softmax(z, y, n_old=2),
    "one_vs_rest": lambda z, y, n: one_vs_rest(z, y, n_old=2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    logits, labels = example()
    counts = torch.tensor([20, 0, 300, 4000])
    assert gradcheck(lambda z: LOSSES[name](z, labels, counts), (logits,))


@pytest.mark.parametrize("name", ["cil_balanced", "class_balanced_focal"])
def test_integer_and_float_counts_agree(name):
    logits, labels = example()
    counts = torch.tensor([20, 0, 300, 4000])
    expected = LOSSES[name](logits, labels, counts)
    torch.testing.assert_close(LOSSES[name](logits, labels, counts.double()), expected)
    torch.testing.assert_close(LOSSES[name](logits, labels, counts.int()), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_precision_is_that_of_the_logits(name, dtype, tolerance):
    logits, labels = example()
    counts = torch.tensor([20, 0, 300, 70_000])  # the last one is beyond float16
    loss = LOSSES[name](logits.to(dtype), labels, counts)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(LOSSES[name](logits, labels, counts).item(), rel=tolerance)
