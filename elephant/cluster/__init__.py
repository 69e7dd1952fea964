"""Everything about the Spark cluster that a fit runs on: Java, sessions, slots, GPUs and the start of the ranks."""
