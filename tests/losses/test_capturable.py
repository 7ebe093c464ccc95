"""No loss looks at tensor values from Python: on fake tensors, which have none, such code raises."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

import medcil.losses
from medcil.losses import (
    cil_balanced_cross_entropy,
    class_balanced_focal,
    distribution_margin,
    embedding_distillation,
    focal,
    logit_distillation,
    margin_ranking,
    nca,
    one_vs_rest,
    pod_spatial,
    separated_softmax,
    sigmoid_distillation,
    supervised_contrastive,
    taskwise_distillation,
    vanilla_margin,
)


class Inputs:
    def __init__(self):
        self.logits = torch.randn(6, 5, requires_grad=True)
        self.old_logits = torch.randn(6, 3)
        self.labels = torch.zeros(6, dtype=torch.long)
        self.counts = torch.ones(5, dtype=torch.long)
        self.embeddings = torch.randn(6, 4, requires_grad=True)
        self.weights = torch.randn(5, 4, requires_grad=True)
        self.old_embeddings = torch.randn(6, 4)
        self.noise = torch.randn(5, 4)
        self.margin = torch.rand((), requires_grad=True)
        self.maps = [torch.randn(6, 2, 3, 4, requires_grad=True), torch.randn(6, 3, 2, 2, requires_grad=True)]
        self.old_maps = [torch.randn(6, 2, 3, 4), torch.randn(6, 3, 2, 2)]


def distribution(i, **options):
    return distribution_margin(i.embeddings, i.weights, i.labels, i.counts, n_old=3, **options)


CASES = [
    (cil_balanced_cross_entropy, lambda i, f: f(i.logits, i.labels, i.counts, n_old=3, alpha=0.5)),
    (focal, lambda i, f: f(i.logits, i.labels, focusing=0.5)),
    (class_balanced_focal, lambda i, f: f(i.logits, i.labels, i.counts, beta=0.9, focusing=1)),
    (vanilla_margin, lambda i, f: f(i.embeddings, i.weights, i.labels, n_old=3)),
    (vanilla_margin, lambda i, f: f(i.embeddings, i.weights, i.labels, n_old=3, reduction="mean")),
    (distribution_margin, lambda i, f: distribution(i)),
    (distribution_margin, lambda i, f: distribution(i, noise=i.noise, reduction="mean", detach_range=True)),
    (
        distribution_margin,
        lambda i, f: distribution(i, normalize_weights=True, noise_scale="inverse_sqrt_dim"),
    ),
    (margin_ranking, lambda i, f: f(i.logits, i.labels, n_old=3, n_rivals=2, margin=0.5)),
    *(
        (logit_distillation, lambda i, f, kind=kind: f(i.logits, i.old_logits, kind=kind))
        for kind in ("l1", "l2", "mse", "kl")
    ),
    (nca, lambda i, f: f(i.logits, i.labels)),
    (nca, lambda i, f: f(i.logits, i.labels, margin=i.margin)),
    (separated_softmax, lambda i, f: f(i.logits, i.labels, n_old=3)),
    (one_vs_rest, lambda i, f: f(i.logits, i.labels, n_old=3)),
    *(
        (
            sigmoid_distillation,
            lambda i, f, reduction=reduction: f(i.logits, i.old_logits, reduction=reduction),
        )
        for reduction in ("mean", "per_class_seen")
    ),
    (taskwise_distillation, lambda i, f: f(i.logits, i.old_logits, task_sizes=[1, 2])),
    (embedding_distillation, lambda i, f: f(i.embeddings, i.old_embeddings)),
    (pod_spatial, lambda i, f: f(i.maps, i.old_maps)),
    (supervised_contrastive, lambda i, f: f(i.embeddings, i.labels, temperature=0.1)),
]


@pytest.mark.parametrize(
    ("loss", "call"), CASES, ids=[f"{i}-{loss.__name__}" for i, (loss, _) in enumerate(CASES)]
)
def test_loss_and_gradient_run_without_tensor_values(loss, call):
    with FakeTensorMode():
        value = call(Inputs(), loss)
        value.backward()
    assert value.shape == ()


def test_every_public_loss_is_checked():
    assert {loss.__name__ for loss, _ in CASES} == set(medcil.losses.__all__)


TAKING_N_OLD = [
    lambda i, n_old: cil_balanced_cross_entropy(i.logits, i.labels, i.counts, n_old=n_old, alpha=0.5),
    lambda i, n_old: separated_softmax(i.logits, i.labels, n_old=n_old),
    lambda i, n_old: one_vs_rest(i.logits, i.labels, n_old=n_old),
    lambda i, n_old: vanilla_margin(i.embeddings, i.weights, i.labels, n_old=n_old),
    lambda i, n_old: distribution_margin(i.embeddings, i.weights, i.labels, i.counts, n_old=n_old),
    lambda i, n_old: margin_ranking(i.logits, i.labels, n_old=n_old, n_rivals=2, margin=0.5),
]


def test_every_loss_that_takes_n_old_is_among_those_whose_range_is_checked():
    taking = [
        name
        for name in medcil.losses.__all__
        if "n_old" in inspect.signature(getattr(medcil.losses, name)).parameters
    ]
    assert len(taking) == len(TAKING_N_OLD)


@pytest.mark.parametrize("call", TAKING_N_OLD)
def test_n_old_is_from_0_to_the_number_of_classes(call):
    for n_old in (-1, 6):
        with pytest.raises(ValueError, match="n_old"):
            call(Inputs(), n_old)
    for n_old in (0, 5):
        assert call(Inputs(), n_old).shape == ()


def boolean_indexing(i):
    return i.logits[i.labels < 3].sum()


def item(i):
    return i.logits.sum() / i.counts.sum().item()


def branch(i):
    return i.logits.sum() if (i.labels < 3).any() else i.logits.mean()


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (boolean_indexing, DynamicOutputShapeException),
        (item, DataDependentOutputException),
        (branch, DataDependentOutputException),
    ],
)
def test_the_check_finds_data_dependent_code(loss, error):
    assert loss(Inputs()).isfinite()
    with FakeTensorMode(), pytest.raises(error):
        loss(Inputs())
