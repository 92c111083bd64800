"""The operation and its backends."""
