"""Gives the operations that the compilers lack: the masked backward recurrence and fixed-order moments."""

from compiled_adv.kernels.blocked import backward_recurrence, merge_moments, row_moments, turn_totals

__all__ = ["backward_recurrence", "merge_moments", "row_moments", "turn_totals"]
