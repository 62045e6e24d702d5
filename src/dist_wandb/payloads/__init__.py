"""Values that can be logged, copied on the training thread without waiting for a device."""
