"""Training process of one rank: its job, Keras' own fit, and the agreement of all ranks."""
