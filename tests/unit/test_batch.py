"""Batches: concatenating prompts, splitting them again, and the metadata between."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_adv.batch import RolloutGroup, TrajBatchMeta, as_meta, check_meta, concat_batch, split_batch
from compiled_adv.errors import BadMeta, EmptyBatch, MissingKey, WrongDtype, WrongShape, WrongType


def prompt(rows: int = 2, width: int = 3, start: int = 1, **more: Any) -> dict[str, Any]:
    """One prompt whose numbers all differ from zero and from each other's."""
    tokens = torch.arange(start, start + rows * width).reshape(rows, width)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones(rows, width, dtype=torch.bool),
        "loss_mask": torch.ones(rows, width, dtype=torch.int64),
        "logprobs": -tokens.float(),
        "turn_ids": torch.zeros(rows, width, dtype=torch.int64),
        "rewards": torch.arange(1, rows + 1),
        **more,
    }


def meta(sizes=(2, 3), groups: Any = None, **changed: Any) -> TrajBatchMeta:
    values = dict(n_trajs=len(sizes), traj_group_sizes=[*sizes], traj_seqlens=[4] * len(sizes), rollout_groups=groups)
    return TrajBatchMeta(**(values | changed))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return isinstance(y, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)
        return x is y or x == y

    return [*a] == [*b] and all(equal(a[key], b[key]) for key in a)


# ---- concat_batch ----


def test_prompts_are_padded_to_the_widest_with_zeros():
    batch, _ = concat_batch([prompt(1, 2), prompt(2, 4)])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["attention_mask"].tolist()[0] == [True, True, False, False]
    assert batch["logprobs"].tolist()[0] == [-1.0, -2.0, 0.0, 0.0]


def test_turn_ids_are_padded_with_minus_one():
    batch, _ = concat_batch([prompt(1, 2), prompt(1, 4)])
    assert batch["turn_ids"].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]


def test_rows_keep_their_order_and_their_dtype():
    batch, _ = concat_batch([prompt(2, 3), prompt(3, 3)])
    assert batch["rewards"].tolist() == [1, 2, 1, 2, 3]
    assert {k: x.dtype for k, x in batch.items()} == {k: x.dtype for k, x in prompt().items()}


def test_a_tensor_of_more_dimensions_is_padded_along_its_tokens():
    batch, _ = concat_batch([prompt(1, 2, h=torch.ones(1, 2, 5)), prompt(1, 3, h=torch.ones(1, 3, 5))])
    assert batch["h"].shape == (2, 3, 5) and batch["h"][0, 2].tolist() == [0.0] * 5


def test_the_metadata_tells_rows_and_width_of_each_prompt():
    _, found = concat_batch([prompt(2, 3), prompt(1, 5)])
    assert found == TrajBatchMeta(2, [2, 1], [3, 5], [None, None])


def test_the_metadata_always_lists_rollout_groups_and_the_batch_never_does():
    group = RolloutGroup((2, 1), (1.0, None))
    batch, found = concat_batch([prompt(3, 2, rollout_group=group), prompt(1, 2)])
    assert found.rollout_groups == [group, None]
    assert "rollout_group" not in batch


@pytest.mark.parametrize(
    "group",
    [{"row_counts": [2, 1], "rewards": [1.0, None]}, SimpleNamespace(row_counts=(2, 1), rewards=(1.0, None))],
)
def test_a_rollout_group_may_be_a_mapping_or_an_object(group):
    _, found = concat_batch([prompt(3, 2, rollout_group=group)])
    assert found.rollout_groups == [RolloutGroup((2, 1), (1.0, None))]


def test_what_is_no_tensor_is_carried_as_a_list_with_one_entry_per_prompt():
    image = object()
    batch, _ = concat_batch([prompt(2, images=image, names=["a", "b"]), prompt(1, images=None, names=["c"])])
    assert batch["images"][0] is image and batch["images"][1] is None
    assert batch["names"] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_key_that_some_prompts_lack_is_refused_by_name(missing):
    prompts = [prompt(values=torch.zeros(2, 3)), prompt(values=torch.zeros(2, 3))]
    del prompts[missing]["values"]
    with pytest.raises(MissingKey, match=rf"'values'.*missing in batch\[{missing}\]"):
        concat_batch(prompts)


def test_concatenating_writes_to_nothing_and_shares_nothing():
    given = prompt(1, 3)
    before = {key: x.clone() for key, x in given.items()}
    batch, _ = concat_batch([given])
    for x in batch.values():
        x.fill_(1) if x.dtype == torch.bool else x.fill_(77)
    assert same(given, before)


def test_a_concatenated_batch_is_contiguous_and_requires_no_grad():
    values = torch.zeros(3, 2).T.requires_grad_()
    batch, _ = concat_batch([prompt(2, 3, values=values)])
    assert batch["values"].is_contiguous() and not batch["values"].requires_grad


def test_no_prompt_at_all_is_refused():
    with pytest.raises(EmptyBatch):
        concat_batch([])


@pytest.mark.parametrize("given", [prompt(), None, 5, "batch"])
def test_what_is_no_list_of_prompts_is_refused(given):
    with pytest.raises(WrongType, match="list"):
        concat_batch(given)


def test_a_prompt_that_is_no_mapping_is_refused_with_its_place():
    with pytest.raises(WrongType, match=r"batch\[1\]"):
        concat_batch([prompt(), [1]])  # type: ignore[list-item]


def test_a_prompt_may_be_a_read_only_mapping():
    assert concat_batch([MappingProxyType(prompt())])[1].traj_group_sizes == [2]


@pytest.mark.parametrize("given", [prompt(0, 3), {"names": "a"}, {}])
def test_a_prompt_without_rows_is_refused(given):
    with pytest.raises(EmptyBatch, match=r"batch\[0\]"):
        concat_batch([given])


@pytest.mark.parametrize("rewards", [torch.zeros(3), torch.tensor(1.0)])
def test_a_tensor_without_one_entry_per_row_is_refused(rewards):
    with pytest.raises(WrongShape, match=r"batch\[1\]\['rewards'\]"):
        concat_batch([prompt(), prompt(rewards=rewards)])


@pytest.mark.parametrize("key", ["token_rewards", "values", "turn_ids", "loss_mask"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (2,), (2, 3, 1)])
def test_a_tensor_of_tokens_that_is_not_as_wide_as_its_prompt_is_refused(key, shape):
    # Padding would make it look right.
    wrong = prompt(2, 3, **{key: torch.zeros(shape, dtype=torch.int64)})
    right = prompt(2, 5, **{key: torch.zeros(2, 5, dtype=torch.int64)})
    with pytest.raises(WrongShape, match=rf"batch\[0\]\['{key}'\]"):
        concat_batch([wrong, right])


def test_a_key_whose_dtypes_differ_is_refused():
    with pytest.raises(WrongDtype, match="'rewards'"):
        concat_batch([prompt(), prompt(rewards=torch.zeros(2))])


def test_a_key_whose_trailing_dimensions_differ_is_refused():
    with pytest.raises(WrongShape, match="'h'"):
        concat_batch([prompt(h=torch.zeros(2, 3, 4)), prompt(h=torch.zeros(2, 3, 5))])


def test_a_tensor_without_numbers_is_refused():
    with pytest.raises(WrongType, match="'rewards' must be a plain tensor"):
        concat_batch([prompt(), prompt(rewards=torch.zeros(2, dtype=torch.int64, device="meta"))])


@pytest.mark.parametrize("place", [0, 1])
def test_a_key_that_is_a_tensor_in_some_prompts_only_is_refused(place):
    prompts = [prompt(), prompt()]
    prompts[place]["rewards"] = [1.0, 2.0]
    with pytest.raises(WrongType, match=rf"batch\[{place}\]\['rewards'\]"):
        concat_batch(prompts)


@pytest.mark.parametrize("group", [RolloutGroup((1,)), RolloutGroup((2, 0)), RolloutGroup((2,), (float("nan"),))])
def test_a_rollout_group_that_does_not_fit_its_prompt_is_refused(group):
    with pytest.raises(BadMeta, match=r"rollout_groups\[0\]"):
        concat_batch([prompt(2, rollout_group=group)])


# ---- split_batch ----


def test_splitting_crops_to_each_prompts_width_and_puts_the_rollout_group_back():
    group = RolloutGroup((1, 1))
    parts = split_batch(*concat_batch([prompt(2, 3, rollout_group=group), prompt(1, 5)]))
    assert [x["input_ids"].shape for x in parts] == [(2, 3), (1, 5)]
    assert parts[0]["rollout_group"] == group and "rollout_group" not in parts[1]


def test_splitting_crops_what_was_computed_on_the_batch_too():
    batch, found = concat_batch([prompt(2, 3), prompt(1, 5)])
    parts = split_batch({"advantages": torch.ones(3, 5), **batch}, found)
    assert [x["advantages"].shape for x in parts] == [(2, 3), (1, 5)]


def test_splitting_crops_a_batch_that_was_padded_wider_since():
    batch, found = concat_batch([prompt(2, 3), prompt(1, 5)])
    wider = {key: torch.nn.functional.pad(x, (0, 2)) if x.ndim > 1 else x for key, x in batch.items()}
    assert [x["input_ids"].shape for x in split_batch(wider, found)] == [(2, 3), (1, 5)]


def test_splitting_leaves_a_second_dimension_that_is_not_tokens():
    turn_rewards = torch.ones(2, 4)
    parts = split_batch(*concat_batch([prompt(2, 3, t=turn_rewards), prompt(1, 5, t=torch.ones(1, 4))]))
    assert [x["t"].shape for x in parts] == [(2, 4), (1, 4)]


def test_split_prompts_share_storage_with_nothing():
    batch, found = concat_batch([prompt(1, 3), prompt(1, 3)])
    tensors = [x for part in split_batch(batch, found) for x in part.values()] + [*batch.values()]
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    assert len(storages) == len(tensors)


def test_splitting_takes_metadata_as_a_mapping():
    batch, _ = concat_batch([prompt(2, 3), prompt(1, 3)])
    found = {"n_trajs": 2, "traj_group_sizes": [2, 1], "traj_seqlens": [3, 3], "rollout_groups": None}
    assert [len(x["rewards"]) for x in split_batch(batch, found)] == [2, 1]


@pytest.mark.parametrize(
    "changed",
    [
        {"traj_seqlens": [3]},
        {"traj_seqlens": [3, 6]},
        {"traj_seqlens": [3, -1]},
        {"traj_seqlens": [3, True]},
        {"n_trajs": 3},
        {"traj_group_sizes": [2, 0]},
        {"rollout_groups": [None]},
    ],
)
def test_splitting_refuses_metadata_that_disagrees_with_itself(changed):
    batch, _ = concat_batch([prompt(2, 3), prompt(1, 5)])
    with pytest.raises(BadMeta):
        split_batch(batch, meta((2, 1), **({"traj_seqlens": [3, 5]} | changed)))


def test_splitting_without_metadata_is_refused():
    with pytest.raises(BadMeta, match="concat_batch"):
        split_batch(prompt(), None)


def test_splitting_refuses_a_tensor_without_one_entry_per_row():
    batch, found = concat_batch([prompt(2), prompt(1)])
    with pytest.raises(WrongShape, match="batch\\['extra'\\]"):
        split_batch({**batch, "extra": torch.zeros(2)}, found)


@pytest.mark.parametrize("value", ["text", [1], None, (1, 2)])
def test_splitting_refuses_what_is_neither_a_tensor_nor_a_list_per_prompt(value):
    batch, found = concat_batch([prompt(2), prompt(1)])
    with pytest.raises(WrongType, match="batch\\['extra'\\]"):
        split_batch({**batch, "extra": value}, found)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.booleans()), min_size=1, max_size=5),
    st.integers(8, 9),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100)
def test_splitting_is_the_inverse_of_concatenating(shapes, k, random):
    prompts = []
    for rows, width, grouped in shapes:
        group = {"rollout_group": RolloutGroup((1,) * rows, tuple(random.choice([None, 1.5]) for _ in range(rows)))}
        more = dict(
            values=torch.randn(rows, width, dtype=torch.bfloat16),
            scores=torch.randn(rows, k),
            states=torch.randn(rows, width, 2),
            image=object(),
        )
        prompts.append(prompt(rows, width, **more, **(group if grouped else {})))
    parts = split_batch(*concat_batch(prompts))
    assert len(parts) == len(prompts)
    assert all(same(a, b) for a, b in zip(prompts, parts, strict=True))


# ---- metadata ----


def test_logical_group_sizes_count_rollouts_and_rows_where_none_are_told():
    assert meta((3, 2), [RolloutGroup((2, 1)), None]).logical_group_sizes == [2, 2]
    assert meta((3, 2), None).logical_group_sizes == [3, 2]


MAPPING = {
    "n_trajs": 2,
    "traj_group_sizes": [3, 2],
    "traj_seqlens": [4, 4],
    "rollout_groups": [{"row_counts": [2, 1], "rewards": []}, None],
}


@pytest.mark.parametrize(
    "given", [MAPPING, MappingProxyType(MAPPING), SimpleNamespace(**MAPPING), meta((3, 2), MAPPING["rollout_groups"])]
)
def test_metadata_may_be_ours_a_mapping_or_an_object(given):
    assert as_meta(given) == meta((3, 2), [RolloutGroup((2, 1)), None])


def test_metadata_may_be_absent():
    assert as_meta(None) is None


@pytest.mark.parametrize("kind", [dict, lambda **x: SimpleNamespace(**x)])
def test_rollout_groups_may_be_left_out(kind):
    given = {key: value for key, value in MAPPING.items() if key != "rollout_groups"}
    assert as_meta(kind(**given)).rollout_groups is None


def test_references_may_be_left_out():
    assert as_meta(MAPPING | {"rollout_groups": [{"row_counts": [2, 1]}, None]}).rollout_groups[0].rewards == ()


def test_metadata_without_group_sizes_is_refused_by_name():
    with pytest.raises(BadMeta, match="traj_group_sizes"):
        as_meta({key: value for key, value in MAPPING.items() if key != "traj_group_sizes"})


def test_an_unknown_key_in_metadata_is_refused_with_the_nearest():
    with pytest.raises(BadMeta, match="try   rollout_groups"):
        as_meta(MAPPING | {"rollout_group": []})


@pytest.mark.parametrize("given", [5, "meta", [1], {"row_counts": [1]}])
def test_what_is_no_metadata_is_refused(given):
    with pytest.raises(BadMeta):
        as_meta(given)


@pytest.mark.parametrize("key", ["traj_group_sizes", "traj_seqlens", "rollout_groups"])
def test_a_list_in_metadata_is_a_list(key):
    with pytest.raises(BadMeta, match=key):
        as_meta(MAPPING | {key: 5})


@pytest.mark.parametrize("group", [{"row_counts": 3}, {"rewards": []}, {"row_counts": [2], "rewards": None}, 5])
def test_a_rollout_group_has_lists(group):
    with pytest.raises(BadMeta):
        as_meta(MAPPING | {"rollout_groups": [group, None]})


def test_metadata_is_copied_from_what_was_given():
    given = {key: [*value] if isinstance(value, list) else value for key, value in MAPPING.items()}
    found = as_meta(given)
    given["traj_group_sizes"].append(9)
    assert found.traj_group_sizes == [3, 2]


def test_fitting_metadata_passes():
    check_meta(meta((3, 2), [RolloutGroup((2, 1), (0.5, None)), None]), 5, sizes_matter=True)
    check_meta(None, 5, sizes_matter=True)


def test_numbers_of_numpy_are_read_as_pythons_own():
    given = meta((np.int64(3), 2), [{"row_counts": np.array([2, 1]), "rewards": [np.float32(0.5), None]}, None])
    found = as_meta(given)
    check_meta(found, 5, sizes_matter=True)
    assert [type(size) for size in (*found.traj_group_sizes, *found.rollout_groups[0].row_counts)] == [int] * 4
    assert found.rollout_groups[0].rewards == (0.5, None)


@pytest.mark.parametrize("sizes", [(3, 0, 2), (6, -1), (3, 1), (3, 3), (2.5, 2.5), (True, 4), (None, 5), ()])
def test_group_sizes_are_positive_integers_that_sum_to_the_rows(sizes):
    with pytest.raises(BadMeta, match="traj_group_sizes"):
        check_meta(meta(sizes), 5, sizes_matter=True)


@pytest.mark.parametrize("sizes", [(3, 0, 2), (3, 1), (True, 4), ()])
@pytest.mark.parametrize("groups", [False, True])
def test_group_sizes_are_not_looked_at_where_nothing_maps_rows_to_them(sizes, groups):
    check_meta(meta(sizes, [None] * len(sizes) if groups else None), 5, sizes_matter=False)


def test_group_sizes_are_looked_at_where_logical_rollouts_map_to_them():
    with pytest.raises(BadMeta, match="traj_group_sizes"):
        check_meta(meta((3, 1), [RolloutGroup((3,)), None]), 5, sizes_matter=False)


@pytest.mark.parametrize("counts", [(2,), (2, 2), (3, 0), (4, -1), (1.5, 1.5), (True, 2), ()])
@pytest.mark.parametrize("sizes_matter", [False, True])
def test_row_counts_are_positive_integers_that_sum_to_the_prompts_rows(counts, sizes_matter):
    with pytest.raises(BadMeta, match=r"rollout_groups\[0\].row_counts"):
        check_meta(meta((3, 2), [RolloutGroup(counts), None]), 5, sizes_matter=sizes_matter)


@pytest.mark.parametrize("reference", [float("nan"), float("inf"), True, "1", 10**400, [1.0]])
@pytest.mark.parametrize("sizes_matter", [False, True])
def test_a_reference_is_a_finite_number(reference, sizes_matter):
    with pytest.raises(BadMeta, match=r"rollout_groups\[0\].rewards"):
        check_meta(meta((3, 2), [RolloutGroup((2, 1), (reference, None)), None]), 5, sizes_matter=sizes_matter)


@pytest.mark.parametrize("references", [(1.0,), (1.0, 2.0, 3.0)])
def test_references_are_none_at_all_or_one_per_logical_rollout(references):
    with pytest.raises(BadMeta, match=r"rollout_groups\[0\].rewards"):
        check_meta(meta((3, 2), [RolloutGroup((2, 1), references), None]), 5, sizes_matter=False)


@pytest.mark.parametrize("groups", [[None], [None] * 3, [RolloutGroup((3,))]])
def test_rollout_groups_have_one_entry_per_prompt(groups):
    with pytest.raises(BadMeta, match="one entry per prompt"):
        check_meta(meta((3, 2), groups), 5, sizes_matter=False)
