"""Model inputs that carry the experts which a sampler chose."""

from __future__ import annotations

import tinker


class RoutedModelInput(tinker.ModelInput):
    """Token ids, and for each the experts that a mixture-of-experts model is to send it to.

    ``routing_matrices`` are one text per input token, as ``SampledCompletion`` has them; an empty
    one leaves the choice to the trainer's own router. A trainer of a dense model pays no heed.
    """

    routing_matrices: list[str]

    def unrouted(self) -> tinker.ModelInput:
        """The same tokens alone."""
        return tinker.ModelInput(chunks=self.chunks)
