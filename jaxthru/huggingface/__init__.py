"""Folders of published weights, as transformers reads and writes them."""
