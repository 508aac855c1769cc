"""What the C library does with memory that is freed on a CPU: give it back at once, or keep it for the next request."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
LARGE_BLOCK_BYTES = 64 * 1024
THREAD_STACK_BYTES = 512 * 1024


def keep_freed_memory() -> None:
    """Have this process keep all memory it was given, as the caching allocator does on a GPU.

    By itself glibc takes large blocks from the operating system anew and gives back the end of its heap when that is
    free. Every page is then provided, and zeroed, again in every step: up to half of the time of a small model's step,
    and more or less of it from run to run.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def return_freed_memory_at_once() -> None:
    """Have glibc map large blocks one by one, share one heap among threads, and reserve small stacks for them."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.malloc_trim(0)
    attributes = (ctypes.c_char * 64)()  # pthread_attr_t
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
    libc.pthread_setattr_default_np(attributes)
