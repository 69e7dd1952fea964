"""The program ``elephant``, which is also ``python -m elephant``."""
