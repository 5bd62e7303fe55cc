"""Generated projects and starter files."""
