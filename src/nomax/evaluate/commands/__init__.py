"""The commands: nomax evaluate, translate, generate, probe, rows, maps."""
