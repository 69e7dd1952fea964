"""Layers of which the ranks of a fit have parts, or rows that they share."""
