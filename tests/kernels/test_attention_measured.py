"""Which attention a table of measurements stands for: the nearest point, within its distance, or none."""

import dataclasses

import pytest

from pallas_kernels.attention import OPERATION, measured

HOPPER = (9, 0)


def point(head_dim: int, sequence: int, documents: float, fastest: str | None) -> dict:
    milliseconds = {"cudnn_packed": 3.16, "triton": 1.74}
    return dataclasses.asdict(measured.Point(head_dim, sequence, documents, milliseconds, fastest, 32))


TABLE = {
    "9.0": [
        point(64, 2048, 120, "triton"),
        point(64, 2048, 480, "triton"),
        point(64, 2048, 1900, "cudnn_packed"),
        point(64, 8192, 480, None),
        point(128, 2048, 480, "cudnn_packed"),
    ]
}


@pytest.mark.parametrize(
    ("head_dim", "sequence", "documents", "found"),
    [
        (64, 2048, 480, (64, 2048, 480)),
        (64, 2048, 900, (64, 2048, 480)),
        (64, 2048, 1000, (64, 2048, 1900)),  # on a line of lengths 480 is nearer, of ratios this is
        (64, 2048, 61, (64, 2048, 120)),
        (64, 2048, 59, None),
        (64, 4000, 480, (64, 2048, 480)),
        (64, 4000, 900, (64, 2048, 480)),  # both may be twice as long
        (64, 4097, 480, (64, 8192, 480)),
        (64, 1024, 480, (64, 2048, 480)),
        (64, 1023, 480, None),
        (64, 16_384, 480, (64, 8192, 480)),
        (64, 16_385, 480, None),
        (64, 8192, 8192, None),
        (128, 2048, 480, (128, 2048, 480)),
        (96, 2048, 480, None),  # a width between two is neither
    ],
)
def test_the_nearest_point_stands_for_what_is_no_further_than_twice(head_dim, sequence, documents, found):
    nearest = measured.nearest(head_dim, sequence, documents, HOPPER, TABLE)
    assert (nearest and (nearest.head_dim, nearest.sequence, nearest.documents)) == found


def test_other_gpus_have_other_tables():
    assert measured.nearest(64, 2048, 480, (10, 0), TABLE) is None
    assert measured.nearest(64, 2048, 480, HOPPER, {}) is None


def test_a_point_says_why():
    nearest = measured.nearest(64, 2048, 512.4, HOPPER, TABLE)
    assert nearest.fastest == "triton"
    assert nearest.said(2048, 512.4) == (
        "by the table: head_dim 64, rows of 2,048, documents of about 512 tokens "
        "(measured at 2,048 and 480: triton 1.74 ms, cudnn_packed 3.16 ms)"
    )


def test_the_table_that_is_shipped_can_be_read():
    for capability, rows in measured.TABLE.items():
        assert tuple(map(int, capability.split("."))) >= (8, 0)
        points = [measured.Point(**row) for row in rows]
        assert len({(each.head_dim, each.sequence, each.documents) for each in points}) == len(points)
        for each in points:
            assert {*each.milliseconds} <= {*OPERATION.names} and len(each.milliseconds) > 1
            assert each.fastest in (None, min(each.milliseconds, key=each.milliseconds.get))
