# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Peak resident memory."""

from __future__ import annotations

import threading

import psutil


class PeakMemory(threading.Thread):
    """Largest memory of this process while it runs, read every two milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.process, self.done = psutil.Process(), threading.Event()
        self.start_bytes = self.peak = self.process.memory_info().rss
        self.start()

    def run(self):
        while not self.done.wait(0.002):
            self._read()

    def stop(self) -> int:
        """The peak, in bytes."""
        self.done.set()
        self._read()
        return self.peak

    def _read(self):
        self.peak = max(self.peak, self.process.memory_info().rss)
