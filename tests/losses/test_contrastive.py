"""The supervised contrastive loss against plain arithmetic."""

import math

import pytest
import torch

from medcil.losses import supervised_contrastive


def by_hand(rows: list[list[float]], labels: list[int], temperature: float) -> float:
    units = [[x / math.hypot(*row) for x in row] for row in rows]
    of_samples = []
    for i, own in enumerate(labels):
        others = [a for a in range(len(rows)) if a != i]
        pairs = [p for p in others if labels[p] == own]
        if not pairs:
            continue
        powers = {
            a: math.exp(sum(x * y for x, y in zip(units[i], units[a], strict=True)) / temperature)
            for a in others
        }
        of_samples.append(-sum(math.log(powers[p] / sum(powers.values())) for p in pairs) / len(pairs))
    return sum(of_samples) / len(of_samples) if of_samples else 0.0


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_it_is_the_mean_over_pairs_of_one_class(labels, temperature):
    rows = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = supervised_contrastive(rows, torch.tensor(labels), temperature=temperature)
    assert loss.item() == pytest.approx(by_hand(rows.tolist(), labels, temperature), rel=1e-12)


def test_its_gradient_is_finite_with_and_without_pairs():
    for labels in ([0, 0, 1], [0, 1, 2]):
        rows = torch.randn(3, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
        supervised_contrastive(rows, torch.tensor(labels), temperature=0.1).backward()
        assert torch.isfinite(rows.grad).all()


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature above 0"):
        supervised_contrastive(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), temperature=0.0)
