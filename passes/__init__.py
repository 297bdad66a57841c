"""Gives the graph passes of the compiled backend, in order. Imported as compiled_adv.passes."""

from compiled_adv.rewrite import Pass

DEFAULT: tuple[Pass, ...] = ()
