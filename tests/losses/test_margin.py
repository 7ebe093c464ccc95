"""The margin losses against Eq. 8 to 10 and UCIR's margin ranking, written out as loops over floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from medcil.losses import distribution_margin, margin_ranking, vanilla_margin

QUICK = settings(max_examples=80, deadline=None)


class Example:
    """Random inputs of the margin losses, in float64."""

    def __init__(self, n_batch=6, n_old=3, n_new=2, dim=4, seed=0, counts=None, labels=None):
        generator = torch.Generator().manual_seed(seed)
        n_classes = n_old + n_new
        self.n_old = n_old
        self.embeddings = torch.randn(n_batch, dim, dtype=torch.float64, generator=generator).requires_grad_()
        self.weights = torch.randn(n_classes, dim, dtype=torch.float64, generator=generator).requires_grad_()
        self.noise = torch.randn(n_classes, dim, dtype=torch.float64, generator=generator)
        drawn = torch.randint(n_classes, (n_batch,), generator=generator)
        self.labels = drawn if labels is None else torch.tensor(labels)
        self.counts = torch.tensor(counts or [40 * (c + 1) for c in range(n_classes)])

    def vanilla(self, **options):
        return vanilla_margin(self.embeddings, self.weights, self.labels, n_old=self.n_old, **options)

    def distribution(self, **options):
        inputs = (self.embeddings, self.weights, self.labels, self.counts)
        return distribution_margin(*inputs, n_old=self.n_old, **{"noise": self.noise, **options})

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.embeddings, self.weights))


@st.composite
def examples(draw, min_count=1, max_count=3000):
    n_old, n_new = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    if n_old + n_new == 0:
        n_new = 1
    return Example(
        n_batch=draw(st.integers(1, 6)),
        n_old=n_old,
        n_new=n_new,
        dim=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**20)),
        counts=draw(
            st.lists(st.integers(min_count, max_count), min_size=n_old + n_new, max_size=n_old + n_new)
        ),
    )


def cosine(a, b):
    norm_a, norm_b = math.sqrt(sum(x * x for x in a)), math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / (norm_a * norm_b)


def paper_margins(e, margin, *, noise_scale=1.0, normalize_weights=False):
    """The terms of Eq. 9 before they are summed: one list per sum; without noise the first is Eq. 8's."""
    h, w, q, noise = e.embeddings.tolist(), e.weights.tolist(), e.counts.tolist(), e.noise.tolist()
    if normalize_weights:
        w = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in w]
    ratio = [count / max(sum(q), 1) for count in q]
    w_hat = [
        [x + noise_scale * eta * ratio[c] for x, eta in zip(w[c], noise[c], strict=True)]
        for c in range(len(w))
    ]
    rivals = [c for c in range(e.n_old, len(w)) if q[c] > 0]
    anchors = [i for i, y in enumerate(e.labels.tolist()) if y < e.n_old and q[y] > 0 and rivals]
    apart, compact = [], []
    for i in anchors:
        y = int(e.labels[i])
        for c in rivals:
            apart.append(max(0.0, cosine(h[i], w_hat[c]) - cosine(h[i], w[y]) + margin))
        compact.append(max(0.0, cosine(w_hat[y], w[y]) - cosine(h[i], w[y])))
    return apart, compact


def total(values, reduction):
    return sum(values) / (max(len(values), 1) if reduction == "mean" else 1)


@QUICK
@given(examples(), st.floats(0, 1), st.sampled_from(["sum", "mean"]))
def test_vanilla_margin_is_the_papers_formula(e, margin, reduction):
    apart, _ = paper_margins(e, margin, noise_scale=0.0)
    loss = e.vanilla(margin=margin, reduction=reduction)
    assert loss.item() == pytest.approx(total(apart, reduction), abs=1e-10)


@QUICK
@given(examples(), st.floats(0, 1), st.sampled_from(["sum", "mean"]), st.booleans(), st.floats(0, 2))
def test_distribution_margin_is_the_papers_formula(e, margin, reduction, normalize, scale):
    apart, compact = paper_margins(e, margin, noise_scale=scale, normalize_weights=normalize)
    loss = e.distribution(margin=margin, reduction=reduction, normalize_weights=normalize, noise_scale=scale)
    assert loss.item() == pytest.approx(total(apart, reduction) + total(compact, reduction), abs=1e-10)


@QUICK
@given(examples(min_count=0, max_count=2))
def test_a_class_without_images_is_no_rival_and_no_anchor(e):
    apart, compact = paper_margins(e, 0.4)
    loss = e.distribution()
    assert loss.item() == pytest.approx(sum(apart) + sum(compact), abs=1e-10)
    assert all(gradient.isfinite().all() for gradient in e.gradients(loss))
    mean = e.distribution(reduction="mean")
    assert mean.item() == pytest.approx(total(apart, "mean") + total(compact, "mean"), abs=1e-10)


def test_the_defaults_are_the_printed_equation():
    e = Example()
    printed = e.distribution(
        margin=0.4, normalize_weights=False, noise_scale=1.0, reduction="sum", detach_range=False
    )
    assert e.distribution() == printed
    assert e.vanilla() == e.vanilla(margin=0.4, reduction="sum")
    changes = [
        {"margin": 0.5},
        {"normalize_weights": True},
        {"noise_scale": "inverse_sqrt_dim"},
        {"reduction": "mean"},
    ]
    assert not any(e.distribution(**change).isclose(printed) for change in changes)


def test_without_noise_it_is_the_vanilla_margin_and_one_minus_the_own_cosine():
    e = Example()
    still = e.distribution(noise=torch.zeros_like(e.noise))
    is_old = e.labels < e.n_old
    own = torch.cosine_similarity(e.embeddings, e.weights[e.labels])
    torch.testing.assert_close(still, e.vanilla() + (1 - own)[is_old].sum())
    torch.testing.assert_close(still, e.distribution(noise_scale=0.0))


def test_inverse_sqrt_dim_scales_the_noise():
    e = Example(dim=9)
    torch.testing.assert_close(
        e.distribution(noise_scale="inverse_sqrt_dim"), e.distribution(noise=e.noise / 3)
    )


def test_normalized_weights_make_the_length_of_weights_irrelevant():
    e = Example()
    normalized, literal = e.distribution(normalize_weights=True), e.distribution()
    with torch.no_grad():
        e.weights *= 3
    torch.testing.assert_close(e.distribution(normalize_weights=True), normalized)
    assert not e.distribution().isclose(literal)


def test_detach_range_changes_the_gradient_only():
    e = Example()
    trained, detached = e.distribution(), e.distribution(detach_range=True)
    assert trained == detached
    (h_trained, w_trained), (h_detached, w_detached) = e.gradients(trained), e.gradients(detached)
    torch.testing.assert_close(h_trained, h_detached)
    # ⟨ŵ_y, w_y⟩ concerns anchors' classes only: the new classes' weights are pulled as before.
    torch.testing.assert_close(w_trained[e.n_old :], w_detached[e.n_old :])
    assert not torch.allclose(w_trained[: e.n_old], w_detached[: e.n_old])


def test_noise_is_fixed_by_the_caller_or_by_the_generator():
    e = Example()

    def drawn(seed):
        return e.distribution(noise=None, generator=torch.Generator().manual_seed(seed))

    assert e.distribution() == e.distribution()
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    noise = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert drawn(1) == e.distribution(noise=noise)
    assert e.distribution(noise=None) != e.distribution(noise=None)


MARGINS = {
    "vanilla": lambda e: e.vanilla(),
    "vanilla_mean": lambda e: e.vanilla(reduction="mean"),
    "distribution": lambda e: e.distribution(),
    "distribution_mean": lambda e: e.distribution(reduction="mean"),
    "distribution_normalized": lambda e: e.distribution(
        normalize_weights=True, noise_scale="inverse_sqrt_dim", detach_range=True
    ),
    "ranking": lambda e: margin_ranking(
        torch.cosine_similarity(e.embeddings[:, None], e.weights, dim=-1),
        e.labels,
        n_old=e.n_old,
        n_rivals=2,
        margin=0.5,
    ),
}


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize(
    "e",
    [
        pytest.param(Example(n_old=0, n_new=4), id="n_old=0"),
        pytest.param(Example(n_old=4, n_new=0), id="no new classes"),
        pytest.param(Example(n_batch=3, labels=[3, 4, 3]), id="no old sample"),
        pytest.param(Example(n_batch=0), id="no sample"),
    ],
)
def test_zero_with_a_gradient_path_when_nothing_can_be_held_apart(name, e):
    loss = MARGINS[name](e)
    assert loss.item() == 0
    for gradient in e.gradients(loss):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", ["vanilla", "distribution", "distribution_normalized"])
def test_a_zero_embedding_or_weight_gives_a_finite_loss_and_gradient(name):
    e = Example()
    e.labels[0] = 0
    with torch.no_grad():
        e.embeddings[0] = 0
        e.weights[1] = 0
    loss = MARGINS[name](e)
    assert loss.isfinite()
    for gradient in e.gradients(loss):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 100  # and not of the order of 1 / eps


@pytest.mark.parametrize("name", MARGINS)
def test_samples_of_new_classes_take_no_part(name):
    e = Example()
    gradient, _ = e.gradients(MARGINS[name](e))
    is_old = e.labels < e.n_old
    assert 0 < is_old.sum() < len(is_old)
    assert not gradient[~is_old].any()
    assert gradient[is_old].any()


@pytest.mark.parametrize("name", MARGINS)
def test_order_of_samples_and_of_classes_within_old_and_new_does_not_matter(name):
    e = Example()
    loss = MARGINS[name](e)
    samples, classes = torch.tensor([4, 2, 0, 5, 1, 3]), torch.tensor([2, 0, 1, 4, 3])
    e.embeddings, e.labels = e.embeddings[samples], classes.argsort()[e.labels[samples]]
    e.weights, e.noise, e.counts = e.weights[classes], e.noise[classes], e.counts[classes]
    torch.testing.assert_close(MARGINS[name](e), loss)


# The gradient that detach_range leaves is not the loss's derivative, so the check does not apply to it.
@pytest.mark.parametrize("name", [name for name in MARGINS if name != "distribution_normalized"])
def test_gradients(name):
    e = Example()

    def loss(embeddings, weights):
        e.embeddings, e.weights = embeddings, weights
        return MARGINS[name](e)

    assert gradcheck(loss, (e.embeddings, e.weights))


def test_gradients_with_normalized_weights():
    e = Example()

    def loss(embeddings, weights):
        e.embeddings, e.weights = embeddings, weights
        return e.distribution(normalize_weights=True)

    assert gradcheck(loss, (e.embeddings, e.weights))


@QUICK
@given(examples(), st.integers(1, 5), st.floats(0, 1))
def test_margin_ranking_is_its_formula(e, n_rivals, margin):
    n_classes = len(e.counts)
    cosines = torch.tanh(e.embeddings @ e.weights.T).detach()
    hinges = []
    for row, y in zip(cosines.tolist(), e.labels.tolist(), strict=True):
        if y < e.n_old:
            nearest = sorted((row[c] for c in range(e.n_old, n_classes)), reverse=True)[:n_rivals]
            hinges += [max(0.0, margin - row[y] + rival) for rival in nearest]
    loss = margin_ranking(cosines, e.labels, n_old=e.n_old, n_rivals=n_rivals, margin=margin)
    assert loss.item() == pytest.approx(total(hinges, "mean"), abs=1e-10)


def test_integer_and_float_counts_agree():
    e = Example()
    loss = e.distribution()
    e.counts = e.counts.double()
    torch.testing.assert_close(e.distribution(), loss)


def test_an_unknown_reduction_is_refused():
    e = Example()
    for loss in (e.vanilla, e.distribution):
        with pytest.raises(ValueError, match=r"^Choose reduction"):
            loss(reduction="none")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", MARGINS)
def test_precision_is_that_of_the_embeddings(name, dtype, tolerance):
    e = Example()
    expected = MARGINS[name](e).item()
    e.embeddings, e.weights, e.noise = e.embeddings.to(dtype), e.weights.to(dtype), e.noise.to(dtype)
    loss = MARGINS[name](e)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected, rel=tolerance)
