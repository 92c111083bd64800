"""Speed and memory, measured on this machine and always as a ratio to a peer in the same run."""
