"""Datasets on disk: token stores and text stores, their preparation and the tokenizer."""
