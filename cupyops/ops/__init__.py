"""The operators: one file tells one operator's whole story. One line here exports it."""

from .relu import relu as relu
from .gelu import gelu as gelu
from .silu import silu as silu
