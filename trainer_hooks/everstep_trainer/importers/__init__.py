"""Start a job from an ordinary checkpoint: DCP folders, torch.save files, safetensors.

Versions in the vaults belong in ``restore``.
"""
