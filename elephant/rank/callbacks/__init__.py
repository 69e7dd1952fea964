"""Callbacks of a fit in the training process: where each runs, those of elephant, and what they share and write."""
