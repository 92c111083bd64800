"""The commands of studies: run, merge, export, list."""
