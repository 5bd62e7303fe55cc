"""Text, tokens and shards."""
