"""Training and evaluation mode of a whole model, where its user keeps parts of it in evaluation mode."""

from __future__ import annotations

from torch import nn

NAMED = 3


class Modes:
    """Sets the mode of a model as its user's training loop finds it.

    A model in training mode may hold submodules that were put in evaluation mode (a frozen batch norm): they stay so.
    In a model that is in evaluation mode as a whole, as loading leaves it, the flags tell nothing: all of it trains.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept = [m for m in model.modules() if not m.training] if model.training else []

    def set(self, training: bool) -> None:
        """Put the model in a mode: `model.train(training)`, but what was kept in evaluation mode stays so."""
        self.model.train(training)
        for module in self.kept:
            module.training = False

    def kept_paths(self) -> list[str]:
        """Outermost submodules that stay in evaluation mode; leaves the model in training mode."""
        self.model.train()
        # What the model's own train() leaves in evaluation mode is no surprise to anyone.
        kept = {m for m in self.kept if m.training}
        self.set(True)
        found: list[str] = []
        for path, module in self.model.named_modules():
            if module in kept and not any(path.startswith(f"{outer}.") for outer in found):
                found.append(path)
        return found

    def sentences(self) -> list[str]:
        """What stays in evaluation mode, for the person who reads the plan; leaves the model in training mode."""
        paths = self.kept_paths()
        if not paths:
            return []
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        stay = "stay" if len(paths) > 1 else "stays"
        return [
            f"{', '.join(paths[:NAMED])}{more} {stay} in evaluation mode in training too, as in the model given; "
            "call model.train() before partitioning to train all of it"
        ]
