"""The picture of a run's goodput: a bar of all its hours, and one of each start."""

from html import escape

from jaxthru.training.goodput import CATEGORIES, OTHER, PRODUCTIVE, RECOVERY, WASTED, Account, hours

COLOURS = dict.fromkeys(CATEGORIES, "#777777")
COLOURS |= zip(
    (PRODUCTIVE, "data_loading_sync", WASTED, RECOVERY, "program_startup", "training_prep"),
    ("#228833", "#ccbb44", "#ee6677", "#aa3377", "#4477aa", "#66ccee"),
    strict=True,
)
COLOURS |= zip(
    (
        "tpu_initialization",
        "unproductive_checkpoint_save_time",
        "unproductive_checkpoint_restore_time",
        OTHER,
    ),
    ("#99ddff", "#ddaa33", "#bb5566", "#000000"),
    strict=True,
)
"""Of Paul Tol's bright and light schemes, which colour-blind readers can tell apart; the rest is grey."""
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 900, 150, 70, 18, 6, 40
SHOWN = 40
"""So many of the last starts have a bar."""


def picture(account: Account) -> str:
    """Returns the account as SVG."""
    starts = list(enumerate(account.starts, start=1))[-SHOWN:]
    bars = [(f"all, {hours(account.wall)}", account.seconds, account.wall)]
    longest = max(sum(start.seconds.values()) for _, start in starts)
    for number, start in starts:
        said = f"start {number}, from step {start.step:,}"
        bars.append((said, start.seconds, longest))
    used = [name for name in CATEGORIES if account.seconds.get(name, 0.0) > 0]
    columns = 2
    legend = TOP + (BAR + GAP) * len(bars) + 20
    height = legend + 16 * (-(-len(used) // columns)) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="22" font-size="13">goodput {account.goodput:.1%} of {hours(account.wall)}, '
        f"{len(account.starts)} starts, {account.steps:,} steps that count</text>",
    ]
    for row, (name, seconds, whole) in enumerate(bars):
        parts += _bar(TOP + row * (BAR + GAP), name, seconds, whole)
    for place, name in enumerate(used):
        x, y = GAP + (WIDTH // columns) * (place % columns), legend + 16 * (place // columns)
        said = f"{name}: {CATEGORIES[name]}, {account.seconds[name] / account.wall:.1%}"
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(said)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: float, name: str, seconds: dict[str, float], whole: float) -> list[str]:
    """Returns a bar: its parts, in the order of the categories."""
    scale, x = (WIDTH - LEFT - RIGHT) / (whole or 1.0), float(LEFT)
    parts = [f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>']
    total = sum(seconds.values())
    for category in CATEGORIES:
        width = max(0.0, seconds.get(category, 0.0)) * scale
        if width >= 0.05:
            said = f"<title>{category}: {hours(seconds[category])}</title>"
            where = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect {where} fill="{COLOURS[category]}">{said}</rect>')
            x += width
    parts.append(
        f'<text x="{x + 5:.1f}" y="{y + 13}">{seconds.get(PRODUCTIVE, 0.0) / (total or 1.0):.0%}</text>'
    )
    return parts
