"""Studies: time a whole program over its sizes and compare it with the machine's measured ceilings."""
