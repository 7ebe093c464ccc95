"""The switches of the paper's method: which terms each setting puts into a phase, and what they compute."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from medcil import losses
from medcil.method import Batch, Increment, Phase
from medcil.methods.balanced import Balanced
from medcil.models.network import NetworkSpec, Outputs

N_OLD, N_NEW = 3, 2
COUNTS = torch.tensor([20, 20, 12, 300, 40])
INHERENT = torch.tensor([500, 90, 12, 300, 40])


def phase_of(method: Balanced, *, n_old: int = N_OLD) -> Phase:
    network = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True).build()
    if n_old:
        network.grow(torch.randn(n_old, network.classifier.dim))
    increment = Increment(
        n_old=n_old,
        n_new=N_NEW,
        embeddings=lambda label: torch.randn(4, network.classifier.dim),
        random=np.random.default_rng(0),
    )
    (phase,) = method.learn(network, increment)
    assert network.n_classes == n_old + N_NEW
    return phase


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    embedding, weights, noise = (torch.randn(n, 8, generator=generator) for n in (12, 5, 5))
    cosine = F.normalize(embedding) @ F.normalize(weights).T
    old_logits = torch.randn(12, N_OLD, generator=generator)
    return Batch(
        labels=torch.arange(12) % 5,
        out=Outputs(embedding, cosine, 4 * cosine),
        n_old=N_OLD,
        class_counts=COUNTS,
        inherent_counts=INHERENT,
        class_weights=weights,
        run_old_network=lambda: Outputs(embedding, cosine[:, :N_OLD], old_logits),
        draw_noise=lambda: noise,
    )


def test_the_whole_method_is_the_sum_of_the_three_losses():
    seen = batch()
    method = Balanced(alpha=0.3, margin_weight=0.2, distillation_weight=0.7)
    total = sum(term(seen) for term in phase_of(method).terms.values())
    expected = (
        losses.cil_balanced_cross_entropy(seen.out.logits, seen.labels, COUNTS, n_old=N_OLD, alpha=0.3)
        + 0.2
        * losses.distribution_margin(
            seen.out.embedding, seen.class_weights, seen.labels, INHERENT, n_old=N_OLD, noise=seen.noise
        )
        + 0.7 * losses.logit_distillation(seen.out.logits, seen.old.logits)
    )
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"classification": "cross_entropy"}, lambda b: F.cross_entropy(b.out.logits, b.labels)),
        (
            {"classification": "focal", "focusing": 2.0},
            lambda b: losses.focal(b.out.logits, b.labels, focusing=2.0),
        ),
        (
            {"classification": "class_balanced_focal", "beta": 0.9, "focusing": 0.5},
            lambda b: losses.class_balanced_focal(b.out.logits, b.labels, COUNTS, beta=0.9, focusing=0.5),
        ),
    ],
)
def test_the_classification_loss_can_be_switched(settings, expected):
    seen = batch()
    term = phase_of(Balanced(**settings)).classification
    assert term(seen).item() == pytest.approx(expected(seen).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"margin": "vanilla", "margin_reduction": "mean"},
            lambda b: losses.vanilla_margin(
                b.out.embedding, b.class_weights, b.labels, n_old=N_OLD, margin=0.4, reduction="mean"
            ),
        ),
        (
            {"margin": "ranking"},
            lambda b: losses.margin_ranking(b.out.cosine, b.labels, n_old=N_OLD, n_rivals=2, margin=0.4),
        ),
    ],
)
def test_the_margin_can_be_switched(settings, expected):
    seen = batch()
    term = phase_of(Balanced(**settings, margin_weight=0.5)).terms["margin"]
    assert term(seen).item() == pytest.approx(0.5 * expected(seen).item(), rel=1e-6)


@pytest.mark.parametrize("off", [{"margin": "none"}, {"margin_weight": 0.0}])
def test_the_margin_can_be_left_out(off):
    assert set(phase_of(Balanced(**off)).terms) == {"classification", "distillation"}


@pytest.mark.parametrize("off", [{"distillation": "none"}, {"distillation_weight": 0.0}])
def test_the_distillation_can_be_left_out(off):
    assert set(phase_of(Balanced(**off)).terms) == {"classification", "margin"}


def test_the_first_task_is_plain_or_logit_balanced():
    counts = torch.tensor([30, 10])
    plain, adjusted = (
        phase_of(Balanced(first_task=first), n_old=0) for first in ("cross_entropy", "logit_balanced")
    )
    assert set(plain.terms) == set(adjusted.terms) == {"classification"}
    torch.testing.assert_close(plain.classification.log_prior(counts, 0), counts.float().log())
    assert adjusted.classification.log_prior(counts, 0).tolist() == [0, 0]


def test_class_balanced_weights_show_in_the_prior_of_the_scores():
    beta = 0.9
    prior = phase_of(Balanced(classification="class_balanced_focal", beta=beta)).classification.log_prior(
        COUNTS, N_OLD
    )
    expected = [math.log(n * (1 - beta) / (1 - beta**n)) for n in COUNTS.tolist()]
    assert prior.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"alpha": 1.5}, {"margin_weight": -1.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Balanced(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta": 1.0},
        {"focusing": -1.0},
        {"margin_weight": math.nan},
        {"margin_size": math.inf},
        {"noise_scale": -1.0},
        {"temperature": 0.0},
        {"n_rivals": 0},
    ],
)
def test_settings_that_would_fail_in_a_later_task_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match="must"):
        Balanced(**wrong)
