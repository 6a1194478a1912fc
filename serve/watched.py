"""An engine whose prompts are measured now and then (`serve.drift`)."""

from collections.abc import Callable
from dataclasses import replace

from serve.drift import DriftMonitor
from serve.engine import Engine
from serve.limits import Limits
from serve.request import EngineStats, GenerationRequest, OutputCallback, TokenCallback
from serve.runner import Runner


class WatchedEngine(Engine):
    """As `Engine`, which knows nothing of it: prompts that it takes in are offered to the monitor."""

    def __init__(
        self, runner: Runner, limits: Limits, drift: DriftMonitor, *, num_pages: int, seed: int = 0
    ) -> None:
        super().__init__(runner, limits, num_pages=num_pages, seed=seed)
        self._drift = drift

    def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        """See EngineProtocol."""
        super().submit(request, on_output, on_token)
        self._drift.offer(request.prompt_ids)

    def stats(self) -> EngineStats:
        """The snapshot of the last step, and of the last measurement."""
        return replace(super().stats(), drift=self._drift.stats())

    def start(self, progress: Callable[[str], None] | None = None) -> None:
        """See Engine. What measures is compiled first: whatever compiles after the runner's warm-up is counted."""
        if progress:
            progress("measuring of prompts")
        self._drift.warm_up(self._runner.params)
        super().start(progress)
        self._drift.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the loop, then the measuring."""
        super().stop(timeout)
        self._drift.stop()
