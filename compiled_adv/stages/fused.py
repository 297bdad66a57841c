"""Takes several stages in order; gives one stage that runs them and returns what is read outside."""

from compiled_adv.stage import Stage


class Fused(Stage):
    """Stages whose channels between them are no longer the Pipeline's.

    `steps`: each stage, and where its arguments stand in the growing list of channels (-1: absent). `results`: where
    what leaves stands in it.
    """

    steps: tuple[tuple[Stage, tuple[int, ...]], ...]
    results: tuple[int, ...]

    def forward(self, *channels):
        known = list(channels)
        for stage, at in self.steps:
            result = stage.forward(*(None if i < 0 else known[i] for i in at))
            known += result if isinstance(result, tuple) else (result,)
        results = tuple(known[i] for i in self.results)
        return results if len(results) > 1 else results[0]

    def __str__(self) -> str:
        return f"Fused[{' '.join(str(stage) for stage, _ in self.steps)}]"
