"""Marks in a text while a template is at work: noncharacters of Unicode, for a program's own use."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around what somebody typed that spells a control token; or around the names that a template's own are given
where both occur."""
SAID, UNSAID = "\ufdd2", "\ufdd3"
"""Around what the assistant says."""
