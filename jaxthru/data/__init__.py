"""The data plane: sources -> token stores -> planned rows -> packed batches."""
