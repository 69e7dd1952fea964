"""Models and estimators on disk: written whole, read back, and trusted only as far as they must be."""
