"""Which ranks take part in the exchange."""
