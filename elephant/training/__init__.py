"""Names that users' models and fits hold: images, warm-up of the learning rate, operations of all ranks."""
