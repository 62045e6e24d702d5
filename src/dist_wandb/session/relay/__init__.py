"""Rows from processes that a rank has started."""
