"""Elastic fits: how many workers there are, and when that changes."""
