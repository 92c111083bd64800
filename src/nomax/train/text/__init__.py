"""Runs of text: a ReLUFormer learns to translate, or to continue texts."""
