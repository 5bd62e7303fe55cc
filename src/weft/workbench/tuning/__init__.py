"""Plan of `weft tune`, and the audit of what dispatch chooses."""
