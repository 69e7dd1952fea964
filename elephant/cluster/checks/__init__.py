"""Checks before a fit, and of `elephant doctor`."""
