"""The commands `nomax data …`, one module each."""
