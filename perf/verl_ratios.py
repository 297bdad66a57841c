"""verl's own estimators against ours on the same tensors, in turns: `python -m perf.verl_ratios`, in .venv-peers.

Answers are compared before they count, masked entries included. Prompts have 8 responses; masks are contiguous.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from perf import cases
from perf.ratios import interleave, ratio
from perf.shapes import GROUP, LADDERS, make_batch


def batch(rows: int, tokens: int) -> dict[str, Any]:
    """What verl's functions take, from a batch of the ladder."""
    data, _ = make_batch(rows, tokens, channels=("values",))
    mask_BT = data["loss_mask"].long().roll(-1, -1)
    last_B = (mask_BT * torch.arange(tokens)).argmax(-1)
    rewards_BT = 0.01 * data["logprobs"].roll(-1, -1) * mask_BT
    rewards_BT[torch.arange(rows), last_B] += data["rewards"]
    index = np.array([f"prompt {row // GROUP}" for row in range(rows)], dtype=object)
    return {"token_level_rewards": rewards_BT, "values": data["values"], "response_mask": mask_BT, "index": index}


def calls(name: str, own: Any, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """verl's function and ours, as verl's dispatcher calls them."""
    from verl.trainer.config import AlgoConfig

    from compiled_adv.integrations import verl

    config = AlgoConfig(gamma=0.99, lam=0.95)
    names = {"gae": ("token_level_rewards", "values", "response_mask")}
    arguments = {key: given[key] for key in names.get(name, ("token_level_rewards", "response_mask", "index"))}
    arguments |= {"gamma": config.gamma, "lam": config.lam} if name == "gae" else {"config": config}
    theirs = getattr(own, verl.KNOWN[name][0])
    return {"verl": lambda: theirs(**arguments), "ours": lambda: verl.ESTIMATORS[name](**arguments)}


def main() -> None:
    from verl.trainer.ppo import core_algos

    from compiled_adv.integrations import verl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", choices=tuple(LADDERS), default="small")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    chosen = parser.parse_args()
    print(cases.stamp(torch.get_num_threads()))
    for rows, tokens in LADDERS[chosen.ladder][1:]:
        given = batch(rows, tokens)
        for name in verl.ESTIMATORS:
            runs = calls(name, core_algos, given)
            pairs = zip(runs["ours"](), runs["verl"](), strict=True)
            off = max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)
            assert off < cases.TOLERANCE, f"{name} differs by {off:.3g}"
            times = interleave(runs, seconds=chosen.seconds, rounds=(3, 100))
            milliseconds = "  ".join(f"{who} {1e3 * median(each):9.3f} ms" for who, each in times.items())
            times_verl = ratio(times["verl"], times["ours"])[0]
            print(f"{name:20} {rows:4} x {tokens:<5} {milliseconds}  verl takes {times_verl:.1f}x  off {off:.1e}")


if __name__ == "__main__":
    main()
