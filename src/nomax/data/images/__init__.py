"""Images: files, folders and shards, transforms, and batches."""
