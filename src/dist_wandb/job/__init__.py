"""The job: who this process is, its launcher and its store."""
