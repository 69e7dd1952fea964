"""Names that users' models and fits hold: decoding of images, warm-up of the learning rate."""
