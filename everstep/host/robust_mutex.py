"""A robust mutex in shared memory, which the kernel gives up at once when the thread that holds it ends.

The kernel first walks the list of robust mutexes of a dying thread, then frees the memory of its process, and closes
its sockets last. A holder in a large process is thus known to be gone long before its connections end.

The memory is one page of a sealed memfd that the waiting process makes: the holder can write anything into it, but
cannot shrink it. The waiter only reads the word of the mutex, and never locks it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import threading
from errno import EAGAIN, EINTR, ETIMEDOUT

OWNER_DIED = 0x4000_0000
"""Bit of the word that the kernel sets when the holder has ended (``FUTEX_OWNER_DIED`` of futex(2))."""
WAITERS = 0x8000_0000
"""Bit of the word that makes the kernel wake a waiter (``FUTEX_WAITERS``). The holder sets it for the waiter."""
HOLDER_BITS = 0x3FFF_FFFF
"""Bits of the word that hold the id of the holding thread, as its own process namespace numbers it."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
"""Numbers of futex(2), with a time-out of two 64-bit integers, by machine."""
_MUTEX_BYTES = 64
"""At least ``sizeof`` of pthread_mutex_t and of pthread_mutexattr_t, 40 to 48 bytes in glibc."""
_PROCESS_SHARED, _ROBUST = 1, 1
_NOEXEC_SEAL = 0x8
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Return whether this module knows how to wait on this machine."""
    return sys.platform == "linux" and platform.machine() in _FUTEX_CALLS and ctypes.sizeof(ctypes.c_long) == 8


def make_memory() -> int:
    """Return a descriptor of a new page of shared memory whose size is sealed. Raises OSError if there is none."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("everstep-rank", flags | _NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        descriptor = os.memfd_create("everstep-rank", flags)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


_kept_mapped: list[HeldMutex] = []


class HeldMutex:
    """A mutex that the calling thread holds until ``release``, or until it ends. One thread calls all methods."""

    def __init__(self, descriptor: int) -> None:
        """Make the mutex in the memory and lock it.

        Args:
            descriptor: Memory of ``make_memory``, mapped here; the caller may close the descriptor.

        Raises:
            OSError: The memory cannot be mapped, or this C library's mutex is not one that a waiter can read.
        """
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._word = ctypes.c_uint32.from_buffer(self._memory)  # keeps the memory mapped: a held mutex is in a list
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._word))
        self._library = ctypes.CDLL(None)
        try:
            self._lock()
        except AttributeError as error:
            raise OSError(f"the C library has no robust mutexes: {error}") from error

    def _lock(self) -> None:
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        call = self._library
        problem = (
            call.pthread_mutexattr_init(attributes)
            or call.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            or call.pthread_mutexattr_setrobust(attributes, _ROBUST)
            or call.pthread_mutex_init(self._mutex, attributes)
            or call.pthread_mutex_lock(self._mutex)
        )
        if problem:
            raise OSError(problem, f"the robust mutex cannot be made: {os.strerror(problem)}")
        if self._word.value != threading.get_native_id():  # musl keeps the word elsewhere
            call.pthread_mutex_unlock(self._mutex)
            raise OSError("the mutex of this C library does not begin with its word")
        self._word.value |= WAITERS

    def release(self) -> None:
        """Unlock the mutex, so that it does not tell of a death."""
        if self._library.pthread_mutex_unlock(self._mutex):  # overwritten: the thread's list may still lead to it
            _kept_mapped.append(self)


class FutexWord:
    """The word of a mutex that another process holds, for the process that made the memory. It is never written here.

    ``wait`` and ``read`` belong to one thread, ``wake`` may be called by any. Raises OSError without memory.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: Memory of ``make_memory``, which the word now owns."""
        self._descriptor = descriptor
        self._library = ctypes.CDLL(None, use_errno=True)
        # Python's own mmap keeps another descriptor, and gives no address of memory that may only be read.
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        address = self._library.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, _MAP_FAILED):
            os.close(descriptor)
            raise OSError(ctypes.get_errno(), "the memory of a robust mutex cannot be mapped")
        self._address = ctypes.c_void_p(address)
        self._futex = ctypes.c_long(_FUTEX_CALLS[platform.machine()])

    def read(self) -> int:
        """Return the word. A system call reads it: a load could fault on memory that another process controls."""
        return int.from_bytes(os.pread(self._descriptor, 4, 0), "little")

    def wait(self, value: int, timeout_s: float) -> None:
        """Wait until the waiters are woken, unless the word differs from ``value`` now; at most ``timeout_s``.

        Raises OSError if the kernel cannot wait on this memory.
        """
        whole = int(timeout_s)
        timeout = ctypes.byref(_Timespec(whole, int((timeout_s - whole) * 1e9)))
        none = ctypes.c_void_p()
        expected = ctypes.c_uint32(value)
        result = self._library.syscall(self._futex, self._address, _FUTEX_WAIT, expected, timeout, none, 0)
        if result and (problem := ctypes.get_errno()) not in (EAGAIN, EINTR, ETIMEDOUT):
            raise OSError(problem, f"cannot wait for a robust mutex: {os.strerror(problem)}")

    def wake(self) -> None:
        """End a ``wait`` of another thread."""
        none = ctypes.c_void_p()
        self._library.syscall(self._futex, self._address, _FUTEX_WAKE, 1, none, none, 0)

    def close(self) -> None:
        """Release the memory. No thread may wait for it."""
        self._library.munmap(self._address, ctypes.c_size_t(mmap.PAGESIZE))
        os.close(self._descriptor)


def is_held(word: int) -> bool:
    """Return whether a living thread holds the mutex of this word, and the kernel will wake a waiter when it ends."""
    return bool(word & WAITERS and word & HOLDER_BITS and not word & OWNER_DIED)
