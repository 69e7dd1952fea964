"""Spark tasks, in Python workers of Spark: the processes that they start, their devices, and predictions."""
