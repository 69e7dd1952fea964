"""Recovery of a fit after a loss: ranks begin again within their Spark job."""
