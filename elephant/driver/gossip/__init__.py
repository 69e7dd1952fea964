"""Fits in gossip mode from the driver: who runs now, what all have learned together, and how such a fit runs."""
