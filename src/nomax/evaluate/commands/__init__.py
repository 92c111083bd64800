"""The commands: nomax evaluate, probe, rows, maps."""
