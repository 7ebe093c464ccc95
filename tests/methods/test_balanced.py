"""The paper's method: the terms of its phases, what they compute, and the plug-ins that replace them."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from medcil import losses
from medcil.build import build_method
from medcil.errors import InvalidInput
from medcil.methods.balanced import Balanced
from medcil.methods.protocol import Batch, Counts, Method, Phase, WithTerms

from ..small import task_of
from .by_hand import batch_of, learned, learned_watching_images, names_of, phases_of, tiny_network

N_OLD, N_NEW = 3, 2
DRAWN = [20, 20, 12, 170, 170]
AT_HAND = [20, 20, 12, 300, 40]
INHERENT = [500, 90, 12, 300, 40]


def phase_of(method: Method, *, n_old: int = N_OLD) -> Phase:
    network = tiny_network(*([n_old] if n_old else []))
    (phase,) = phases_of(method, n_old, N_NEW, network=network).values()
    assert network.n_classes == n_old + N_NEW
    every = {name for name, _ in network.named_parameters()}
    assert names_of([p for params in phase.params.values() for p in params], network) == every
    return phase


def batch() -> Batch:
    labels = [i % 5 for i in range(12)]
    return batch_of(labels, (N_OLD, N_NEW), dim=8, drawn=DRAWN, at_hand=AT_HAND, inherent=INHERENT)


def test_the_whole_method_is_the_sum_of_the_three_losses():
    seen = batch()
    method = Balanced(alpha=0.3, margin_weight=0.2, distillation_weight=0.7)
    total = sum(term(seen) for term in phase_of(method).terms.values())
    expected = (
        losses.cil_balanced_cross_entropy(
            seen.out.logits, seen.labels, torch.tensor(DRAWN), n_old=N_OLD, alpha=0.3
        )
        + 0.2
        * losses.distribution_margin(
            seen.out.embedding,
            seen.class_weights,
            seen.labels,
            torch.tensor(INHERENT),
            n_old=N_OLD,
            noise=seen.normal(seen.class_weights.shape),
        )
        + 0.7 * losses.logit_distillation(seen.out.logits, seen.old.logits)
    )
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


def replaced(**plugins) -> WithTerms:
    return build_method({"name": "balanced", "plugins": plugins})


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ({"kind": "cross_entropy"}, lambda b: F.cross_entropy(b.out.logits, b.labels)),
        (
            {"kind": "focal", "focusing": 2.0},
            lambda b: losses.focal(b.out.logits, b.labels, focusing=2.0),
        ),
        (
            {"kind": "class_balanced_focal", "beta": 0.9, "focusing": 0.5},
            lambda b: losses.class_balanced_focal(
                b.out.logits, b.labels, torch.tensor(AT_HAND), beta=0.9, focusing=0.5
            ),
        ),
    ],
)
def test_a_plugin_replaces_the_classification_loss(plugin, expected):
    seen = batch()
    term = phase_of(replaced(classification=plugin)).classification
    assert term(seen).item() == pytest.approx(expected(seen).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (
            {"kind": "vanilla", "reduction": "mean"},
            lambda b: losses.vanilla_margin(
                b.out.embedding, b.class_weights, b.labels, n_old=N_OLD, margin=0.4, reduction="mean"
            ),
        ),
        (
            {"kind": "ranking", "margin": 0.4},
            lambda b: losses.margin_ranking(b.out.cosine, b.labels, n_old=N_OLD, n_rivals=2, margin=0.4),
        ),
    ],
)
def test_a_plugin_replaces_the_margin(plugin, expected):
    seen = batch()
    phase = phase_of(replaced(margin={**plugin, "weight": 0.5}))
    assert list(phase.terms) == ["classification", "margin", "distillation"]
    assert phase.terms["margin"](seen).item() == pytest.approx(0.5 * expected(seen).item(), rel=1e-6)


def test_a_plugin_holds_the_embeddings_too():
    seen, method = batch(), replaced(embedding={"kind": "cosine", "weight": 0.7})
    phase = phase_of(method)
    assert set(phase.terms) == {"classification", "margin", "distillation", "embedding"}
    cosines = F.cosine_similarity(seen.out.embedding, seen.old.embedding)
    assert phase.terms["embedding"](seen).item() == pytest.approx(0.7 * (1 - cosines).mean().item(), rel=1e-6)
    assert set(phase_of(method, n_old=0).terms) == {"classification"}


def test_a_weight_of_0_leaves_the_loss_out():
    assert set(phase_of(Balanced(margin_weight=0.0)).terms) == {"classification", "distillation"}
    assert set(phase_of(Balanced(distillation_weight=0.0)).terms) == {"classification", "margin"}


def test_the_first_task_is_plain_or_logit_balanced():
    drawn = torch.tensor([30, 10])
    counts = Counts(drawn, drawn, drawn)
    plain, adjusted = (
        phase_of(Balanced(first_task=first), n_old=0) for first in ("cross_entropy", "logit_balanced")
    )
    assert set(plain.terms) == set(adjusted.terms) == {"classification"}
    torch.testing.assert_close(plain.classification.log_prior(counts, 0), drawn.float().log())
    assert adjusted.classification.log_prior(counts, 0).tolist() == [0, 0]


def test_later_tasks_have_exemplars_in_every_batch_and_the_first_is_drawn_by_the_recipe():
    assert phase_of(Balanced()).sampler == "two_stream"
    assert phase_of(Balanced(), n_old=0).sampler is None
    assert phase_of(Balanced(sampler="class_aware")).sampler == "class_aware"
    assert phase_of(Balanced(sampler=None)).sampler is None


@pytest.mark.parametrize(("sampler", "beside"), [("two_stream", [2, 2]), (None, None)])
def test_the_methods_sampler_goes_before_the_recipes_and_none_leaves_it_the_word(sampler, beside):
    """Twelve exemplars and eight new images: the recipe's draws each once, the streams two beside four."""
    method = Balanced(sampler=sampler)
    first, _ = learned(method, task_of([6, 6]), memory={"per_class": 6})
    training = {"epochs": 1, "batch_size": 4, "sampler": "plain", "exemplar_share": 0.5}
    task = task_of([4, 4], n_old=2, seed=1)
    _, _, seen = learned_watching_images(method, first, task, training=training)
    exemplars = {image.numpy().tobytes() for image in first.memory.read_all()}
    is_old = [image in exemplars for image in seen["learn"]]
    if beside is None:
        assert (len(is_old), sum(is_old)) == (20, 12)
    else:
        assert [sum(is_old[:6]), sum(is_old[6:])] == beside
        assert len(is_old) == 12


def test_class_balanced_weights_show_in_the_prior_of_the_scores():
    """Classes count as often as drawn, times their weight by the images at hand."""
    beta = 0.9
    term = phase_of(replaced(classification={"kind": "class_balanced_focal", "beta": beta})).classification
    expected = [math.log(n * (1 - beta) / (1 - beta**there)) for n, there in zip(DRAWN, AT_HAND, strict=True)]
    assert term.log_prior(batch().counts, N_OLD).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1e-12, 0.9999999, 1 - 1e-9, 1 - 1e-12, math.nextafter(1.0, 0.0)])
def test_class_balanced_weights_are_exact_up_to_either_end_of_beta(beta):
    """Against fractions, of which no digit is lost; near 1 a class weighs 1/n."""
    term = phase_of(replaced(classification={"kind": "class_balanced_focal", "beta": beta})).classification
    exact = Fraction(beta)
    weights = [float((1 - exact) / (1 - exact**there)) for there in AT_HAND]
    expected = [math.log(n * weight) for n, weight in zip(DRAWN, weights, strict=True)]
    assert term.log_prior(batch().counts, N_OLD).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    if beta > 1 - 1e-8:
        assert weights == pytest.approx([1 / there for there in AT_HAND], rel=1e-5)


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"alpha": 1.5}, {"margin_weight": -1.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(InvalidInput, match=rf"^method\.{next(iter(wrong))}: "):
        build_method({"name": "balanced", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"margin_weight": math.nan},
        {"margin_size": math.inf},
        {"temperature": 0.0},
    ],
)
def test_settings_that_would_fail_in_a_later_task_are_refused_at_once(wrong):
    with pytest.raises(InvalidInput, match=rf"^method\.{next(iter(wrong))}: "):
        build_method({"name": "balanced", **wrong})
