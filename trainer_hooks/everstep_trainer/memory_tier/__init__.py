"""Talk to the node's vault, and keep torch.distributed.checkpoint data in its memory."""
