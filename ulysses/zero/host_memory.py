"""Give host memory back while weights stream through it.

glibc raises the size from which it asks the system for memory (and later returns it) with every large block that is
freed, up to 32 MiB. Parameters that pass one by one then leave holes in the heap that nobody uses and the process
keeps: loading or exporting would slowly grow towards the whole model.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
STREAMING = 1 << 20
USUAL = 32 << 20  # where glibc's own rule ends up


@contextmanager
def streaming_memory() -> Iterator[None]:
    """Return every block above 1 MiB to the system when it is freed; afterwards the usual, faster reuse. Linux only."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, STREAMING)
    except (OSError, AttributeError):  # another C library: nothing to set, nothing to undo
        yield
        return
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, USUAL)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL)
        libc.malloc_trim(0)
