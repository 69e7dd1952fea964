"""What one rank runs in its training process: the job it gets, Keras' own fit, and the agreement of all ranks."""
