"""Columns of DataFrames: which ones a model takes, of what types, and with what values."""
