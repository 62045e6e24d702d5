"""What processes log that a rank has started."""
