"""The studies, one file each, and what several of them share: alpha_sweep, initial, text_common."""
