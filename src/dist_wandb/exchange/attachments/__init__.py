"""Values that need an exchange of their own: metric states, tables and images."""
