"""Figures and tables about training runs."""
