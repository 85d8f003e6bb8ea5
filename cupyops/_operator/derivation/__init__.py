"""Derivation of an operator from its three roles: the registered op, autograd, recorded plans, autocast, sharding rules."""
