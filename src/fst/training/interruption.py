"""Ctrl-C and termination signals as a flag that the loop reads between steps."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals closer than this (seconds) are one: `timeout` sends its own twice, for example.
TWICE_AT_ONCE = 1.0


class Interruption:
    """While active, the first signal sets `requested`; a later one acts as it always did."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread alone; elsewhere signals keep their meaning.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > TWICE_AT_ONCE:
            self.__exit__()
            signal.raise_signal(number)
