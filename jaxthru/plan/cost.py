"""What the rows of a batch cost a configuration's model: the numbers that the data plane balances by."""

from jaxthru.config import RunConfig
from jaxthru.models import family


def row_cost(config: RunConfig) -> tuple[float, float] | None:
    """Returns the cost of a token and of a token² of a document, or None where nothing is to be balanced.

    In seconds if `data` gives what was measured, else in floating-point operations.
    """
    data = config.data
    if not data.balance:
        return None
    if data.linear_cost is not None:
        return data.linear_cost, data.attention_cost
    flops = family.module_of(config.model).train_flops
    return flops(config.model, 1, 0), flops(config.model, 0, 1)
