import dataclasses
CONSUMERS=2
PIECE=64
@dataclasses.dataclass(frozen=True)
class Tiles:
    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    minor: str = "M"
    width: int = 8
    sends: bool = False
    out_slots: int = 1
    @property
    def m_of_consumer(self): return self.m // CONSUMERS
    @property
    def pieces(self): return [(r, c) for c in range(0, self.n, PIECE) for r in range(0, self.m_of_consumer, PIECE)]
    @property
    def registers(self): return (232, 24) if self.sends else (232, 40)
