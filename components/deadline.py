"""A deadline for calls of libraries whose own timeouts are for each read, of which a slow answer has many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what a call returns, or raises what it raises.

    Raises TimeoutError after `seconds`, when the call goes on in a thread that does not outlive the process.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="deadline", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"timed out: no whole answer within {seconds:g} s") from None
