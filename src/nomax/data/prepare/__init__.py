"""Prepare the named data sets: fetch their packages, and read them, with one reader per set or family."""
