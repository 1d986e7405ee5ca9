"""Epochs: how often each source is read, and a word about those that are read too often."""

import math
from collections.abc import Mapping

from jaxthru.data.mixture.configuration import Mixture, Share
from jaxthru.runtime.errors import listed

ALIKE = 4.0
"""Epochs up to which a repeated text teaches about as much as a new one; after some 40 it teaches nothing
(Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264)."""
WHY = (
    f"up to {ALIKE:g} times a text teaches about as much as a new one, after 40 nothing more "
    "(arXiv:2305.16264); a lower weight or max_epochs leaves the steps to others"
)


def in_one_pass(
    mixture: Mixture, tokens: Mapping[str, int], documents: Mapping[str, int]
) -> dict[str, float]:
    """Returns the epochs of each source in a run of as many tokens as all have together; of none where
    weights change, for then they depend on the run's length.

    tokens, documents: of each source, in an epoch.
    """
    if mixture.changes:
        return {}
    counted = tokens if mixture.count == "tokens" else documents
    shares = {name: share for name, share in mixture.shares.items() if counted[name]}
    epochs = {name: share.points[0][1] / counted[name] for name, share in shares.items()}
    scale = sum(tokens[name] for name in shares) / sum(each * tokens[name] for name, each in epochs.items())
    return {name: min(each * scale, _most(shares[name], tokens[name])) for name, each in epochs.items()}


def _most(share: Share, tokens: int) -> float:
    """Returns the epochs after which a source has no more to give. tokens: in one."""
    by_tokens = math.inf if share.max_tokens is None else share.max_tokens / tokens
    return min(by_tokens, math.inf if share.max_epochs is None else share.max_epochs)


def repeated(epochs: Mapping[str, float], when: str) -> str | None:
    """Returns in one line which sources are read more than `ALIKE` times, the most often first; None of none.
    when: within what, as "in this run"."""
    often = sorted((item for item in epochs.items() if item[1] > ALIKE), key=lambda item: -item[1])
    if not often:
        return None
    named = listed([f"{name} {each:,.{1 if each < 100 else 0}f}" for name, each in often])
    what = "source is" if len(often) == 1 else "sources are"
    return f"{len(often):,} {what} read more than {ALIKE:g} times {when} ({named}): {WHY}"
