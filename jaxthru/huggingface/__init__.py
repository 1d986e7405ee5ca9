"""Folders of published weights in Hugging Face's form: read, written, and accounted for."""
