"""Models over RDDs, as Elephas has them."""
