"""Answers before hardware is used."""
