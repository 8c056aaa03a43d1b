"""Job files: parsing, expansion to jobs, and the steps of jobs."""
