"""Weight sync for loops that go on meanwhile: the blocking ``WeightSyncer``, awaited."""

from __future__ import annotations

import asyncio

from hearth.sdk import WeightSyncer


class Publisher:
    """Saves snapshots and has them served, each in a thread of its own."""

    def __init__(self, syncer: WeightSyncer) -> None:
        self._syncer = syncer

    async def save(self, name: str) -> str:
        """Save the policy's weights as they are now; returns the snapshot's identity."""
        return await asyncio.to_thread(self._syncer.save_only, name)

    async def serve(self, identity: str) -> int:
        """Return the deployment's version once it serves the snapshot.

        Raises:
            EngineError: the deployment did not take the snapshot.
        """
        await asyncio.to_thread(self._syncer.hotload, identity)
        return self._syncer.version

    async def publish(self, name: str) -> int:
        """Save and serve."""
        return await self.serve(await self.save(name))
