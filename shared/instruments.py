"""What a break_it.py without edits of the build still needs; it goes when the last one is converted."""

from collections.abc import Callable
from dataclasses import dataclass

from shared import sabotage
from shared.sabotage import Case, Instrument, Outcome, Patient, Reading, examine

__all__ = ["Case", "Instrument", "Outcome", "Reading", "Sabotage", "examine"]


@dataclass(frozen=True, kw_only=True)
class Sabotage(sabotage.Sabotage):
    """Damage that imitates an edit: the line before and after are told, not run."""

    before: str
    after: str
    damage: Callable[[Patient], Patient]

    def shown(self) -> str:
        before = [f"- {line}" for line in self.before.split("\n")]
        after = [f"+ {line}" for line in self.after.split("\n")]
        return "\n".join([*before, *after])
