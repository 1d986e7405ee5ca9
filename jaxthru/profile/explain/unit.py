"""Seconds as they are written: in one unit for a whole page."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unit:
    """name: "s" or "ms". scale: of them in a second. digits: decimals."""

    name: str
    scale: float
    digits: int

    @classmethod
    def of(cls, step: float) -> "Unit":
        """Returns the unit that suits steps of so many seconds."""
        return cls("s", 1, 2) if step >= 10 else cls("ms", 1e3, 1 if step >= 0.1 else 2)

    def bare(self, seconds: float) -> str:
        return f"{seconds * self.scale:,.{self.digits}f}"

    def __call__(self, seconds: float) -> str:
        return f"{self.bare(seconds)}\N{NO-BREAK SPACE}{self.name}"
