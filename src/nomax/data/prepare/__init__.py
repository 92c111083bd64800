"""Preparing the named data sets: fetching their packages, and one reader for each set or family."""
