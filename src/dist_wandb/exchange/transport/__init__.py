"""Collectives of the exchange, over gloo."""
