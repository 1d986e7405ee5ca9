"""The dataloader: from opened stores to batches on the devices."""
