"""Whatever a mix and its files hold, preparation ends well or in one line: `scripts/fuzz.py data`."""

import collections

import fuzz_mixes


def test_made_up_mixes_are_prepared_or_refused_in_one_line(tmp_path):
    found = collections.Counter()
    for number, case in enumerate(fuzz_mixes.cases(60, seed=7)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found[fuzz_mixes.check(case, folder) == "accepted"] += 1
    assert found[True] > 15 and found[False] > 15
