"""What an implementation does with its time, seen by three instruments."""
