"""DCP's planners without pickle: what is no tensor is stored as Everstep stores Python state.

torch's own planners store it by ``torch.save`` and read it by ``torch.load`` with ``weights_only=False``, so that
whoever can put bytes into a peer's memory could run code here.
"""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from everstep.errors import MalformedMessage
from trainer_hooks.snapshot.blob import decode_blob, encode_blob

PLAIN = b"everstep\x01"
"""What begins bytes that were stored without pickle."""


class VaultSavePlanner(DefaultSavePlanner):
    """torch's default planner, but for values that are no tensors: TypeError for those that would need pickle."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(PLAIN + encode_blob(object, path=write_item.index.fqn))
        return super().transform_object(write_item, object)


class VaultLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, but for values that are no tensors: they are read without pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises MalformedMessage for bytes that another planner stored."""
        data = value.getvalue()
        if not data.startswith(PLAIN):
            raise MalformedMessage(
                f"{read_item.dest_index.fqn} was stored by another planner: load it with that one's counterpart"
            )
        loaded = decode_blob(data[len(PLAIN) :])
        fqn = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
        else:
            self.state_dict[fqn] = loaded
