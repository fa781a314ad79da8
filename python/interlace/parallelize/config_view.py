"""A module's own view of a config that the whole model shares: a few numbers differ, the rest is the config's."""

from __future__ import annotations

from typing import Any

__all__ = ["ConfigView"]


class ConfigView:
    """Reads `numbers` first and `config` for everything else; assignments go to `config`.

    Model code that counts heads by `self.config.num_attention_heads` then counts those of its rank, while
    `model.config`, and what it saves, keeps the numbers of the whole model.
    """

    def __init__(self, config: Any, numbers: dict[str, int]) -> None:
        self.__dict__.update(_config=config, _numbers=dict(numbers))
        self.__dict__.update(numbers)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_numbers"):  # a copy in the making has neither yet
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._numbers:
            raise AttributeError(
                f"config.{name} of a split module is the number of this rank; it cannot be set"
            )
        setattr(self._config, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ConfigView({self._numbers}, of {type(self._config).__name__})"
