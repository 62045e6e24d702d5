"""Agreement on the ranks that take part in the exchange."""
