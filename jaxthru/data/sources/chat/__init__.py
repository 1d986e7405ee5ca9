"""Conversations: their records, the chat template that writes them, and what of it is trained on."""
