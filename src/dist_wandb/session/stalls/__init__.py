"""Notices that a job stands still, and says which rank stands where."""
