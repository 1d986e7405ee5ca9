"""Conversations: records of several formats, the chat template that writes them as text, and what is trained on."""
