"""The job's key-value store: where ranks find each other before and beside the training's own process groups."""
