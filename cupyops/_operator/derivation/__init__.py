"""What an operator gets of its three roles: the registered op, autograd, recorded plans, autocast, sharding rules."""
