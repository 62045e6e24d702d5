"""One rank's part in the logging of a job, from init to finish."""
