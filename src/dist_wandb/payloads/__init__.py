"""Values that can be logged, and their copies, which are made on the training thread without waiting for a device."""
