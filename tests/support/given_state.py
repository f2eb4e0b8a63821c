"""An object to track whose state is whatever a test gives it."""

from __future__ import annotations

from typing import Any


class GivenState:
    """Has ``state``, by the two methods that are asked of what is tracked."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
