"""The optimizer of a GPU, whose one kernel for all parameters also runs on the CPU."""

import torch

from medcil.training.step import make_momentum


def stepped(*, fused: bool) -> list[torch.Tensor]:
    """Two parameters that move in turns, in one group."""
    first, second = (torch.nn.Parameter(torch.arange(1.0, 4.0) * factor) for factor in (1, 2))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9, weight_decay=0.01, fused=fused)
    if fused:
        make_momentum(optimizer)
    for epoch in range(6):
        moving = (first, second)[epoch % 2]
        optimizer.zero_grad()
        moving.square().sum().backward()
        optimizer.step()
    return [first.detach(), second.detach()]


def test_parameters_may_move_in_turns():
    for fused, plain in zip(stepped(fused=True), stepped(fused=False), strict=True):
        torch.testing.assert_close(fused, plain)
