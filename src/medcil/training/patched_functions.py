"""Other functions in place of PyTorch's, for as long as it takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Instead(TorchFunctionMode):
    """While it lasts, calls of these functions are calls of those given for them, whoever makes them."""

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.replacements.get(function, function)(*arguments, **(options or {}))
