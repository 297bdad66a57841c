"""Takes what a batch was and what came of it; gives the numbers of `compute.stats()`, float64 in the order of STATS.

Sums per row are such that a compiler makes them in the passes over memory that are there anyway; BatchStats merges them
over rows. Nothing else reads them. What cannot be measured is NaN.
"""

import torch
from torch import Tensor

from compiled_adv import kernels
from compiled_adv.channel import STATS
from compiled_adv.stage import Stage
from compiled_adv.stages.forms import clean, row_moments
from compiled_adv.stages.kl_rewards import LIMIT, KLRewards
from compiled_adv.stages.reward_norm import Score, Units
from compiled_adv.stages.select import fact, select

INF = float("inf")


class AdvantageSums(Stage):
    """Count, moments, smallest and largest of each row's active advantages."""

    slot = "actor.advantage.stats"
    reads = ("advantages", "loss_mask")
    writes = ("active", "advantage_mean", "advantage_m2", "advantage_min", "advantage_max")

    def forward(self, advantages_BT, mask_BT):
        n_B = mask_BT.sum(1).to(torch.float64)  # whole numbers: exact in any order
        least_B = torch.where(mask_BT > 0, advantages_BT, INF).amin(1)
        most_B = torch.where(mask_BT > 0, advantages_BT, -INF).amax(1)
        return n_B, *row_moments(advantages_BT, mask_BT, n_B), least_B, most_B


class ShapingSums(Stage):
    """Active tokens of each row whose advantage process shaping turned over, and made 0."""

    slot = "actor.advantage.stats"
    reads = ("unshaped", "advantages", "loss_mask")
    writes = ("flipped", "cleared")

    def forward(self, unshaped_BT, advantages_BT, mask_BT):
        # of opposite signs; scaled, lest the product of two small numbers be 0
        flipped_BT = torch.where(unshaped_BT * 1e30 * advantages_BT < 0, mask_BT, 0.0)
        was_BT = torch.where(unshaped_BT == 0, 0.0, mask_BT)
        return flipped_BT.sum(1), torch.where(advantages_BT == 0, was_BT, 0.0).sum(1)


class ReturnSums(Stage):
    """Moments of each row's returns."""

    slot = "actor.advantage.stats"
    reads = ("returns", "loss_mask", "active")
    writes = ("return_mean", "return_m2")

    def forward(self, returns_BT, mask_BT, n_B):
        return row_moments(returns_BT, mask_BT, n_B)


class MissedSums(Stage):
    """Moments of what each row's values miss of its returns."""

    slot = "actor.advantage.stats"
    reads = ("returns", "values", "loss_mask", "active")
    writes = ("missed_mean", "missed_m2")

    def forward(self, returns_BT, values_BT, mask_BT, n_B):
        return row_moments(returns_BT - clean(values_BT), mask_BT, n_B)


class KLSums(Stage):
    """Sum of each row's divergence from the reference, limited as in the penalty but without its weight."""

    slot = "actor.advantage.stats"
    reads = ("logprobs", "ref_logp", "loss_mask")
    writes = ("kl_sum",)

    estimator: str

    def forward(self, logprobs_BT, ref_logp_BT, mask_BT):
        kl_BT = KLRewards(1.0, self.estimator).divergence(logprobs_BT, ref_logp_BT).clamp(-LIMIT, LIMIT)
        return select(mask_BT, kl_BT).sum(1, dtype=torch.float64)


class BatchStats(Stage):
    """All of STATS. Groups are those of the metadata, else slices of `group_size` rows."""

    slot = "actor.advantage.stats"
    mixes_rows = True
    reads = (
        *("rewards", "references", "member_of_row", "first_row", "group_of_row", "facts", "is_truncated", "lengths"),
        *AdvantageSums.writes,
        *(f"{name}?" for name in ShapingSums.writes + ReturnSums.writes + MissedSums.writes + KLSums.writes),
    )
    writes = ("stats",)

    group_size: int

    def forward(self, *channels):
        it = dict(zip((name.removesuffix("?") for name in self.reads), channels, strict=True))
        rows, tokens = (fact(it["facts"], name).to(torch.float64) for name in ("rows", "tokens"))
        n_B = it["active"]
        real_B = torch.arange(len(n_B), device=n_B.device) < rows
        one_B, zeros_B = real_B.to(torch.float64), torch.zeros_like(n_B)
        n, mean, m2 = whole(n_B, it["advantage_mean"], it["advantage_m2"])
        found = {
            "rows": rows,
            "tokens": n,
            "truncated": (real_B & (it["is_truncated"] > 0)).sum() / rows,
            "padding": 1 - torch.where(real_B, it["lengths"], 0).sum() / (rows * tokens),
            "advantage/mean": if_any(mean, n),
            "advantage/std": (m2 / n).sqrt(),
            "advantage/min": if_any(it["advantage_min"].amin(), n),
            "advantage/max": if_any(it["advantage_max"].amax(), n),
        }
        found |= self.groups(it, real_B)
        for name, x_B in (("reward", it["rewards"].to(torch.float64)), ("response_length", n_B)):
            _, mean, m2 = whole(one_B, x_B, zeros_B)
            found |= {f"{name}/mean": mean, f"{name}/std": (m2 / rows).sqrt()}
            found |= {f"{name}/min": torch.where(real_B, x_B, INF).amin()}
            found |= {f"{name}/max": torch.where(real_B, x_B, -INF).amax()}
        for name in ShapingSums.writes:
            if it[name] is not None:
                found[f"process/{name}"] = it[name].sum() / n
        if it["kl_sum"] is not None:
            found["kl/mean"] = whole(one_B, it["kl_sum"], zeros_B)[1] * rows / n
        if it["return_m2"] is not None:
            m2, missed = (whole(n_B, it[f"{of}_mean"], it[f"{of}_m2"])[2] for of in ("return", "missed"))
            varies = m2 > 1e-12 * missed  # less is the rounding of equal returns
            found["values/explained_variance"] = torch.where(varies, 1 - missed / m2, float("nan"))
        nothing = torch.full_like(rows, float("nan"))
        # of three dims, so that nobody takes it for numbers of rows or tokens
        return torch.stack([found.get(name, nothing).to(torch.float64) for name in STATS])[None, None]

    def groups(self, it, real_B):
        """How many groups of several rollouts, and the share of them in which all rewards are equal."""
        order_B = torch.arange(len(real_B), device=real_B.device)
        group_B = torch.where(fact(it["facts"], "groups_given") > 0, it["group_of_row"], order_B // self.group_size)
        units = ("rewards", "references", "member_of_row", "first_row")
        group_B = torch.where(real_B, group_B, -1)
        cells = Units(Score(0.0, 1.0, INF), False).forward(
            *(it[name] for name in units), group_B, it["is_truncated"], it["facts"]
        )
        n_G, _, m2_G = kernels.merge_moments(*cells[:4])
        several = (n_G > 1).sum()
        return {"groups": several, "groups/zero_spread": ((n_G > 1) & (m2_G == 0)).sum() / several}


def whole(n_B: Tensor, mean_B: Tensor, m2_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of all rows; what rounding makes of equal numbers is no spread."""
    n = n_B.sum()
    mean_B = torch.where(n_B > 0, mean_B, 0.0)
    mean = (n_B * mean_B).sum() / n
    m2 = (m2_B + n_B * (mean_B - mean).square()).sum()
    return n, mean, torch.where(m2 > 1e-24 * n * mean.square(), m2, 0.0)


def if_any(x: Tensor, n: Tensor) -> Tensor:
    """NaN where nothing was counted."""
    return torch.where(n > 0, x, float("nan"))
