"""Metrics of all ranks together, as one process would have them."""
