"""The file that `make` writes and `compare` reads: code, cases and what the simulator found, in one .npz."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np


class Writer:
    """Arrays, each kept once however often it is named, and a table of contents."""

    def __init__(self) -> None:
        self.contents: dict[str, Any] = {"sections": {}}
        self._arrays: dict[str, np.ndarray] = {}

    def put(self, data: np.ndarray | bytes) -> str:
        """The name under which the data is found again."""
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
        key = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:20]
        self._arrays[key] = array.copy()
        return key

    def write(self, path: Path) -> None:
        """Write all of it."""
        contents = np.frombuffer(json.dumps(self.contents).encode(), np.uint8)
        np.savez_compressed(path, contents=contents, **self._arrays)  # type: ignore[arg-type]


class Reader:
    """What a `Writer` wrote."""

    def __init__(self, path: Path) -> None:
        self._file = np.load(path)
        self.contents: dict[str, Any] = json.loads(self._file["contents"].tobytes())

    def get(self, key: str) -> np.ndarray:
        """The data of that name; a copy of its own at each call."""
        return self._file[key].copy()
