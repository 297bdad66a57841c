"""Takes a batch whose structure was checked (admit.py); gives its result by plain loops over rows and tokens.

The oracle. Results are float32, computed in float64, with the flags {name: rows}: either one error flag and no
tensors, or the warnings. Every fast path is checked against this file, so it shares no arithmetic with stages/. One
method per step of the default computation, in its order.
"""
# ruff: noqa: B905  (every list here has one entry per row, member or column)

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_adv import gae
from compiled_adv.advantage import OutcomeRewardInputs, ProcessAdvantageInputs
from compiled_adv.advantage_algorithms import TemporalInputs
from compiled_adv.batch import covers
from compiled_adv.channel import STATS

if TYPE_CHECKING:
    from compiled_adv.admit import Call
    from compiled_adv.batch import TrajBatchMeta
    from compiled_adv.distributed import Meeting
    from compiled_adv.resolve import Resolved
    from compiled_adv.spec import Norm, Spec

Column = list[float]  # one number per row (_B), member (_N) or column of one row (_T)
Grid = list[list[float]]  # _BT


class Refused(Exception):
    """An error flag: the rows of the batch that break one rule."""

    def __init__(self, flag: str, rows: list[int]) -> None:
        super().__init__(flag)
        self.flag, self.rows = flag, rows


@dataclass(frozen=True)
class Member:
    """One voice in the reward statistics: a row, or all rows of one logical rollout."""

    rows: list[int]
    reference: float | None  # raw, as the metadata gives it


@dataclass(frozen=True)
class Part:
    """Units (members or rows) that share a mean or a spread."""

    units: list[int]
    alone: bool  # one member: it has nobody to be compared with
    elsewhere: Column = field(default_factory=list)  # what stands for values on other ranks


def run(
    spec: Spec,
    resolved: Resolved,
    data: Mapping[str, Tensor],
    meta: TrajBatchMeta | None,
    call: Call,
    meeting: Meeting | None = None,
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    oracle = Oracle(spec, resolved, data, meta, call, meeting)
    try:
        return oracle.compute(), oracle.warnings
    except Refused as refused:
        return {}, {refused.flag: refused.rows}


class Oracle:
    """One call: the steps share the configuration, the batch and what its masks say."""

    def __init__(
        self,
        spec: Spec,
        resolved: Resolved,
        data: Mapping[str, Tensor],
        meta: TrajBatchMeta | None,
        call: Call,
        meeting: Meeting | None,
    ) -> None:
        self.spec, self.resolved, self.data, self.meta, self.call = spec, resolved, data, meta, call
        self.meeting = meeting
        self.warnings: dict[str, list[int]] = {}
        self.n_rows, self.n_columns = data["attention_mask"].shape
        self.strict = spec.advantage.rules == "strict"
        self.has_rollouts = meta is not None and meta.rollout_groups is not None

    def compute(self) -> dict[str, Tensor]:
        self.read_masks()
        raw_B = self.read_rewards()
        logprobs = self.align_logprobs()
        values_BT = self.read_values()
        token_rewards_BT = self.read_token_rewards()
        turn_ids_BT = self.align_turn_ids()
        direct_BT = self.direct_rewards(token_rewards_BT)
        folded_BT = self.folded_rewards(token_rewards_BT, turn_ids_BT)

        penalised = self.penalise_length(raw_B)
        rewards, shaped_references_N = self.shape_rewards(penalised)
        scores_B = self.normalise_scores(raw_B, numbers(rewards), shaped_references_N)
        outcome_BT = self.place_outcome(scores_B)
        kl_rewards_BT = self.kl_rewards(logprobs["logprobs"], logprobs.get("ref_logp"))
        kl_BT = self.without_last_token(kl_rewards_BT)
        estimated = self.estimate(outcome_BT, kl_BT, folded_BT, values_BT, turn_ids_BT)
        unshaped_BT = self.normalise_advantages(estimated["advantages"])
        advantages_BT = self.shape_advantages(unshaped_BT, direct_BT)

        channels = estimated | logprobs | {"advantages": advantages_BT, "kl_rewards": kl_rewards_BT}
        result = {name: self.tensor(x_BT) for name, x_BT in channels.items()}
        result["loss_mask"] = self.tensor(self.mask_BT)
        result["is_truncated"] = self.tensor(self.truncated_B, torch.bool)
        if self.spec.advantage.stats:
            shaped = direct_BT is not None or not isinstance(self.process, str)
            found = self.measure_rows(numbers(rewards)) | self.measure_advantages(numbers(result["advantages"]))
            found |= self.measure_shaping(unshaped_BT, numbers(result["advantages"])) if shaped else {}
            found |= self.measure_values(numbers(result["returns"]), values_BT)
            found |= self.measure_kl(logprobs["logprobs"], logprobs.get("ref_logp"))
            result["stats"] = self.tensor([found.get(name, math.nan) for name in STATS], torch.float64)
        return result | {"rewards": rewards}

    # -- small helpers ------------------------------------------------------------------------------------------------

    def warn(self, name: str, rows: Iterable[int]) -> None:
        found = sorted(set(rows))
        if found:
            self.warnings[name] = found

    def tensor(self, x: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(x, dtype=dtype, device=self.data["rewards"].device)

    def zeros(self) -> Grid:
        return [[0.0] * self.n_columns for _ in range(self.n_rows)]

    def align(self, x_BT: list[list[Any]], blank: Any) -> list[list[Any]]:
        """Column t gets what belongs to token t+1. Default rules wrap column 0 to the end, strict rules do not."""
        return [row[1:] + ([blank] if self.strict else row[:1]) for row in x_BT]

    def masked(self, x_BT: Grid) -> Grid:
        out_BT = self.zeros()
        for b, active_T in enumerate(self.active_BT):
            for t in active_T:
                out_BT[b][t] = x_BT[b][t]
        return out_BT

    def last(self, b: int) -> int:
        """Column of the last valid token; of an all-padding row the last column of all."""
        return (self.length_B[b] - 1) % self.n_columns

    # -- what the batch says ------------------------------------------------------------------------------------------

    def read_masks(self) -> None:
        attention_BT, loss_BT = (self.data[name].to(torch.float64).tolist() for name in ("attention_mask", "loss_mask"))
        for flag, mask_BT in (("nonfinite_attention_mask", attention_BT), ("nonfinite_loss_mask", loss_BT)):
            refuse(flag, (b for b, mask_T in enumerate(mask_BT) if not all(map(math.isfinite, mask_T))))
        self.length_B = [sum(a != 0 for a in mask_T) for mask_T in attention_BT]
        # L ones, then zeros: left padding, holes and numbers other than 0 and 1 all fail here
        prefix_BT = [[1.0] * length + [0.0] * (self.n_columns - length) for length in self.length_B]
        refuse("attention_not_prefix", (b for b in range(self.n_rows) if attention_BT[b] != prefix_BT[b]))
        self.generated_BT = [[x != 0 for x in mask_T] for mask_T in loss_BT]
        outside = (b for b, length in enumerate(self.length_B) if any(self.generated_BT[b][length:]))
        refuse("loss_mask_outside_attention", outside)

        self.mask_BT: list[list[bool]] = self.align(self.generated_BT, False)
        self.active_BT = [[t for t, m in enumerate(mask_T) if m] for mask_T in self.mask_BT]
        # an action never sits in the last column, where no advantage sees anything
        self.actions_BT = [[t for t in active_T if t < self.n_columns - 1] for active_T in self.active_BT]
        if self.data.get("is_truncated") is None:
            self.truncated_B = [length == self.n_columns for length in self.length_B]
            self.warn("truncated_by_width", (b for b, truncated in enumerate(self.truncated_B) if truncated))
        else:
            self.truncated_B = (self.data["is_truncated"] != 0).tolist()
        # cleared: the outcome of this row is not placed
        self.cleared_B = [self.spec.mask_no_eos_with_zero and truncated for truncated in self.truncated_B]
        self.warn("first_token_generated", (b for b, mask_T in enumerate(self.generated_BT) if mask_T[0]))

    def read_rewards(self) -> Column:
        raw_B: Column = numbers(self.data["rewards"])
        refuse("nonfinite_rewards", (b for b, reward in enumerate(raw_B) if not math.isfinite(reward)))
        return raw_B

    def align_logprobs(self) -> dict[str, Grid]:
        """logprobs, and what goes with them: prox_logp, mopd_behavior_logprobs, ref_logp."""
        spec, data = self.spec, self.data
        own_BT = read_active("nonfinite_logprobs", numbers(data["logprobs"]), self.generated_BT)
        behaviour_BT = self.masked(self.align(own_BT, 0.0))
        out = {"logprobs": behaviour_BT}
        if spec.recompute_logprob and not spec.use_decoupled_loss:  # prox_logp comes aligned
            out["logprobs"] = self.masked(read_active("nonfinite_prox_logp", numbers(data["prox_logp"]), self.mask_BT))
        if not spec.use_decoupled_loss:
            out["prox_logp"] = out["logprobs"]
        if data.get("mopd_teacher_logp_sum") is not None:
            out["mopd_behavior_logprobs"] = behaviour_BT
        if data.get("ref_logp") is not None:  # comes aligned
            out["ref_logp"] = self.masked(read_active("nonfinite_ref_logp", numbers(data["ref_logp"]), self.mask_BT))
        return out

    def read_values(self) -> Grid:
        if self.data.get("values") is None:
            return self.zeros()
        read_BT = [list(mask_T) for mask_T in self.mask_BT]
        for b, truncated in enumerate(self.truncated_B):
            read_BT[b][self.last(b)] |= truncated  # the bootstrap slot
        return read_active("nonfinite_values", numbers(self.data["values"]), read_BT)

    def read_token_rewards(self) -> Grid | None:
        if self.data.get("token_rewards") is None:
            return None
        own_BT = read_active("nonfinite_token_rewards", numbers(self.data["token_rewards"]), self.generated_BT)
        return [[0.0] * self.n_columns if cleared else own_T for own_T, cleared in zip(own_BT, self.cleared_B)]

    def align_turn_ids(self) -> list[list[int]] | None:
        """Turn ids of the chosen tokens, -1 in the last column. Not looked at where nothing reads them."""
        spec, custom = self.spec, self.resolved.estimator is not None
        checked = not custom and (spec.timestep_unit == "turn" or self.resolved.lambda_fn is not None)
        folded = not spec.token_rewards_as_adv and self.data.get("token_rewards") is not None
        if self.data.get("turn_ids") is None or not (checked or folded or custom):
            return None
        turn_ids_BT: list[list[int]] = [ids_T[1:] + [-1] for ids_T in self.data["turn_ids"].tolist()]
        if checked:
            ids_B = [[turn_ids_BT[b][t] for t in active_T] for b, active_T in enumerate(self.active_BT)]
            bad = (b for b, ids in enumerate(ids_B) if any(not 0 <= i < self.n_columns for i in ids))
            refuse("turn_id_out_of_range", bad)
            refuse("turn_ids_decrease", (b for b, ids in enumerate(ids_B) if ids != sorted(ids)))
        return turn_ids_BT

    def direct_rewards(self, token_rewards_BT: Grid | None) -> Grid | None:
        """Token rewards for process shaping."""
        if token_rewards_BT is None or not self.spec.token_rewards_as_adv:
            return None
        direct_BT = self.masked(self.align(token_rewards_BT, 0.0))
        if self.process == "process_weighted":
            bad = (b for b, direct_T in enumerate(direct_BT) if not all(0.0 <= p <= 1.0 for p in direct_T))
            refuse("process_reward_out_of_range", bad)
        return direct_BT

    def folded_rewards(self, token_rewards_BT: Grid | None, turn_ids_BT: list[list[int]] | None) -> Grid:
        """Token rewards for the estimator: each turn's once, where the turn ends."""
        folded_BT = self.zeros()
        if token_rewards_BT is None or self.spec.token_rewards_as_adv:
            return folded_BT
        refuse("nonuniform_folded_rewards", self.rows_with_uneven_turns(token_rewards_BT))
        aligned_BT = self.align(token_rewards_BT, 0.0)
        for b, active_T in enumerate(self.active_BT):
            for t in active_T:
                goes_on = t + 1 < self.n_columns and self.mask_BT[b][t + 1]
                if goes_on and turn_ids_BT is not None:
                    goes_on = turn_ids_BT[b][t] == turn_ids_BT[b][t + 1]
                if not goes_on:
                    folded_BT[b][t] = aligned_BT[b][t]
        return folded_BT

    def rows_with_uneven_turns(self, token_rewards_BT: Grid) -> Iterable[int]:
        """Rows where two generated tokens side by side, of one turn, carry different rewards. Not aligned yet."""
        ids_BT = None if self.data.get("turn_ids") is None else self.data["turn_ids"].tolist()
        for b, generated_T in enumerate(self.generated_BT):
            for t in range(1, self.n_columns):
                one_turn = ids_BT is None or ids_BT[b][t - 1] == ids_BT[b][t]
                if generated_T[t - 1] and generated_T[t] and one_turn:
                    if token_rewards_BT[b][t - 1] != token_rewards_BT[b][t]:
                        yield b

    # -- rewards ------------------------------------------------------------------------------------------------------

    def penalise_length(self, raw_B: Column) -> Tensor:
        """The rewards that outcome shaping gets: without a penalty as they came."""
        if not self.spec.overlong_reward_penalty:
            return self.data["rewards"].detach()
        tail, factor = self.spec.overlong_tokens, self.spec.overlong_penalty_factor
        assert tail is not None and factor is not None  # spec.py demands them
        exceed_B = [sum(generated_T) - (self.spec.max_new_tokens - tail) for generated_T in self.generated_BT]
        penalty_B = [min(-exceed / tail * factor, 0.0) for exceed in exceed_B]
        self.warn("uncapped_length_penalty", (b for b, penalty in enumerate(penalty_B) if penalty < -abs(factor)))
        if self.strict:
            penalty_B = [max(penalty, -abs(factor)) for penalty in penalty_B]
        rewards_B = [raw + penalty for raw, penalty in zip(raw_B, penalty_B)]
        refuse_nonfinite([[reward] for reward in rewards_B])
        return self.tensor(rewards_B)

    def shape_rewards(self, rewards: Tensor) -> tuple[Tensor, Column | None]:
        """The `rewards` channel, and a plugin's shaped references, one per logical rollout."""
        if self.resolved.outcome is None:
            is_integer = not rewards.is_floating_point() and rewards.dtype != torch.bool  # integers stay integers
            return rewards.to(rewards.dtype if is_integer else torch.float32, copy=True).contiguous(), None
        from compiled_adv.stages.plugin import call_outcome

        members = self.members()
        explicit = has_level(self.spec.reward_norm) and any(member.reference is not None for member in members)
        inputs = OutcomeRewardInputs(MappingProxyType({**self.data, "rewards": rewards}), self.spec.config, self.meta)
        complete = self.has_rollouts and self.meta is not None and covers(self.meta.traj_group_sizes, self.n_rows)
        n_members = len(members) if complete else None
        result = call_outcome(self.resolved.outcome, inputs, n_members, explicit)
        shaped_N = result.normalization_rewards
        return self.tensor(numbers(result.rewards)), None if shaped_N is None else numbers(shaped_N)

    def score(self, reward: float) -> float:
        scaled = (reward + self.spec.reward_bias) * self.spec.reward_scaling
        return min(max(scaled, -self.spec.reward_clip), self.spec.reward_clip)

    def normalise_scores(self, raw_B: Column, rewards_B: Column, shaped_references_N: Column | None) -> Column:
        """Bias, scale and clip, then reward_norm over the members that count."""
        norm, members = self.spec.reward_norm, self.members()
        scores_B = [self.score(reward) for reward in rewards_B]
        if norm is None or not has_level(norm):
            return scores_B
        references_N = self.references(members, raw_B, rewards_B, shaped_references_N)
        # under strict rules a member of cleared rows alone does not count
        counts_N = [not self.strict or not all(self.cleared_B[b] for b in member.rows) for member in members]
        values_N1 = [[self.score(ref)] if counts else [] for ref, counts in zip(references_N, counts_N)]
        groups = []
        for rows in self.row_groups(norm):
            units = [u for u, member in enumerate(members) if member.rows[0] in rows]
            groups.append(Part(units, alone=sum(counts_N[u] for u in units) == 1))
        batch = self.batch_part("reward_norm", norm, values_N1, groups)
        batch = replace(batch, alone=sum(counts_N) + len(batch.elsewhere) == 1)
        self.warn_of_statistics(norm, members, counts_N, values_N1, groups, batch)

        means_N1, scales_N = moments(norm, values_N1, groups, replace(batch, alone=self.strict and batch.alone))
        if self.has_rollouts and norm.std_level is not None:
            scales_N = [1.0 if scale <= 2 * norm.eps else scale for scale in scales_N]
        normalised_B = [0.0] * self.n_rows
        for member, means_1, scale in zip(members, means_N1, scales_N):
            for b in member.rows:
                if not self.cleared_B[b]:  # a cleared row's own score is never seen
                    normalised_B[b] = divide(scores_B[b] - means_1[0], scale)
        return normalised_B

    def references(
        self, members: list[Member], raw_B: Column, rewards_B: Column, shaped_references_N: Column | None
    ) -> Column:
        """One unscored reward per member: a plugin's, else the given one (raw), else what its rows agree on."""
        if self.has_rollouts and shaped_references_N is not None:
            return shaped_references_N
        channels = (raw_B, rewards_B) if self.spec.overlong_reward_penalty else (rewards_B,)
        inferred = [member.rows for member in members if member.reference is None]
        refuse(
            "split_rows_differ", (b for rows in inferred for b in rows for x_B in channels if x_B[b] != x_B[rows[0]])
        )
        return [rewards_B[m.rows[0]] if m.reference is None else float32(m.reference) for m in members]

    def warn_of_statistics(
        self,
        norm: Norm,
        members: list[Member],
        counts_N: list[bool],
        values_N1: Grid,
        groups: list[Part],
        batch: Part,
    ) -> None:
        parts = groups if by_group(norm) else [batch]
        flat = [part for part in parts if len({*part.elsewhere, *(x for u in part.units for x in values_N1[u])}) == 1]
        self.warn("zero_spread_groups", (b for part in flat for u in part.units for b in members[u].rows))
        if norm.mean_leave1out and norm.mean_level == "batch" and batch.alone and any(counts_N):
            self.warn("loo_alone", members[counts_N.index(True)].rows)
        self.warn("discarded_rows_counted", (b for b, cleared in enumerate(self.cleared_B) if cleared))

    # -- who is compared with whom ------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Logical rollouts in row order; without rollout metadata every row is its own."""
        meta, members = self.meta, list[Member]()
        if meta is None or meta.rollout_groups is None or not any(meta.rollout_groups):  # sizes may be unchecked
            return [Member([b], None) for b in range(self.n_rows)]
        for size, group in zip(meta.traj_group_sizes, meta.rollout_groups):
            counts = [1] * size if group is None else group.row_counts
            references = group.rewards if group is not None and group.rewards else [None] * len(counts)
            for count, reference in zip(counts, references):
                first = members[-1].rows[-1] + 1 if members else 0
                members.append(Member(list(range(first, first + count)), reference))
        return members

    def row_groups(self, norm: Norm) -> list[range]:
        """Prompts of the metadata, else slices of group_size. A tail is in no group; under strict rules it is one."""
        if not by_group(norm):
            return []
        if self.meta is not None:
            ends = [sum(self.meta.traj_group_sizes[: i + 1]) for i in range(len(self.meta.traj_group_sizes))]
            return [range(end - size, end) for end, size in zip(ends, self.meta.traj_group_sizes)]
        full = self.n_rows - self.n_rows % norm.group_size
        tail = range(full, self.n_rows)
        self.warn("rows_outside_groups", {*tail, *self.warnings.get("rows_outside_groups", [])})
        groups = [range(first, first + norm.group_size) for first in range(0, full, norm.group_size)]
        return groups + [tail] if self.strict and tail else groups

    def batch_part(self, block: str, norm: Norm, values_U: Grid, groups: list[Part]) -> Part:
        """All units; and for those of other ranks as many values, with their mean and their spread.

        Statistics see no more of them. Where a batch scale stands beside a group mean, both are of deviations from it.
        """
        whole = Part(list(range(len(values_U))), alone=False)
        if self.meeting is None or "batch" not in (norm.mean_level, norm.std_level):
            return whole
        own = [x for values in values_U for x in values]
        if norm.mean_level == "group":
            means = [mean for means in means_at(norm, values_U, groups, whole)[0] for mean in means]
            squares = sum((x - mean) ** 2 for x, mean in zip(own, means))
            row = [float(len(own)), 0.0, squares]
        else:
            mean = means_of(own, False, False)[0] if own else 0.0
            row = [float(len(own)), mean, sum((x - mean) ** 2 for x in own)]
        rows = self.meeting.rows(block, torch.tensor(row, dtype=torch.float64))
        others = [row for rank, row in enumerate(rows) if rank != self.meeting.ranks.rank]
        return replace(whole, elsewhere=[x for row in others for x in alike(*row)])

    # -- outcome, KL, estimator ---------------------------------------------------------------------------------------

    def place_outcome(self, scores_B: Column) -> Grid:
        outcome_BT, unseen = self.zeros(), []
        for b in (b for b, cleared in enumerate(self.cleared_B) if not cleared):
            column, actions_T = max(self.length_B[b] - 2, 0), self.actions_BT[b]
            if column not in actions_T:
                unseen.append(b)
            if not self.strict:
                outcome_BT[b][column] = scores_B[b]
            elif actions_T:
                outcome_BT[b][actions_T[-1]] = scores_B[b]
        refuse_nonfinite(outcome_BT)
        self.warn("outcome_on_masked_token", unseen)
        return outcome_BT

    def kl_rewards(self, logprobs_BT: Grid, ref_logp_BT: Grid | None) -> Grid:
        kl_rewards_BT = self.zeros()
        if ref_logp_BT is None and self.spec.kl_ctl != 0:
            self.warn("kl_without_reference", (b for b, actions_T in enumerate(self.actions_BT) if actions_T))
        if ref_logp_BT is None and self.strict:
            return kl_rewards_BT
        reference_BT = ref_logp_BT or self.zeros()
        for b, active_T in enumerate(self.active_BT):
            for t in active_T:
                k = divergence(self.spec.kl_estimator, logprobs_BT[b][t] - reference_BT[b][t])
                kl_rewards_BT[b][t] = -self.spec.kl_ctl * min(max(k, -10.0), 10.0)
        refuse_nonfinite(kl_rewards_BT)
        return kl_rewards_BT

    def without_last_token(self, kl_rewards_BT: Grid) -> Grid:
        kl_BT = [list(kl_T) for kl_T in kl_rewards_BT]
        for b in range(self.n_rows):
            kl_BT[b][self.last(b)] = 0.0
        return kl_BT

    def estimate(
        self, outcome_BT: Grid, kl_BT: Grid, folded_BT: Grid, values_BT: Grid, turn_ids_BT: list[list[int]] | None
    ) -> dict[str, Grid]:
        """Advantages, returns and total rewards, by a built-in estimator or the configured one."""
        last_B = [values_T[self.last(b)] for b, values_T in enumerate(values_BT)]
        turn_ids = None if turn_ids_BT is None else self.tensor(turn_ids_BT, torch.int64)
        if self.resolved.estimator is None:
            bootstrap_B = [value if truncated else 0.0 for value, truncated in zip(last_B, self.truncated_B)]
            lambda_B = self.lambdas(turn_ids)
            signal_BT = add(outcome_BT, folded_BT)
            total_BT = add(signal_BT, kl_BT)
            if self.spec.timestep_unit == "token":
                advantages_BT, returns_BT = self.token_gae(total_BT, values_BT, bootstrap_B, lambda_B)
            else:
                assert turn_ids_BT is not None  # admit.py demands them
                advantages_BT, returns_BT = self.turn_gae(signal_BT, values_BT, bootstrap_B, lambda_B, turn_ids_BT)
                advantages_BT = add(advantages_BT, kl_BT)  # per token, and no part of the returns
        else:
            from compiled_adv.stages.plugin import call_estimator

            inputs = TemporalInputs(
                outcome_rewards=self.tensor(outcome_BT),
                kl_rewards=self.tensor(kl_BT),
                process_rewards=self.tensor(folded_BT),
                values=self.tensor(values_BT),
                bootstrap_values=self.tensor(last_B),
                is_truncated=self.tensor(self.truncated_B, torch.bool),
                loss_mask=self.tensor(self.mask_BT),
                turn_ids=turn_ids,
                discount=self.spec.discount,
                config=self.spec.config,
            )
            result = call_estimator(self.resolved.estimator, inputs)
            advantages_BT, returns_BT = numbers(result.advantages), numbers(result.returns)
            total_BT = numbers(result.total_rewards)
        refuse_nonfinite(advantages_BT, returns_BT, total_BT)
        return {"advantages": advantages_BT, "returns": returns_BT, "tot_rewards": total_BT}

    def lambdas(self, turn_ids: Tensor | None) -> Column:
        function = self.resolved.lambda_fn
        if function is None:
            return [float(self.spec.gae_lambda)] * self.n_rows
        unit = "turn" if self.spec.timestep_unit == "turn" else "token"
        context = gae.lambda_context(self.tensor(self.mask_BT), turn_ids, unit)
        lambda_B = numbers(gae.call_lambda(function.fn, function.kwargs, context, at=self.spec.at("actor.gae_lambda")))
        refuse("nonfinite_lambda", (b for b, x in enumerate(lambda_B) if not math.isfinite(x)))
        return lambda_B

    def token_gae(self, rewards_BT: Grid, values_BT: Grid, bootstrap_B: Column, lambda_B: Column) -> tuple[Grid, Grid]:
        """One step per generated token. Other columns show the state that is carried past them."""
        gamma, advantages_BT = self.spec.discount, self.zeros()
        for b in range(self.n_rows):
            running, following = 0.0, bootstrap_B[b]
            for t in range(self.n_columns - 2, -1, -1):
                if self.mask_BT[b][t]:
                    delta = rewards_BT[b][t] + gamma * following - values_BT[b][t]
                    running, following = delta + gamma * lambda_B[b] * running, values_BT[b][t]
                advantages_BT[b][t] = running
        return advantages_BT, add(advantages_BT, values_BT)

    def turn_gae(
        self, rewards_BT: Grid, values_BT: Grid, bootstrap_B: Column, lambda_B: Column, turn_ids_BT: list[list[int]]
    ) -> tuple[Grid, Grid]:
        """One step per turn that has active tokens; all of them share its advantage and its return."""
        gamma, advantages_BT, returns_BT = self.spec.discount, self.zeros(), [list(v_T) for v_T in values_BT]
        for b, active_T in enumerate(self.active_BT):
            running, following = 0.0, bootstrap_B[b]
            for turn in sorted({turn_ids_BT[b][t] for t in active_T}, reverse=True):
                columns = [t for t in active_T if turn_ids_BT[b][t] == turn]
                value = values_BT[b][columns[0]]
                delta = sum(rewards_BT[b][t] for t in columns) + gamma * following - value
                running, following = delta + gamma * lambda_B[b] * running, value
                for t in columns:
                    advantages_BT[b][t], returns_BT[b][t] = running, running + value
        return advantages_BT, returns_BT

    # -- advantage normalisation, process shaping ---------------------------------------------------------------------

    def normalise_advantages(self, advantages_BT: Grid) -> Grid:
        norm = self.spec.adv_norm
        if norm is None:
            return advantages_BT
        groups, members = [], self.members()
        for rows in self.row_groups(norm):
            voices = sum(member.rows[0] in rows for member in members)  # one rollout, in however many rows
            groups.append(Part(list(rows), alone=voices == 1))
        values_B = [[advantages_BT[b][t] for t in active_T] for b, active_T in enumerate(self.active_BT)]
        batch = self.batch_part("adv_norm", norm, values_B, groups)
        if not any(self.active_BT) and not batch.elsewhere:
            return advantages_BT
        means_B, scale_B = moments(norm, values_B, groups, batch)
        out_BT = self.zeros()
        for b, active_T in enumerate(self.active_BT):
            for t, x, mean in zip(active_T, values_B[b], means_B[b]):
                out_BT[b][t] = divide(x - mean, scale_B[b])
        refuse_nonfinite(out_BT)
        return out_BT

    @property
    def process(self) -> Any:
        """The configured process shaping, a name or a plugin, else the call's."""
        return self.call.advantage_shaping_mode if self.resolved.process is None else self.resolved.process

    def shape_advantages(self, advantages_BT: Grid, direct_BT: Grid | None) -> Grid:
        if not isinstance(self.process, str):  # a plugin runs with or without token rewards
            from compiled_adv.stages.plugin import call_process

            inputs = ProcessAdvantageInputs(
                advantages=self.tensor(advantages_BT),
                token_rewards=None if direct_BT is None else self.tensor(direct_BT),
                loss_mask=self.tensor(self.mask_BT),
                config=self.spec.config,
            )
            return numbers(call_process(self.process, inputs))
        if direct_BT is None:
            return advantages_BT
        out_BT, flipped = [list(advantages_T) for advantages_T in advantages_BT], []
        for b, active_T in enumerate(self.active_BT):
            for t in active_T:
                advantage, direct = advantages_BT[b][t], direct_BT[b][t]
                if self.process == "additive":
                    out_BT[b][t] = advantage + direct
                elif self.process == "gvpo":
                    out_BT[b][t] = self.gvpo(advantage, direct)
                elif advantage >= 0:
                    out_BT[b][t] = advantage * direct
                elif direct > 0:
                    out_BT[b][t] = direct
                    flipped.append(b)
        self.warn("weighted_flip", flipped)
        refuse_nonfinite(out_BT)
        return out_BT

    def gvpo(self, advantage: float, direct: float) -> float:
        # kwargs of the configuration win over the call's values one by one
        kwargs = self.resolved.process_kwargs
        eps = float32(kwargs.get("zero_eps", self.call.gvpo_zero_eps))
        if direct >= 0:
            return advantage
        if float32(advantage) > eps:  # in float32, as both are given: an advantage of 0.1 is no more than 0.1
            return 0.0
        if float32(advantage) < -eps:
            return advantage * (1 + kwargs.get("negative_scale", self.call.gvpo_negative_scale))
        return -kwargs.get("zero_penalty", self.call.gvpo_zero_penalty)

    # -- what compute.stats() says of the batch ------------------------------------------------------------------------

    def measure_rows(self, rewards_B: Column) -> dict[str, float]:
        found = {"rows": float(self.n_rows), "truncated": sum(self.truncated_B) / self.n_rows}
        found["padding"] = 1 - sum(self.length_B) / (self.n_rows * self.n_columns)
        found |= summary("reward", rewards_B) | summary("response_length", [float(len(t)) for t in self.active_BT])
        meta, norms = self.meta, (self.spec.reward_norm, self.spec.adv_norm)
        sizes = [norm.group_size for norm in norms if norm is not None and by_group(norm)]
        if meta is not None and covers(meta.traj_group_sizes, self.n_rows):
            group_B = [i for i, size in enumerate(meta.traj_group_sizes) for _ in range(size)]
        else:
            group_B = [b // (sizes[0] if sizes else 1) for b in range(self.n_rows)]
        voices: dict[int, Column] = {}
        for member in self.members():
            reference = member.reference
            voices.setdefault(group_B[member.rows[0]], []).append(
                rewards_B[member.rows[0]] if reference is None else float32(reference)
            )
        several = [scores for scores in voices.values() if len(scores) > 1]
        if several:
            found["groups/zero_spread"] = sum(min(scores) == max(scores) for scores in several) / len(several)
        return found | {"groups": float(len(several))}

    def measure_advantages(self, advantages_BT: Grid) -> dict[str, float]:
        active = self.on_active(advantages_BT)
        return {"tokens": float(len(active))} | summary("advantage", active)

    def measure_shaping(self, unshaped_BT: Grid, advantages_BT: Grid) -> dict[str, float]:
        pairs = [*zip(map(float32, self.on_active(unshaped_BT)), self.on_active(advantages_BT))]
        if not pairs:
            return {}
        flipped, cleared = sum(x * y < 0 for x, y in pairs), sum(x != 0 and y == 0 for x, y in pairs)
        return {"process/flipped": flipped / len(pairs), "process/cleared": cleared / len(pairs)}

    def measure_values(self, returns_BT: Grid, values_BT: Grid) -> dict[str, float]:
        returns = self.on_active(returns_BT)
        if self.data.get("values") is None or not returns:
            return {}
        missed = [x - value for x, value in zip(returns, self.on_active(values_BT))]
        spread, of = summary("missed", missed)["missed/std"], summary("returns", returns)["returns/std"]
        varies = of > 1e-6 * spread  # less is the rounding of equal returns
        return {"values/explained_variance": 1 - (spread / of) ** 2} if varies else {}

    def measure_kl(self, logprobs_BT: Grid, ref_logp_BT: Grid | None) -> dict[str, float]:
        if ref_logp_BT is None or not any(self.active_BT):
            return {}
        pairs = zip(self.on_active(logprobs_BT), self.on_active(ref_logp_BT))
        kl = [min(max(divergence(self.spec.kl_estimator, x - y), -10.0), 10.0) for x, y in pairs]
        return {"kl/mean": sum(kl) / len(kl)}

    def on_active(self, x_BT: Grid) -> Column:
        return [x_BT[b][t] for b, active_T in enumerate(self.active_BT) for t in active_T]


# -- numbers ----------------------------------------------------------------------------------------------------------


def numbers(x: Tensor) -> list[Any]:
    """A tensor as Python floats. float32 is the contract, so whatever came in is read as float32."""
    return x.detach().to(torch.float32).tolist()


def float32(x: float) -> float:
    return ctypes.c_float(x).value


def add(*channels_BT: Grid) -> Grid:
    return [[sum(cell) for cell in zip(*rows)] for rows in zip(*channels_BT)]


def summary(name: str, values: Column) -> dict[str, float]:
    if not values:
        return {}
    mean = sum(values) / len(values)
    std = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    return {f"{name}/mean": mean, f"{name}/std": std, f"{name}/min": min(values), f"{name}/max": max(values)}


def divide(x: float, y: float) -> float:
    """A zero scale gives inf or nan, which is then refused as a non-finite result."""
    return x / y if y else x * math.inf


def divergence(kind: str, d: float) -> float:
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return math.expm1(-d) + d if d > -700.0 else math.inf  # exp overflows beyond, and the clamp holds anyway


def refuse(flag: str, rows: Iterable[int]) -> None:
    found = sorted(set(rows))
    if found:
        raise Refused(flag, found)


def refuse_nonfinite(*channels_BT: Grid) -> None:
    bad = (b for x_BT in channels_BT for b, x_T in enumerate(x_BT) if not all(math.isfinite(float32(x)) for x in x_T))
    refuse("nonfinite_result", bad)


def read_active(flag: str, x_BT: Grid, active_BT: list[list[bool]]) -> Grid:
    """Non-finite numbers: an error in an active slot, 0 in a masked one."""
    bad = (b for b, x_T in enumerate(x_BT) for t, x in enumerate(x_T) if active_BT[b][t] and not math.isfinite(x))
    refuse(flag, bad)
    return [[x if math.isfinite(x) else 0.0 for x in x_T] for x_T in x_BT]


# -- statistics -------------------------------------------------------------------------------------------------------


def has_level(norm: Norm | None) -> bool:
    return norm is not None and (norm.mean_level is not None or norm.std_level is not None)


def by_group(norm: Norm) -> bool:
    return "group" in (norm.mean_level, norm.std_level)


def parts_at(level: str | None, groups: list[Part], batch: Part) -> list[Part]:
    return {"batch": [batch], "group": groups, None: []}[level]


def means_at(norm: Norm, values_U: Grid, groups: list[Part], batch: Part) -> tuple[Grid, Column]:
    """Mean of every value, and of what stands for those elsewhere; 0 in no part of the mean's level."""
    means_U, elsewhere = [[0.0] * len(values) for values in values_U], [0.0] * len(batch.elsewhere)
    for part in parts_at(norm.mean_level, groups, batch):
        values = [x for u in part.units for x in values_U[u]] + part.elsewhere
        means = iter(means_of(values, norm.mean_leave1out, part.alone))
        for u in part.units:
            means_U[u] = [next(means) for _ in values_U[u]]
        elsewhere = [*means] if part is batch else elsewhere
    return means_U, elsewhere


def moments(norm: Norm, values_U: Grid, groups: list[Part], batch: Part) -> tuple[Grid, Column]:
    """Mean of every value, and scale of every unit. A unit in no group has mean 0 and std 0 at a group level."""
    means_U, elsewhere = means_at(norm, values_U, groups, batch)
    scales_U = [1.0 if norm.std_level is None else norm.eps] * len(values_U)
    for part in parts_at(norm.std_level, groups, batch):
        offsets = [x - mean for u in part.units for x, mean in zip(values_U[u], means_U[u])]
        offsets += [x - mean for x, mean in zip(part.elsewhere, elsewhere)]
        std = std_of(offsets, norm.std_unbiased, part.alone)
        for u in part.units:
            scales_U[u] = std + norm.eps
    return means_U, scales_U


def means_of(values: Column, leave1out: bool, alone: bool) -> Column:
    """What each value of a part is compared with."""
    n = len(values)
    if n == 0 or (leave1out and alone):
        return values
    if leave1out and n == 1:
        return [0.0]
    # around the first value, so that equal values have exactly themselves as mean, however many they are
    offsets = [x - values[0] for x in values]
    if leave1out:
        return [values[0] + (sum(offsets) - offset) / (n - 1) for offset in offsets]
    return [values[0] + sum(offsets) / n] * n


def alike(n: float, mean: float, squares: float) -> Column:
    """n values with this mean and this sum of squared deviations: pairs beside the mean, an odd one on it."""
    count = int(n)
    beside = math.sqrt(squares / (count - count % 2)) if count > 1 else 0.0
    return [mean - beside, mean + beside] * (count // 2) + [mean] * (count % 2)


def std_of(offsets: Column, unbiased: bool, alone: bool) -> float:
    n = len(offsets)
    if n == 0 or (unbiased and (n == 1 or alone)):
        return 1.0
    return math.sqrt(sum(x * x for x in offsets) / (n - 1 if unbiased else n))
