"""The doors for Spark users: the estimator, the fitted model, their params, and how they are saved."""
