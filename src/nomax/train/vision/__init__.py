"""Image runs: train a ViT to classify."""
