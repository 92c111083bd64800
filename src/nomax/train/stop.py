"""Stopping politely: Ctrl-C and SIGTERM let the step end and a checkpoint be written."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Stop:
    """Whether someone asked this process to stop: by a signal, or by the death of the process it works for."""

    def __init__(self, parent: int | None = None) -> None:
        self._signal = 0
        self._parent = parent
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether to stop after this step."""
        return self.exit_code != 0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, as a shell reports them; 0 if nobody asked."""
        if self._signal:
            return 128 + self._signal
        return 128 + signal.SIGTERM if self._parent not in (None, os.getppid()) else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who presses Ctrl-C twice does not want to wait
