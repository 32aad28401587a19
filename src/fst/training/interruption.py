"""Ctrl-C and termination signals as a flag that the loop reads between steps."""

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While active, the first signal sets `requested`; a second one acts as it always did."""

    def __init__(self) -> None:
        self.requested = False
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
        del number, frame
        self.requested = True
        self.__exit__()
