"""Worker processes for external code: fork server, protocol, limits and remote calls."""
