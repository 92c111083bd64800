"""The commands for studies: run, merge, export, list."""
