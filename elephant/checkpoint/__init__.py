"""Checkpoints of a fit: what they hold, and how and where they are kept. Knows neither Spark nor Keras."""
