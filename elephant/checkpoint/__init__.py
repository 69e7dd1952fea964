"""Checkpoints of a fit: what they hold, how they are written, and where they are kept. Knows neither Spark nor Keras."""
