"""Runs of images: a ViT learns to classify."""
