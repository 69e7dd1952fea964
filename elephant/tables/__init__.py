"""Embedding tables whose rows are divided over processes: what a part holds, and how ranks reach each other's."""
