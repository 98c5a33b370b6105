"""Objects by hand: built where they stay, freed before their last ref goes. `free` is Ray's; `create` is our own."""

from hpcray.api.by_hand import Buffer, create, free

__all__ = ["Buffer", "create", "free"]
