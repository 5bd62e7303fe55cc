"""Data parallel and sharded training."""
