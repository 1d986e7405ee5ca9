"""Routing as by Triton's kernels, but for rows that go to their experts token by token.

Each token is read once and written to all of its rows. Rows in their order, as `triton.py` takes them, read
a token for each of its experts, and by the next one it lies no longer in the cache: on an H200, at 32,768
tokens of Qwen3-30B's layer, gathers read 1.07 GB a pass where the tokens are 0.13. Router, sort and rows took
2.36 ms of the layer's 14.9; predicted by token, 1.7. It has run in Triton's interpreter alone, and runs where
it is named; scripts/bench/measure/kernel.py routing and experts time it beside the other.
"""

from pallas_kernels.routing.triton import combine, move_by_token, route, sort_assignments

__all__ = ["combine", "dispatch", "route", "sort_assignments"]


def dispatch(x_ND, order, *, top_k: int, platform: str):
    """Returns [R, D]; see `dispatch` of the package. Raises Unsupported as Triton's."""
    return move_by_token("dispatch_by_token", x_ND, order, len(order.order_R), platform)
