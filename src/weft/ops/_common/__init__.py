"""Host and device code that several operators or families use."""
