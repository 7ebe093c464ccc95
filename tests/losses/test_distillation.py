"""Distillation against Eq. 11, its other kinds and the baselines' formulas, as loops over floats."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from medcil.losses import (
    embedding_distillation,
    logit_distillation,
    one_vs_rest,
    pod_spatial,
    sigmoid_distillation,
    taskwise_distillation,
)

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


@QUICK
@given(logit_pairs())
def test_sigmoid_distillation_is_its_formula(logits):
    current, old = logits
    total = 0.0
    for p, q in zip(current.tolist(), old.tolist(), strict=True):
        for c in range(len(q)):
            target = 1 / (1 + math.exp(-q[c]))
            output = 1 / (1 + math.exp(-p[c]))
            complement = 1 / (1 + math.exp(p[c]))
            total -= target * math.log(output) + (1 - target) * math.log(complement)
    mean = sigmoid_distillation(current, old, reduction="mean")
    assert mean.item() == pytest.approx(total / (len(old) * old.shape[1]), abs=1e-10)
    seen = sigmoid_distillation(current, old, reduction="per_class_seen")
    assert seen.item() == pytest.approx(total / (len(old) * current.shape[1]), abs=1e-10)


@QUICK
@given(logit_pairs(), st.integers(0, 2**20))
def test_the_two_halves_of_icarl_are_the_mean_over_all_outputs(logits, seed):
    current, old = logits
    n_old, n_classes = old.shape[1], current.shape[1]
    labels = torch.randint(n_classes, (len(old),), generator=torch.Generator().manual_seed(seed))
    targets = torch.cat([old.sigmoid(), F.one_hot(labels, n_classes)[:, n_old:].double()], dim=1)
    halves = one_vs_rest(current, labels, n_old=n_old) + sigmoid_distillation(
        current, old, reduction="per_class_seen"
    )
    torch.testing.assert_close(halves, F.binary_cross_entropy_with_logits(current, targets))


def test_the_benchmarks_mean_is_the_default_of_sigmoid_distillation():
    logits, old = pair()
    torch.testing.assert_close(
        sigmoid_distillation(logits, old), sigmoid_distillation(logits, old, reduction="mean")
    )
    assert not sigmoid_distillation(logits, old).isclose(
        sigmoid_distillation(logits, old, reduction="per_class_seen")
    )


def test_an_unknown_reduction_is_refused():
    logits, old = pair()
    with pytest.raises(ValueError, match=r"^Choose reduction"):
        sigmoid_distillation(logits, old, reduction="sum")


@st.composite
def task_splits(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    n_batch, n_new = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = 4 * torch.randn(n_batch, sum(sizes) + n_new, dtype=torch.float64, generator=generator)
    return logits, 4 * torch.randn(n_batch, sum(sizes), dtype=torch.float64, generator=generator), sizes


@QUICK
@given(task_splits(), st.floats(0.5, 5))
def test_taskwise_distillation_is_its_formula(split, temperature):
    current, old, sizes = split
    expected, start = 0.0, 0
    for size in sizes:
        for p, q in zip(current.tolist(), old.tolist(), strict=True):
            new_p = softmax(p[start : start + size], temperature)
            old_p = softmax(q[start : start + size], temperature)
            divergence = sum(b * math.log(b / a) for a, b in zip(new_p, old_p, strict=True))
            expected += temperature**2 * divergence / len(old)
        start += size
    loss = taskwise_distillation(current, old, task_sizes=sizes, temperature=temperature)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


def test_taskwise_distillation_of_one_task_is_the_kl_kind():
    logits, old = pair()
    whole = taskwise_distillation(logits, old, task_sizes=[3])
    torch.testing.assert_close(whole, logit_distillation(logits, old, kind="kl"))
    torch.testing.assert_close(whole, taskwise_distillation(logits, old, task_sizes=[3], temperature=2.0))
    assert not whole.isclose(taskwise_distillation(logits, old, task_sizes=(1, 2)))


def test_taskwise_distillation_does_not_compare_tasks():
    logits, old = pair()
    shifted = old + torch.tensor([5.0, 0.0, 0.0])  # the whole first task
    torch.testing.assert_close(
        taskwise_distillation(logits, shifted, task_sizes=[1, 2]),
        taskwise_distillation(logits, old, task_sizes=[1, 2]),
    )
    assert not taskwise_distillation(logits, shifted, task_sizes=[2, 1]).isclose(
        taskwise_distillation(logits, old, task_sizes=[2, 1])
    )


@pytest.mark.parametrize("sizes", [[], [2], [3, 2]])
def test_task_sizes_other_than_those_of_the_old_tasks_are_refused(sizes):
    logits, old = pair()
    with pytest.raises(ValueError, match=r"^Pass the sizes of the old tasks alone, all of them"):
        taskwise_distillation(logits, old, task_sizes=sizes)


ON_LOGITS = {
    "sigmoid_mean": lambda z, old: sigmoid_distillation(z, old),
    "sigmoid_per_class_seen": lambda z, old: sigmoid_distillation(z, old, reduction="per_class_seen"),
    "taskwise": lambda z, old: taskwise_distillation(z, old, task_sizes=[1, 2][: old.shape[1]]),
}


@pytest.mark.parametrize("name", ON_LOGITS)
def test_gradients_of_the_baselines_distillation(name):
    logits, old = pair()
    assert gradcheck(lambda z: ON_LOGITS[name](z, old), (logits,))


@pytest.mark.parametrize("name", ON_LOGITS)
def test_the_baselines_distillation_is_least_where_the_models_agree(name):
    logits, old = pair()
    (away,) = torch.autograd.grad(ON_LOGITS[name](logits, old), logits)
    assert away[:, 1:3].all()  # the first class is a task of its own
    assert not away[:, 3:].any()
    (agreed,) = torch.autograd.grad(ON_LOGITS[name](logits, logits[:, :3].detach()), logits)
    torch.testing.assert_close(agreed, torch.zeros_like(agreed))
    assert ON_LOGITS[name](logits, logits[:, :3]) < ON_LOGITS[name](logits + away, logits[:, :3])


@pytest.mark.parametrize("name", ON_LOGITS)
def test_the_baselines_distillation_is_zero_with_a_gradient_path_without_old_classes(name):
    logits, _ = pair()
    loss = ON_LOGITS[name](logits, torch.zeros(4, 0, dtype=torch.float64))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("name", ON_LOGITS)
def test_the_baselines_distillation_refuses_exchanged_arguments(name):
    with pytest.raises(ValueError, match=r"^Pass the current logits first"):
        ON_LOGITS[name](torch.zeros(2, 1), torch.zeros(2, 3))


@pytest.mark.parametrize("name", ON_LOGITS)
def test_the_baselines_distillation_is_finite_for_extreme_logits(name):
    logits = torch.tensor([[1e4, -1e4, 1e4, 0.0], [-1e4, 1e4, -1e4, 0.0]], requires_grad=True)
    loss = ON_LOGITS[name](logits, -logits[:, :3].detach())
    loss.backward()
    assert loss.isfinite()
    assert loss > 1000
    assert logits.grad.isfinite().all()
    assert logits.grad.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", ON_LOGITS)
def test_precision_of_the_baselines_distillation_is_that_of_the_logits(name, dtype, tolerance):
    logits, old = pair()
    loss = ON_LOGITS[name](logits.to(dtype), old.to(dtype))
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(ON_LOGITS[name](logits, old).item(), rel=tolerance)


def embeddings(n_batch=4, dim=5, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n_batch, dim, dtype=torch.float64, generator=generator).requires_grad_(),
        torch.randn(n_batch, dim, dtype=torch.float64, generator=generator),
    )


@QUICK
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**20))
def test_embedding_distillation_is_its_formula(n_batch, dim, seed):
    new, old = embeddings(n_batch, dim, seed)
    total = 0.0
    for h, g in zip(new.tolist(), old.tolist(), strict=True):
        lengths = math.sqrt(sum(x * x for x in h)) * math.sqrt(sum(x * x for x in g))
        total += 1 - sum(x * y for x, y in zip(h, g, strict=True)) / lengths
    assert embedding_distillation(new, old).item() == pytest.approx(total / n_batch, abs=1e-10)


def test_gradients_of_embedding_distillation():
    new, old = embeddings()
    assert gradcheck(lambda h: embedding_distillation(h, old), (new,))


def test_embedding_distillation_sees_directions_only():
    new, old = embeddings()
    lengths = torch.tensor([0.1, 1.0, 3.0, 50.0])[:, None]
    loss = embedding_distillation(new, old)
    torch.testing.assert_close(embedding_distillation(lengths * new, old / lengths), loss)
    assert embedding_distillation(new, lengths * new).item() == pytest.approx(0, abs=1e-12)
    assert embedding_distillation(new, -lengths * new).item() == pytest.approx(2)


def test_a_zero_embedding_costs_one_and_has_a_gradient_of_ordinary_size():
    new, old = embeddings(n_batch=3)
    with torch.no_grad():
        new[0], old[1] = 0, 0
        new[2], old[2] = 0, 0
    loss = embedding_distillation(new, old)
    loss.backward()
    assert loss.item() == 1
    assert new.grad.abs().max() < 1  # and not of the order of 1 / eps
    assert new.grad[0].any()
    assert not new.grad[1:].any()


@pytest.mark.parametrize("new_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("old_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embedding_distillation_is_computed_in_single_precision(new_dtype, old_dtype):
    new, old = embeddings()
    old = 500 * (new + 0.05 * old).detach()  # close by, where 1 - cos in half precision has no digits
    new, old = new.detach().to(new_dtype), old.to(old_dtype)
    loss = embedding_distillation(new.requires_grad_(), old)
    loss.backward()
    assert loss.dtype == torch.float32
    assert new.grad.dtype == new_dtype
    exact = embedding_distillation(new.double(), old.double())
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)


def stage_maps(shapes=((2, 3, 4), (3, 2, 2)), n_batch=3, seed=3):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return [torch.randn(n_batch, *shape, dtype=torch.float64, generator=generator) for shape in shapes]

    return [new.requires_grad_() for new in draw()], draw()


def plain_profile(feature_map):
    n_channels, n_rows, n_columns = len(feature_map), len(feature_map[0]), len(feature_map[0][0])
    sums = []
    for k in range(n_channels):
        for i in range(n_rows):
            sums.append(sum(feature_map[k][i][j] ** 2 for j in range(n_columns)))
    for k in range(n_channels):
        for j in range(n_columns):
            sums.append(sum(feature_map[k][i][j] ** 2 for i in range(n_rows)))
    length = math.sqrt(sum(value * value for value in sums))
    return [value / length for value in sums]


SHAPES = st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=3)


@QUICK
@given(SHAPES, st.integers(1, 3), st.integers(0, 2**20))
def test_pod_spatial_is_its_formula(shapes, n_batch, seed):
    maps, old_maps = stage_maps(shapes, n_batch, seed)
    stages = []
    for new_stage, old_stage in zip(maps, old_maps, strict=True):
        distances = []
        for a, b in zip(new_stage.tolist(), old_stage.tolist(), strict=True):
            profiles = zip(plain_profile(a), plain_profile(b), strict=True)
            distances.append(math.sqrt(sum((x - y) ** 2 for x, y in profiles)))
        stages.append(sum(distances) / n_batch)
    assert pod_spatial(maps, old_maps).item() == pytest.approx(sum(stages) / len(stages), abs=1e-10)


def test_gradients_of_pod_spatial():
    maps, old_maps = stage_maps()
    assert gradcheck(lambda *new: pod_spatial(new, old_maps), tuple(maps))


def test_pod_spatial_sees_neither_length_nor_sign():
    maps, old_maps = stage_maps()
    loss = pod_spatial(maps, old_maps)
    torch.testing.assert_close(pod_spatial([-3 * a for a in maps], [a / 7 for a in old_maps]), loss)
    assert not pod_spatial([a + 1 for a in maps], old_maps).isclose(loss)


def test_pod_spatial_sees_where_and_not_in_which_order_within_a_row_and_column():
    here, moved = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
    here[0, 0, [0, 1], [0, 1]] = 1.0
    moved[0, 0, [0, 1], [1, 0]] = 1.0  # the same row sums and the same column sums
    assert pod_spatial([here], [moved]).item() == 0
    elsewhere = here.roll(1, dims=3)  # the same row sums only
    # Column sums (1, 1, 0) and (0, 1, 1) differ by sqrt(2), the length of both vectors is 2.
    assert pod_spatial([here], [elsewhere]).item() == pytest.approx(math.sqrt(2) / 2)
    assert pod_spatial([here.mT], [elsewhere.mT]).item() == pytest.approx(math.sqrt(2) / 2)


def test_pod_spatial_is_zero_with_gradient_zero_where_the_maps_are_equal():
    maps, _ = stage_maps()
    loss = pod_spatial(maps, [a.detach().clone() for a in maps])
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, maps):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_zero_map_has_distance_one_to_any_other_and_gradient_zero():
    maps, old_maps = stage_maps()
    with torch.no_grad():
        maps[0].zero_()
        old_maps[1].zero_()
        maps[1][0] = 0
    loss = pod_spatial(maps, old_maps)
    assert loss.item() == pytest.approx((1 + 2 / 3) / 2)
    for gradient in torch.autograd.grad(loss, maps):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(("n_new", "n_old"), [(2, 1), (1, 2), (0, 0)])
def test_maps_of_different_stages_are_refused(n_new, n_old):
    maps, old_maps = stage_maps()
    with pytest.raises(ValueError, match=r"^Pass the maps of the same stages, one at least"):
        pod_spatial(maps[:n_new], old_maps[:n_old])


@pytest.mark.parametrize("new_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("old_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pod_spatial_is_computed_in_single_precision(new_dtype, old_dtype):
    maps, old_maps = stage_maps()
    maps = [(500 * a).detach().to(new_dtype).requires_grad_() for a in maps]  # squares beyond float16
    old_maps = [(500 * a).to(old_dtype) for a in old_maps]
    loss = pod_spatial(maps, old_maps)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(a.grad.dtype == new_dtype and a.grad.isfinite().all() for a in maps)
    exact = pod_spatial([a.double() for a in maps], [a.double() for a in old_maps])
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
