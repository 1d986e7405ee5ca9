"""What moved to measure/commits.py, for collective_matmul.py."""

from measure.commits import Tree

__all__ = ["Tree"]
