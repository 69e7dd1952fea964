"""The jobs that ``spark_jobs/`` submits: arguments and job files, data, outputs that are whole, exit codes."""
