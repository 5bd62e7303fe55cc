"""Studies: a whole program timed over its sizes, held against what the machine's ceilings allow."""
