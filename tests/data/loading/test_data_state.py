import json

import pytest

from jaxthru.data.loading.state import DataState, check_packing, check_sampler
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.runtime.errors import InputError

EVEN, ONLY_A = Mixture.plain({"a": 0.5, "b": 0.5}), Mixture.plain({"a": 1.0, "b": 0.0})
STATE = DataState(step=10, schedule=((0, EVEN),), keys={"a": "1", "b": "2"})


def test_json_round_trip():
    assert DataState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_only_changed_weights_enter_the_schedule():
    same = STATE.resumed(10, EVEN, STATE.keys)
    assert same == STATE
    changed = STATE.resumed(10, ONLY_A, STATE.keys)
    assert changed.schedule == (*STATE.schedule, (10, ONLY_A))
    # Resumed again before another update, back to the first weights: nothing has happened.
    assert changed.resumed(10, EVEN, STATE.keys) == STATE


def test_weights_changed_before_the_first_update_replace_the_first_entry():
    state = DataState(step=0, schedule=((0, Mixture.plain({"a": 1.0})),), keys={"a": "1"})
    assert state.resumed(0, EVEN, {"a": "1", "b": "2"}).schedule == ((0, EVEN),)


def test_a_run_of_an_older_sampler_goes_on_only_where_its_batches_would_be_the_same():
    tree = STATE.to_json()
    old = {key: value for key, value in tree.items() if key != "sampler"}
    message = "version 1 of the mixture sampler.* gives other batches: continue it with commit 7a9d05a"
    with pytest.raises(InputError, match=message):
        DataState.from_json(old)
    with pytest.raises(InputError, match=r"version 99 .* continue it with a newer jaxthru"):
        check_sampler(tree | {"sampler": 99})
    alone = DataState(step=10, schedule=((0, ONLY_A),), keys={"a": "1", "b": "2"})
    assert DataState.from_json(alone.to_json() | {"sampler": 1}) == alone


def test_a_run_of_rows_with_fewer_documents_goes_on_only_where_they_would_be_the_same():
    tree = STATE.to_json()
    old = {key: value for key, value in tree.items() if key != "packing"}
    check_packing(tree, 1024, 4096, whole=True, cut=False)
    check_packing(old, 1024, 64, whole=True, cut=False)
    check_packing(old, 16_384, 128, whole=True, cut=False)
    with pytest.raises(
        InputError, match=r"begun with at most 64 documents in a row.*commit fd64fb7 of jaxthru"
    ):
        check_packing(old, 1024, 72, whole=True, cut=False)


def test_a_run_of_cut_rows_with_other_shares_goes_on_only_from_one_source():
    tree = STATE.to_json()
    old = {key: value for key, value in tree.items() if key != "packing"}
    check_packing(tree, 1024, 4096, whole=False, cut=True)
    with pytest.raises(InputError, match=r"last row of each source counted as full.*commit fd64fb7 of jax"):
        check_packing(old, 1024, 64, whole=False, cut=True)
    alone = DataState(step=10, schedule=((0, ONLY_A),), keys={"a": "1", "b": "2"})
    alone = {key: value for key, value in alone.to_json().items() if key != "packing"}
    check_packing(alone, 1024, 4096, whole=False, cut=True)


def test_a_changed_or_missing_source_is_named():
    with pytest.raises(
        InputError, match="source b has changed since this run started: its text or tokenizer"
    ):
        STATE.resumed(10, EVEN, {"a": "1", "b": "3"})
    with pytest.raises(InputError, match="source b has gone"):
        STATE.resumed(10, EVEN, {"a": "1"})
