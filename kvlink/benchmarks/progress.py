"""What is being done, on stderr: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TextIO


class Progress:
    """Tells the user how far the benchmark is.

    Args:
        stream: where to, usually stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._subject = ""

    def show(self, subject: str, detail: str = "") -> None:
        """Say what is being done; where lines stay, a new detail of the same subject is not said."""
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{subject} {detail}")
        elif subject != self._subject:
            self._stream.write(f"{subject}\n")
        self._subject = subject
        self._stream.flush()

    def say(self, text: str) -> None:
        """Leave a line that stays."""
        self.clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._subject = ""
