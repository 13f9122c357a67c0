"""Kept activations in pinned host memory, copied while the GPU computes.

    forward of layer i     compute | layer i        | layer i+1      | ...
                           copy    |   kept(i-1) -> host | kept(i) -> host
    backward of layer i    compute | layer i        | layer i-1      | ...
                           copy    |   host -> kept(i-1) | host -> kept(i-2)

What one layer keeps is a `Group`. Two groups are on the GPU at a time in each direction: one in use, one being copied.
The host never waits; streams wait for each other's events. Memory is pinned in fixed chunks, so that any tensor size
reuses it and no size is rounded up; the pool never exceeds its budget, and what does not fit stays on the GPU.

On CPU there is nothing to move: groups keep the tensors themselves.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
PAGE = 4096


class HostPool:
    """Hand out chunks of host memory, pinned when a GPU will copy to them; `budget` bytes in all, None = no bound."""

    def __init__(self, budget: int | None, *, chunk_bytes: int = CHUNK_BYTES, pin: bool) -> None:
        self.budget, self.chunk_bytes, self.pin = budget, chunk_bytes, pin
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def allocated(self) -> int:
        """Return the bytes of host memory held."""
        return len(self._all) * self.chunk_bytes

    def take(self, size: int) -> list[Tensor] | None:
        """Return chunks for `size` bytes, or None if the budget does not allow it."""
        count = -(-size // self.chunk_bytes)
        new = max(0, count - len(self._free))
        if self.budget is not None and self.allocated + new * self.chunk_bytes > self.budget:
            return None
        for _ in range(new):
            self._free.append(self._allocate())
        return [self._free.pop() for _ in range(count)]

    def give(self, chunks: list[Tensor]) -> None:
        """Take chunks back; one copy stream orders the copies still queued from them before any later one into them."""
        self._free += chunks

    def _allocate(self) -> Tensor:
        chunk = torch.empty(self.chunk_bytes + PAGE, dtype=torch.uint8)
        # a page may be registered once, for one chunk
        chunk = chunk[-chunk.data_ptr() % PAGE :][: self.chunk_bytes]
        # registered rather than allocated pinned: torch's pinned allocator rounds up to powers of two
        if self.pin:
            register = torch.cuda.cudart().cudaHostRegister
            result = int(register(chunk.data_ptr(), self.chunk_bytes, 0))
            if result != 0:
                raise RuntimeError(
                    f"the driver refused to pin {self.chunk_bytes} more bytes of host memory (error {result}) after "
                    f"{self.allocated} bytes; lower the offload budget or raise the memlock limit"
                )
        self._all.append(chunk)
        return chunk

    def __del__(self) -> None:
        if self.pin:
            for chunk in self._all:
                torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())


class Kept:
    """Hold one tensor: on its device, on the host, or both while a copy runs."""

    def __init__(self, tensor: Tensor, pool: HostPool | None) -> None:
        self.tensor: Tensor | None = tensor
        self._pool = pool
        self._chunks = (
            pool.take(tensor.numel() * tensor.element_size()) if pool is not None else None
        )
        self._like = (tensor.shape, tensor.dtype, tensor.device)

    @property
    def away(self) -> bool:
        """Return whether only the host holds the tensor."""
        return self.tensor is None

    def store(self) -> None:
        """Queue the copy to the host on the current stream."""
        if self._chunks is not None and self.tensor is not None:
            for host, part in self._parts(self.tensor.contiguous()):
                host.copy_(part, non_blocking=True)

    def leave(self) -> None:
        """Forget the device tensor if the host has it."""
        if self._chunks is not None:
            self.tensor = None

    def make_room(self) -> None:
        """Allocate the device tensor again, on the stream that will use it."""
        shape, dtype, device = self._like
        self.tensor = torch.empty(shape, dtype=dtype, device=device)

    def load(self) -> None:
        """Queue the copy back on the current stream and give the host memory back."""
        assert self.tensor is not None
        for host, part in self._parts(self.tensor):
            part.copy_(host, non_blocking=True)
        self._release()

    def _parts(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._pool is not None and self._chunks is not None
        flat = tensor.view(-1).view(torch.uint8)
        for chunk, part in zip(self._chunks, flat.split(self._pool.chunk_bytes)):
            yield chunk[: part.numel()], part

    def _release(self) -> None:
        if self._pool is not None and self._chunks is not None:
            self._pool.give(self._chunks)
            self._chunks = None

    def __del__(self) -> None:
        """Give the chunks back of a graph that is dropped without a backward pass."""
        self._release()


class Group:
    """Hold what one layer keeps for its backward. Without an offloader the tensors stay where they are."""

    def __init__(self, offloader: "Offloader | None" = None) -> None:
        self._offloader = offloader if offloader is not None and offloader.active else None
        self._kept: dict[tuple[Any, ...], Kept] = {}
        self._previous: weakref.ReferenceType[Group] | None = None
        self._event: Any = None

    def keep(self, tensor: Tensor) -> Kept:
        """Keep one tensor; the same tensor kept twice is stored once."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._kept:
            self._kept[key] = kept = Kept(tensor, self._offloader.pool if self._offloader else None)
            if self._offloader is not None:
                with self._offloader.copying():
                    kept.store()
        return self._kept[key]

    def close(self) -> None:
        """End the layer's forward: its tensors leave the device when the next layer has closed its own."""
        if self._offloader is not None:
            self._event = self._offloader.record()
            self._previous = self._offloader.closed(self)

    def leave(self) -> None:
        """Drop the device tensors; later work of the computing stream comes after their copies."""
        assert self._offloader is not None
        self._offloader.wait(self._event)
        for kept in self._kept.values():
            kept.leave()

    def fetch(self) -> None:
        """Start bringing back the tensors that are away."""
        away = [kept for kept in self._kept.values() if kept.away]
        if self._offloader is None or not away:
            return
        for kept in away:
            kept.make_room()
        with self._offloader.copying():
            for kept in away:
                kept.load()
        self._event = self._offloader.record()

    def get(self, kept: Kept) -> Tensor:
        """Return a kept tensor for use now; the first call starts bringing back the group that backward needs next."""
        if self._offloader is not None and self._event is not None:
            self._offloader.reached()
            self.fetch()
            self._offloader.wait(self._event)
            self._event = None
            previous = self._previous() if self._previous is not None else None
            if previous is not None:
                previous.fetch()
        assert kept.tensor is not None
        return kept.tensor


class Offloader:
    """Move groups between one device and the host; one per model, shared by its layers.

    host_bytes: this process's budget of pinned memory, None = no bound; what exceeds it stays on the device.
    copy: None = only where there is a GPU.
    """

    def __init__(
        self,
        device: torch.device | str,
        host_bytes: int | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        copy: bool | None = None,
    ) -> None:
        device = torch.device(device)
        self.active = device.type == "cuda" if copy is None else copy
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = HostPool(host_bytes, chunk_bytes=chunk_bytes, pin=self._stream is not None)
        self._leaving: weakref.ReferenceType[Group] | None = None
        self._last: weakref.ReferenceType[Group] | None = None

    def copying(self) -> AbstractContextManager[Any]:
        """Return the context in which copies are queued, after the computation queued so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def record(self) -> Any:
        """Mark the end of the copies queued so far."""
        return self._stream.record_event() if self._stream is not None else "done"

    def wait(self, event: Any) -> None:
        """Order the computation after a mark."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(event)

    def closed(self, group: Group) -> "weakref.ReferenceType[Group] | None":
        """Let the group closed before this one leave the device; return a reference to it."""
        leaving = self._leaving() if self._leaving is not None else None
        if leaving is not None:
            leaving.leave()
        previous, self._last = self._last, weakref.ref(group)
        self._leaving = self._last
        return previous

    def reached(self) -> None:
        """Note that backward has begun: what is still on the device stays there."""
        self._leaving = self._last = None
