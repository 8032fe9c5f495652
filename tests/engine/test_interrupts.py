"""A Ctrl-C arrives between steps."""

import os
import signal
import threading

import pytest

from dalsegno.engine.interrupts import uninterrupted


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    reached: list[str] = []

    def work() -> None:
        with uninterrupted():
            _interrupt()
            reached.append("end of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_gets_through_at_once() -> None:
    reached: list[str] = []

    def work() -> None:
        with uninterrupted():
            _interrupt()
            reached.append("first")
            _interrupt()
            reached.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_what_the_caller_sees() -> None:
    with pytest.raises(ValueError, match="own"), uninterrupted():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_application_is_left_alone() -> None:
    arrived = []
    previous = signal.signal(signal.SIGINT, lambda *_: arrived.append(1))
    try:
        with uninterrupted():
            _interrupt()
            assert arrived == [1]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_run_the_block_as_it_is() -> None:
    ran = []

    def work() -> None:
        with uninterrupted():
            ran.append(threading.current_thread().name)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join()
    assert ran == ["other"]
