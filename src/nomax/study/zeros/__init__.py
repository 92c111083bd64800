"""The study of zeros: of texts and images, so beside those of either."""
