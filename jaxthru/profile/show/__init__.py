"""A ledger for people: on a terminal, as a page, in a notebook, by a command."""
