"""Distillation against Eq. 11 and the other kinds, written out as loops over floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from medcil.losses import logit_distillation

QUICK = settings(max_examples=80, deadline=None)
KINDS = ("l1", "l2", "mse", "kl")


@st.composite
def logit_pairs(draw):
    n_batch, n_old, n_new = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = 4 * torch.randn(n_batch, n_old + n_new, dtype=torch.float64, generator=generator)
    return logits, 4 * torch.randn(n_batch, n_old, dtype=torch.float64, generator=generator)


def pair(n_batch=4, n_old=3, n_new=2):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(n_batch, n_old + n_new, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.randn(n_batch, n_old, dtype=torch.float64, generator=generator)


def softmax(row, temperature):
    exponentials = [math.exp(z / temperature) for z in row]
    return [e / sum(exponentials) for e in exponentials]


def per_sample(kind, current, old, temperature):
    differences = [current[c] - old[c] for c in range(len(old))]
    if kind == "l1":
        return sum(abs(d) for d in differences)  # the inner sum of Eq. 11
    if kind == "l2":
        return math.sqrt(sum(d * d for d in differences))
    if kind == "mse":
        return sum(d * d for d in differences) / len(old)
    new_p, old_p = softmax(current[: len(old)], temperature), softmax(old, temperature)
    return temperature**2 * sum(q * math.log(q / p) for p, q in zip(new_p, old_p, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(logit_pairs(), st.floats(0.5, 5))
def test_each_kind_is_its_formula(kind, logits, temperature):
    current, old = logits
    rows = zip(current.tolist(), old.tolist(), strict=True)
    expected = sum(per_sample(kind, p, q, temperature) for p, q in rows) / len(old)
    loss = logit_distillation(current, old, kind=kind, temperature=temperature)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


def test_the_default_is_the_printed_equation():
    logits, old = pair()
    torch.testing.assert_close(logit_distillation(logits, old), logit_distillation(logits, old, kind="l1"))
    assert not logit_distillation(logits, old).isclose(logit_distillation(logits, old, kind="l2"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    logits, old = pair()
    assert gradcheck(lambda z: logit_distillation(z, old, kind=kind), (logits,))


@pytest.mark.parametrize("kind", KINDS)
def test_new_classes_take_no_part(kind):
    logits, old = pair()
    loss = logit_distillation(logits, old, kind=kind)
    loss.backward()
    assert logits.grad[:, :3].any()
    assert not logits.grad[:, 3:].any()
    changed = torch.cat([logits[:, :3], 100 + logits[:, 3:]], dim=1)
    torch.testing.assert_close(logit_distillation(changed, old, kind=kind), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_with_a_finite_gradient_where_the_models_agree(kind):
    logits, _ = pair()
    loss = logit_distillation(logits, logits[:, :3].detach(), kind=kind)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_with_a_gradient_path_without_old_classes(kind):
    logits, _ = pair()
    loss = logit_distillation(logits, torch.zeros(4, 0, dtype=torch.float64), kind=kind)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_samples_and_old_classes_does_not_matter(kind):
    logits, old = pair()
    samples, classes = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 0, 4, 3])
    permuted = logit_distillation(logits[samples][:, classes], old[samples][:, classes[:3]], kind=kind)
    torch.testing.assert_close(permuted, logit_distillation(logits, old, kind=kind))


def test_only_kl_uses_the_temperature():
    logits, old = pair()
    changed = {
        kind
        for kind in KINDS
        if not torch.isclose(
            logit_distillation(logits, old, kind=kind, temperature=1.0),
            logit_distillation(logits, old, kind=kind, temperature=4.0),
        )
    }
    assert changed == {"kl"}


def test_an_unknown_kind_is_refused():
    logits, old = pair()
    with pytest.raises(ValueError, match=r"^Choose kind"):
        logit_distillation(logits, old, kind="L1")


def test_exchanged_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^Pass the current logits first"):
        logit_distillation(torch.zeros(2, 1), torch.zeros(2, 3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_precision_is_that_of_the_logits(kind, dtype, tolerance):
    logits, old = pair()
    loss = logit_distillation(logits.to(dtype), old.to(dtype), kind=kind)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(logit_distillation(logits, old, kind=kind).item(), rel=tolerance)
