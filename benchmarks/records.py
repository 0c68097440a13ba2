# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a benchmark has measured: lines of JSON, so that it may be interrupted and go on."""

from __future__ import annotations

import json
from pathlib import Path


class Records:
    """Lines of a file, one for each measurement."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]  # without a line that was cut short
            if whole != text:
                path.write_text(whole)
            self.rows = [json.loads(line) for line in whole.splitlines()]

    def has(self, **key) -> bool:
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, **row) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(self.line(row), flush=True)

    def line(self, row: dict) -> str:
        """What is printed of a measurement."""
        return str({k: v for k, v in row.items() if k != "curve"})
