"""A tracked object whose state a test sets."""

from __future__ import annotations

from typing import Any


class SettableState:
    """An object whose ``state_dict`` and ``load_state_dict`` get and set ``state``."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
