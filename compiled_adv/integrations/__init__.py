"""Trainers' own hooks, one file per trainer. A trainer is imported only here, and only when its file is used."""
