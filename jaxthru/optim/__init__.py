"""Optimizers, schedules and the formats their state is kept in."""
