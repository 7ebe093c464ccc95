"""CUDA graphs: capture a training step once and replay it as a whole."""

import warnings
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """Create a stream on a GPU; None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class CaptureWarning(UserWarning):
    """A step cannot be captured and runs without a graph."""


class Replayed:
    """Call a function; from the third call with the same arguments on, replay what it did on the GPU.

    The function must read and write tensors that keep their addresses, and return nothing. The first call
    with new arguments runs it, which also creates what a capture needs (momentum, workspaces). The second
    call captures it. A function that cannot be captured is called every time.
    """

    def __init__(
        self,
        function: Callable[..., None],
        name: str,
        device: torch.device,
        *,
        capture: bool = True,
        generators: tuple[torch.Generator, ...] = (),
    ) -> None:
        self.function = function
        self.name = name
        self.generators = generators
        """Generators that the function draws from, besides PyTorch's default."""
        self.is_capturing = capture and device.type == "cuda"
        self.stream = stream_on(device) if capture else None
        self.known: set[tuple[Hashable, ...]] = set()
        self.graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph] = {}

    def __call__(self, *arguments: Hashable) -> None:
        if self.stream is None:
            self.function(*arguments)
        elif arguments in self.graphs or (arguments in self.known and self._capture(arguments)):
            self.graphs[arguments].replay()
        else:
            self.known.add(arguments)
            # On the stream of the capture: autograd binds parameters to the stream of their first use.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function(*arguments)
            torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self, arguments: tuple[Hashable, ...]) -> bool:
        if not self.is_capturing:
            return False
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        drawing = (*self.generators, torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.clone_state() for generator in drawing]
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        try:
            # Other threads may copy images to the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                self.function(*arguments)
        except Exception as error:  # an error of the step itself is raised again by the plain call
            self.is_capturing = False
            self.graphs.clear()  # they draw from states that are replaced here
            for generator, state in zip(drawing, states, strict=True):
                generator.graphsafe_set_state(state)  # else they wait for the capture to end
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"{self.name} cannot be captured as a CUDA graph and trains more slowly: {reason}",
                CaptureWarning,
                stacklevel=2,
            )
            return False
        self.graphs[arguments] = graph
        return True


class Beside:
    """Run a function on the GPU in parallel with the work given since `mark`; on the CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = stream_on(device)

    def mark(self) -> torch.cuda.Event | None:
        return None if self.stream is None else torch.cuda.current_stream().record_event()

    def run(self, after: torch.cuda.Event | None, function: Callable[[], Result]) -> Result:
        """Wait for the work before the mark only; later work waits for the result.

        So no tensor is freed on one stream while the other still reads it.
        """
        if self.stream is None or after is None:
            return function()
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result
