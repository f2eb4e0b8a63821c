"""The word of a robust mutex, as its holder and its waiter see it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from everstep.host.robust_mutex import OWNER_DIED, FutexWord, HeldMutex, is_held, is_supported, make_memory

pytestmark = pytest.mark.skipif(not is_supported(), reason="no futex call is known for this machine")
LONG_S = 60.0


@pytest.fixture
def memory() -> int:
    return make_memory()


@pytest.fixture
def word(memory: int) -> Iterator[FutexWord]:
    word = FutexWord(memory)
    yield word
    word.close()


def test_mutex_is_held_until_its_release(memory: int, word: FutexWord) -> None:
    assert not is_held(word.read())
    mutex = HeldMutex(memory)
    assert is_held(word.read())
    assert word.read() & 0x3FFF_FFFF == threading.get_native_id()
    mutex.release()
    assert word.read() == 0


def test_mutex_can_be_made_again_in_the_same_memory(memory: int, word: FutexWord) -> None:
    for _ in range(2):
        mutex = HeldMutex(memory)
        assert is_held(word.read())
        mutex.release()


def test_end_of_the_holding_thread_wakes_the_waiter(memory: int, word: FutexWord) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        mutexes.append(HeldMutex(memory))
        held.set()
        let_go.wait()

    mutexes: list[HeldMutex] = []
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    before = word.read()
    threading.Timer(0.01, let_go.set).start()
    while word.read() == before:
        word.wait(before, LONG_S)
    assert word.read() & OWNER_DIED
    holder.join()


def test_wait_returns_at_once_if_the_word_differs(word: FutexWord) -> None:
    word.wait(1, LONG_S)


def test_wait_ends_after_its_timeout(word: FutexWord) -> None:
    word.wait(0, 0.001)


def test_waiter_can_be_woken(word: FutexWord) -> None:
    woken = threading.Thread(target=word.wait, args=(0, LONG_S))
    woken.start()
    while woken.is_alive():  # the thread may not wait yet
        word.wake()
        woken.join(0.001)


def test_holder_cannot_change_the_size_of_the_memory(memory: int, word: FutexWord) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)


def test_memory_without_pages_cannot_be_watched() -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="cannot be mapped"):
        FutexWord(reading)  # closes it
    os.close(writing)
