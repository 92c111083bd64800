"""Images: files, folders and shards of them, what is done to them, and batches."""
