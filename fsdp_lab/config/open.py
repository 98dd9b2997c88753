"""Groups that take any key: a key that the dataclass does not know is an argument of the user's callable."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Self

from fsdp_lab.config.convert import from_dict


@dataclasses.dataclass
class OpenGroup:
    """A group with a field `arguments`, whose items appear among the group's own keys: typed, in YAML and in MLflow."""

    @classmethod
    def of_keys(cls, values: dict[str, Any], prefix: str) -> Self:
        """Build the group from the values typed below it.

        Args:
            values: key -> value; unknown keys become arguments, without `_target_` of the default one.
            prefix: the group's dotted path, such as `model.`, for messages.

        Raises:
            ConfigError: an own key has a value of another type.
        """
        names = _typed_names(cls)
        own = {names[name]: value for name, value in values.items() if name in names}
        arguments = {str(name): value for name, value in values.items() if name not in names}
        made: Any = from_dict(cls, own, prefix)
        made.arguments = arguments if "_target_" in values else {**made.arguments, **arguments}
        return made  # type: ignore[no-any-return]

    def to_keys(self) -> dict[str, Any]:
        own = {typed: getattr(self, name) for typed, name in _typed_names(type(self)).items()}
        return {"_target_": own.pop("_target_"), **typing.cast(Any, self).arguments, **own}


def _typed_names(cls: type) -> dict[str, str]:
    """Return the name that is typed -> the field, without `arguments`."""
    fields = (f for f in dataclasses.fields(cls) if f.name != "arguments")  # type: ignore[arg-type]
    return {f.metadata["key"].named or f.name: f.name for f in fields}
