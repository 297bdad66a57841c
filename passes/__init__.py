"""Takes nothing; gives the graph passes of the compiled backend. Imported as compiled_adv.passes."""
