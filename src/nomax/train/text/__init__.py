"""Text runs: train a ReLUFormer to translate, or to continue texts."""
