"""The steps of the default computation, one file per step, in this order:

    alignment, length_penalty, outcome_reward_shaping (plugin), reward_norm, logprobs, kl_rewards,
    process_rewards, estimator, adv_norm, process_adv_shaping; strict.py holds what `rules: strict` replaces.

Dim suffixes: B rows, T tokens, U statistics units (rows or logical rollouts, padded to B). "own" marks a tensor at
the token's own position; everything else is next-token aligned: entry t is about token t+1.
"""
