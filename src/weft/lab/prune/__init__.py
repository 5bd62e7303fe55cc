"""Magnitude pruning with rewinding, and its two controls, on images that are drawn here."""
