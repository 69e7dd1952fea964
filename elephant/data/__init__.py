"""Rows on their way from Spark to a training step: schema, shards on disk, and the plan of an epoch."""
