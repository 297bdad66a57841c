"""Trainers' own hooks, one file per trainer. A trainer is imported only by its file, and only when that file is used."""
