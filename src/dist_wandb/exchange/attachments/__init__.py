"""Values that need a separate exchange: metric states, tables and images."""
