"""The data plane at scale: what its parts take, and how near the simulation of docs/data-scale.md comes.

What is expected, on two cores: a step of 10,240 rows is planned in some 10 ms, for each row costs about half
a microsecond to choose, to place and to balance, which is 0.2% of a step of 5 s. Four processes with a token
worker each wait for two cores, so that a fetch takes as long as all of them have work before it.
"""

from suites.measured import Measured
from suites.rows import Bar

ERROR = Bar("error", 0.15, "{:.0%} between simulated and real, the farthest of p50, p99 and rate", most=True)
BOTH = {
    f"{name} {of}": (f"{key}_{of}", form)
    for name, key, form in (
        ("p50", "fetch_p50", ".4f"),
        ("p99", "fetch_p99", ".4f"),
        ("rows/s", "rows_per_second", ".1f"),
    )
    for of in ("real", "simulated")
}
COLUMNS = {"apart": ("error", ".1%")} | BOTH | {"other programs' cores": ("others", ".2f")}

# fmt: off
ROWS = {
    "services": Measured(
        "what planning, tokens, rows, messages and connections take",
        bars=(Bar("planner_share", 0.01, "{:.1%} of a step of 5 s to plan it for 10,240 GPUs", most=True),),
        contenders={"services": "data_services.py"}, seconds=120,
        columns={"planner, of 5 s": ("planner_share", ".2%"),
                 "of 4 rows a GPU": ("planner_share_of_4_rows", ".2%")}),
    "paced": Measured(
        "four processes that take batches at a pace",
        bars=(ERROR,), rounds=3, seconds=90, columns=COLUMNS,
        contenders={"paced": "data_simulated.py --period 0.25 --steps 120"}),
    "saturated": Measured(
        "four processes that take batches as fast as they come",
        bars=(ERROR,), rounds=3, seconds=90, columns=COLUMNS,
        contenders={"saturated": "data_simulated.py --steps 150"}),
}
# fmt: on
NOTES = """\
The simulation itself, to 10,240 GPUs, is `python scripts/study/data_scale.py`. Rows `paced` and `saturated`
are medians over rounds, each of which measures what its parts take right before and after it. On a machine
that others use too, run them under `chrt -r 1`: then the simulation's cores are all theirs.
"""
