"""The training loop, optimizer, checkpoints and run directory."""
