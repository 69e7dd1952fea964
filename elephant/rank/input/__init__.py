"""Input of a training process: rows of its shard as batches of tensors."""
