"""Runs in a process of its own, as a verl worker does: computes every estimator with verl's own dispatcher, ours and
verl's, and prints what differs as JSON. Arguments: what to do."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

NAMES = ("gae", "grpo", "rloo", "reinforce_plus_plus")


def proto(seed: int, rows: int = 12, tokens: int = 40) -> Any:
    """Prompts of one, two and more responses in mixed order, holes in masks, rewards on every token."""
    from verl import DataProto

    generator = torch.Generator().manual_seed(seed)
    length_B1 = torch.randint(2, tokens + 1, (rows, 1), generator=generator)
    mask_BT = (torch.arange(tokens) < length_B1).long()
    mask_BT[:, 1:] *= (torch.rand(rows, tokens - 1, generator=generator) < 0.9).long()
    rewards_BT = 0.1 * torch.randn(rows, tokens, generator=generator) * mask_BT
    rewards_BT[:, 0] += torch.randint(0, 2, (rows,), generator=generator)
    tensors = {
        "token_level_rewards": rewards_BT,
        "values": torch.randn(rows, tokens, generator=generator),
        "response_mask": mask_BT,
    }
    uid = np.array([f"prompt {max(int(x), 0)}" for x in torch.randint(-2, rows // 2, (rows,), generator=generator)])
    uid[0] = "alone"
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid.astype(object)})


def advantages(name: str, data: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """What verl's own dispatcher makes of a batch."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    config = AlgoConfig(adv_estimator=name, **settings)
    std = config.norm_adv_by_std_in_grpo
    out = compute_advantage(
        data, adv_estimator=name, gamma=config.gamma, lam=config.lam, norm_adv_by_std_in_grpo=std, config=config
    )
    return {key: out.batch[key].clone() for key in ("advantages", "returns")}


def difference(ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """The largest difference of any entry, masked ones included, against 1 + |verl's|."""
    assert all(ours[key].dtype == own[key].dtype and ours[key].shape == own[key].shape for key in own)
    return max(((ours[key] - own[key]).abs() / (1 + own[key].abs())).max().item() for key in own)


SETTINGS = ({"gamma": 1.0, "lam": 1.0}, {"gamma": 0.99, "lam": 0.9}, {"norm_adv_by_std_in_grpo": False})


def compare(batches: int) -> dict[str, float]:
    """The largest difference of each estimator over random batches; gae is the replaced one."""
    import verl  # noqa: F401, whose import registers ours

    from compiled_adv.integrations import verl as ours

    worst = dict.fromkeys(NAMES, 0.0)
    for seed in range(batches):
        settings = SETTINGS[seed % len(SETTINGS)]
        for name in NAMES:
            ours.disable()
            own = advantages(name, proto(seed), **settings)
            ours.enable(["gae"])
            got = advantages("gae" if name == "gae" else f"compiled_{name}", proto(seed), **settings)
            worst[name] = max(worst[name], difference(got, own))
    return worst


def registered() -> dict[str, Any]:
    """What a worker finds after nothing but `import verl`."""
    import verl  # noqa: F401
    from verl.trainer.ppo import core_algos

    own = {name: fn.__module__ for name, fn in core_algos.ADV_ESTIMATOR_REGISTRY.items()}
    return {"registry": own, "gae": core_algos.compute_gae_advantage_return.__module__}


if __name__ == "__main__":
    todo = sys.argv[1]
    print("RESULT " + json.dumps(registered() if todo == "registered" else compare(int(todo))))
