"""Move the activations that wait for the backward pass to pinned host memory, while the GPU computes.

    forward of layer i     compute | layer i               | layer i+1             | ...
                           copy    |  tensors i-1 -> host  |  tensors i -> host    |
    backward of layer i    compute | layer i               | layer i-1             | ...
                           copy    |  host -> tensors i-1  |  host -> tensors i-2  |

In each direction the GPU holds the tensors of two layers: one in use, one being copied. The host never waits; the
streams wait for each other's events. Host memory is pinned in chunks of one size, which tensors of any size can use
again; the planner asks for no more layers than the host has room for. On a CPU the same code copies from memory to
memory, for tests alone.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

# torch's allocator of pinned memory rounds up to powers of two
CHUNK_BYTES = 32 << 20

WeakReference = Callable[[], "OffloadedTensors | None"]


class Offloader:
    """Host memory and a stream for copies to it and back; one per model, shared by its layers."""

    def __init__(self, device: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._backend = torch.get_device_module(device)
        self.stream = self._backend.Stream()
        self._pin = device == "cuda"
        self.chunk_bytes = chunk_bytes
        self.allocated = 0  # bytes of host memory in all chunks
        # Chunks come back while copies from them are still queued; the one stream runs those before any later copy.
        self.free: list[Tensor] = []
        self.last_closed: WeakReference = lambda: None  # to the layer whose forward ended last

    def take(self, size: int) -> list[Tensor]:
        """Return chunks for `size` bytes."""
        count = -(-size // self.chunk_bytes)
        try:
            while len(self.free) < count:
                chunk = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._pin)
                self.free.append(chunk)
                self.allocated += self.chunk_bytes
        except RuntimeError as error:
            error.add_note(
                "pinning host memory; lower memory.host_memory or raise the memlock limit"
            )
            raise
        return [self.free.pop() for _ in range(count)]

    def copying(self) -> AbstractContextManager[object]:
        """Return the context in which copies are queued, after the computation queued so far."""
        self.stream.wait_stream(self._backend.current_stream())
        return self._backend.stream(self.stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the computation that is queued from now on wait for the event."""
        self._backend.current_stream().wait_event(event)


class OffloadedTensors:
    """One layer's tensors from its forward to its backward, in host memory meanwhile."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._tensors: list[Tensor] = []  # empty while only the host has them
        # for each tensor a function that allocates another like it, and its host memory
        self._copies: list[tuple[Callable[[], Tensor], list[Tensor]]] = []
        self._previous: WeakReference | None = (
            None  # set from `close` until the first `tensors`
        )
        self._event: torch.cuda.Event | None = None  # after the copies; the CPU has none

    def save(self, tensor: Tensor) -> None:
        """Add a tensor, and begin to copy it to the host."""
        self._tensors.append(tensor)
        chunks = self._offloader.take(tensor.nbytes)
        allocate = partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._copies.append((allocate, chunks))
        with self._offloader.copying():
            for part, chunk in self._parts(tensor.contiguous(), chunks):
                chunk.copy_(part, non_blocking=True)

    def _parts(self, tensor: Tensor, chunks: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of a tensor in parts, each with its place on the host."""
        parts = tensor.view(-1).view(torch.uint8).split(self._offloader.chunk_bytes)
        for part, chunk in zip(parts, chunks):
            yield part, chunk[: part.numel()]

    def close(self) -> None:
        """End the layer's forward: its tensors leave the device when the next layer's forward has ended."""
        self._event = self._offloader.stream.record_event()
        self._previous = self._offloader.last_closed
        self._offloader.last_closed = weakref.ref(self)
        leaving = self._previous()
        if leaving is not None:
            # later work of the computing stream comes after the copies
            leaving._offloader.wait(leaving._event)
            leaving._tensors = []

    def fetch(self) -> None:
        """Begin to copy the tensors back if only the host has them."""
        if self._tensors:
            return
        # allocated on the stream that will use them
        self._tensors = [allocate() for allocate, _ in self._copies]
        with self._offloader.copying():
            for tensor, (_, chunks) in zip(self._tensors, self._copies):
                for part, chunk in self._parts(tensor, chunks):
                    part.copy_(chunk, non_blocking=True)
        self.release()
        self._event = self._offloader.stream.record_event()

    def release(self) -> None:
        """Give the host memory back."""
        for _, chunks in self._copies:
            self._offloader.free += chunks
        self._copies = []

    __del__ = release  # a graph may be dropped without a backward pass

    def tensors(self) -> list[Tensor]:
        """Return the tensors; the first call also begins to fetch those that backward needs next."""
        if self._previous is not None:
            # backward has begun: no layer's tensors leave the device any more
            self._offloader.last_closed = lambda: None
            self.fetch()
            self._offloader.wait(self._event)
            previous, self._previous = self._previous(), None
            if previous is not None:
                previous.fetch()
        return self._tensors
