"""The source text of Python's standard library, found on every machine that has Python: a few megabytes of bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def standard_library(limit_bytes: int = 4 << 20) -> torch.Tensor:
    """The first ``limit_bytes`` of the library's modules in the order of their names: uint8 of shape [n]."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Windows:
    """Overlapping windows of a text: sample ``i`` begins at byte ``i``."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._offsets = torch.arange(length + 1)

    def __len__(self) -> int:
        return len(self._text) - len(self._offsets)

    def __getitem__(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 of shape [len(indices), length]."""
        windows = self._text[indices[:, None] + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]
