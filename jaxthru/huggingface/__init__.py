"""Folders of published weights, as Hugging Face lays them out, in and out."""
