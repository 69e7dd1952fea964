"""Tuning: fits that look for the best params, on parts of the cluster at the same time, over rows that they share."""
