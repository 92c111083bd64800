"""Speed and memory, measured here and now and always as a ratio to a peer in the same run."""
